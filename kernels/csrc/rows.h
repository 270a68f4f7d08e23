/* A decoder layer's rows: the products, and what happens between them.  Included once per instruction set. */

INLINE float inverse_root_mean_square(const void *x, int64_t at, const int64_t type, int64_t size, float epsilon) {
  VF sum = {0};
  EACH(size, {
    VF value = LOAD(x, at + i, type);
    sum += value * value;
  })
  return 1.0f / sqrtf(total(sum) / size + epsilon);
}

INLINE void norm_rows(const Norm *norm, const void *x, const int64_t type, int64_t count, int64_t size, float *y) {
  for (int64_t row = 0; row < count; row++) {
    int64_t at = row * size;
    float factor = inverse_root_mean_square(x, at, type, size, norm->epsilon);
    EACH(size, STORE(y, at + i, LOAD(x, at + i, type) * factor * LOAD(norm->weight, i, FLOAT32), FLOAT32);)
  }
}

/* y may be x if that is float32. */
TARGET static void norm(const Norm *norm, const void *x, int64_t type, int64_t count, int64_t size, float *y) {
  if (type == FLOAT32) norm_rows(norm, x, FLOAT32, count, size, y);
  else norm_rows(norm, x, BFLOAT16, count, size, y);
}

/* out = x + norm(y); out and x are of this type, and may be the same.  y is not kept. */
INLINE void add_rows(const void *x, const int64_t type, const Norm *norm, float *y, int64_t count, int64_t size,
                     void *out) {
  if (norm->weight) norm_rows(norm, y, FLOAT32, count, size, y);
  EACH(count * size, STORE(out, i, LOAD(x, i, type) + LOAD(y, i, FLOAT32), type);)
}

INLINE VF activated(VF x, const int64_t kind) {
  if (kind == SILU) return x / (1.0f + exponential(-x));
  return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

INLINE void gate_rows(const float *x, const int64_t kind, int64_t count, int64_t size, float *y) {
  for (int64_t row = 0; row < count; row++, x += 2 * size, y += size)
    EACH(size, STORE(y, i, activated(LOAD(x, i, FLOAT32), kind) * LOAD(x, size + i, FLOAT32), FLOAT32);)
}

/* x: [count, 2, size], the gate and what it gates.  y: [count, size]. */
TARGET static void gate(const float *x, int64_t kind, int64_t count, int64_t size, float *y) {
  if (kind == SILU) gate_rows(x, SILU, count, size, y);
  else gate_rows(x, GELU_TANH, count, size, y);
}

/* One head: normed if there is a weight, its first `rotated` elements rotated, the rest as it is. */
INLINE void head(const float *x, const Norm *norm, int64_t dim, int64_t rotated, const void *cos, const void *sin,
                 int64_t angles, void *out, int64_t at, const int64_t type) {
  float normed[HEAD_LIMIT];
  if (norm->weight) {
    norm_rows(norm, x, FLOAT32, 1, dim, normed);
    x = normed;
  }
  int64_t half = rotated / 2;
  EACH(half, {
    VF low = LOAD(x, i, FLOAT32);
    VF high = LOAD(x, half + i, FLOAT32);
    STORE(out, at + i, low * LOAD(cos, angles + i, type) - high * LOAD(sin, angles + i, type), type);
    STORE(out, at + half + i,
          high * LOAD(cos, angles + half + i, type) + low * LOAD(sin, angles + half + i, type), type);
  })
  EACH(dim - rotated, STORE(out, at + rotated + i, LOAD(x, rotated + i, FLOAT32), type);)
}

/* x, out: [count, queries, keys, values].  cos, sin: [count, rotated]. */
INLINE void head_rows(const Layer *l, const float *x, const void *cos, const void *sin, int64_t count, void *out,
                      const int64_t type) {
  int64_t at = 0, values = l->key_heads * l->value_dim;
  for (int64_t row = 0; row < count; row++, at += values) {
    for (int64_t i = 0; i < l->heads + l->key_heads; i++, at += l->dim) {
      const Norm *norm = i < l->heads ? &l->query_norm : &l->key_norm;
      head(x + at, norm, l->dim, l->rotated, cos, sin, row * l->rotated, out, at, type);
    }
    EACH(values, STORE(out, at + i, LOAD(x, at + i, FLOAT32), type);)
  }
}

/* The parts of the scratch: of the layer's width twice, of its widest product, of what that is gated to, of a product's
 * own packing. */
typedef struct {
  float *narrow, *middle, *wide, *gated, *packed;
} Parts;

INLINE int64_t split_scratch(const Layer *l, int64_t count, float *scratch, Parts *parts) {
  int64_t wide = l->qkv->rows > l->gated->rows ? l->qkv->rows : l->gated->rows;
  const int64_t sizes[] = {l->hidden, l->hidden, wide, l->inner, l->columns + 64};
  float **all[] = {&parts->narrow, &parts->middle, &parts->wide, &parts->gated, &parts->packed};
  int64_t used = 0;
  for (int i = 0; i < 5; i++) {
    *all[i] = scratch + used;
    used += (count * sizes[i] + 15) / 16 * 16;
  }
  return used;
}

/* x: [count, hidden].  cos, sin: [count, rotated].  heads: [count, queries, keys, values].
 * Returns 0, or, having done nothing, how many floats of scratch it needs if `room` is too small. */
TARGET static int64_t before(const Layer *l, const void *x, const void *cos, const void *sin, int64_t count,
                             void *heads, float *scratch, int64_t room) {
  Parts p;
  int64_t needed = split_scratch(l, count, scratch, &p);
  if (needed > room) return needed;
  norm(&l->input_norm, x, l->type, count, l->hidden, p.narrow);
  LINEAR(l->qkv, p.narrow, count, p.wide, p.packed);
  if (l->type == FLOAT32) head_rows(l, p.wide, cos, sin, count, heads, FLOAT32);
  else head_rows(l, p.wide, cos, sin, count, heads, BFLOAT16);
  return 0;
}

INLINE void after_rows(const Layer *l, const void *x, const float *attended, int64_t count, void *out, const Parts *p,
                       const int64_t type) {
  LINEAR(l->out, attended, count, p->narrow, p->packed);
  add_rows(x, type, &l->attention_norm, p->narrow, count, l->hidden, p->middle);
  norm_rows(&l->mlp_norm, p->middle, type, count, l->hidden, p->narrow);
  LINEAR(l->gated, p->narrow, count, p->wide, p->packed);
  gate(p->wide, l->activation, count, l->inner, p->gated);
  LINEAR(l->down, p->gated, count, p->narrow, p->packed);
  add_rows(p->middle, type, &l->output_norm, p->narrow, count, l->hidden, out);
}

/* attended: [count, heads, value dim].  out: [count, hidden]; it may be x.  Returns as `before` does. */
TARGET static int64_t after(const Layer *l, const void *x, const float *attended, int64_t count, void *out,
                            float *scratch, int64_t room) {
  Parts p;
  int64_t needed = split_scratch(l, count, scratch, &p);
  if (needed > room) return needed;
  if (l->type == FLOAT32) after_rows(l, x, attended, count, out, &p, FLOAT32);
  else after_rows(l, x, attended, count, out, &p, BFLOAT16);
  return 0;
}
