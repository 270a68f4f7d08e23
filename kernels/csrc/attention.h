/* Attention of draft-tree tokens over the paged cache.  Included once per instruction set.
 *
 * Scores, and the sums over the values, are tiles with one accumulator each, which run over the keys in the order of
 * their slots.  What a query does not see adds an exact zero.  So a token's row is the same to the last bit whether its
 * ancestors are committed or pending, and whatever else is in the tree. */

enum { CHUNK = 8 * ROWS, VALUES = 64 };

typedef struct {
  int64_t fresh, committed, pending, words;
  const int64_t *blocks, *depths, *bits;
} Sequence;

/* Everything that attending one chunk of a sequence's queries under one key head needs.  Rows are queries: token by
 * token, and within a token the heads that share the key head. */
typedef struct {
  float *queries; /* tiles of [dim][rows] */
  float *scores;  /* [CHUNK][keys, padded] */
  float *weights; /* tiles of [keys][rows] */
  float *sums;    /* [CHUNK] */
  float *panel;   /* [dim][PANEL] of keys */
  float *values;  /* per panel of value elements [VALUES][PANEL] */
  float *out;     /* per tile and panel of value elements [ROWS][PANEL] */
  int64_t *rows;  /* the pool rows of the keys */
  int64_t first, keys, padded, panels;
} Workspace;

INLINE int64_t rounded_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

INLINE float element(const void *x, int64_t i, const int64_t type) {
  if (type == FLOAT32) return ((const float *)x)[i];
  union {
    uint32_t bits;
    float value;
  } wide = {(uint32_t)((const uint16_t *)x)[i] << 16};
  return wide.value;
}

INLINE int64_t place(Workspace *w, const Attention *a, int64_t total, float *scratch) {
  int64_t padded = rounded_up(total, PANEL), panels = rounded_up(a->value_dim, PANEL) / PANEL;
  int64_t sizes[] = {CHUNK * a->dim,    CHUNK * padded,          CHUNK * padded + PANEL, CHUNK + PANEL,
                     a->dim * PANEL,    panels * VALUES * PANEL, CHUNK * panels * PANEL};
  float **parts[] = {&w->queries, &w->scores, &w->weights, &w->sums, &w->panel, &w->values, &w->out};
  w->rows = (int64_t *)scratch;
  int64_t used = 2 * padded;
  for (int i = 0; i < 7; i++) {
    *parts[i] = scratch + used;
    used += rounded_up(sizes[i], 16);
  }
  w->panels = panels;
  return used;
}

INLINE const int64_t *read_sequence(const int64_t *data, Sequence *s) {
  s->fresh = data[0], s->committed = data[1], s->pending = data[2];
  s->words = (s->pending + 63) / 64;
  s->blocks = data + 4;
  s->depths = s->blocks + data[3];
  s->bits = s->depths + s->pending;
  return s->bits + s->fresh * s->words;
}

INLINE int64_t depth_of(const Sequence *s, int64_t token) { return s->depths[s->pending - s->fresh + token]; }

/* The first cached position that any query sees.  A slot's number is never below its depth, so no pending slot within
 * the window comes before the first such position. */
INLINE int64_t first_seen(const Attention *a, const Sequence *s) {
  int64_t lowest = INT64_MAX;
  for (int64_t token = 0; token < s->fresh; token++)
    if (depth_of(s, token) < lowest) lowest = depth_of(s, token);
  int64_t first = a->window ? s->committed + lowest - a->window + 1 : 0;
  return first < 0 ? 0 : first;
}

INLINE void fetch(const void *x, int64_t at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)x + at + i, 0, 2);
}

/* The pool rows of the keys.  The weights have driven them out of the cache since the last pass. */
INLINE void find_rows(const Attention *a, const Sequence *s, Workspace *w) {
  w->first = first_seen(a, s);
  w->keys = s->committed + s->pending - w->first;
  w->padded = rounded_up(w->keys, PANEL);
  int64_t block = w->first / a->block_size, offset = w->first % a->block_size;
  int64_t bytes = a->key_heads * a->dim * (a->type == FLOAT32 ? 4 : 2);
  for (int64_t i = 0; i < w->keys; i++) {
    w->rows[i] = s->blocks[block] * a->block_size + offset;
    if (++offset == a->block_size) block++, offset = 0;
    fetch(a->keys, w->rows[i] * bytes, bytes);
  }
}

INLINE void write_fresh(const Attention *a, const Sequence *s, const Workspace *w, const Fresh *f, int64_t start) {
  int64_t size = a->type == FLOAT32 ? 4 : 2;
  int64_t key_bytes = a->key_heads * a->dim * size, value_bytes = a->key_heads * a->value_dim * size;
  for (int64_t token = 0; token < s->fresh; token++) {
    int64_t row = w->rows[w->keys - s->fresh + token];
    memcpy((char *)a->keys + row * key_bytes, (const char *)f->keys + (start + token) * f->key_stride * size, key_bytes);
    memcpy((char *)a->values + row * value_bytes, (const char *)f->values + (start + token) * f->value_stride * size,
           value_bytes);
  }
}

INLINE void pack_queries(const Attention *a, const Fresh *f, int64_t start, int64_t key_head, int64_t from,
                         int64_t count, float *packed, const int64_t type) {
  int64_t repeat = a->heads / a->key_heads, tiles = tiles_of(count), row = from;
  for (int64_t i = 0; i < tiles; i++) {
    int rows = tile_rows(count, tiles, i);
    for (int r = 0; r < rows; r++, row++) {
      int64_t at = (start + row / repeat) * f->query_stride + (key_head * repeat + row % repeat) * a->dim;
      for (int64_t d = 0; d < a->dim; d++) packed[d * rows + r] = element(f->queries, at + d, type);
    }
    packed += rows * a->dim;
  }
}

/* Keys key to key + PANEL - 1, transposed. */
INLINE void pack_keys(const Attention *a, const Workspace *w, int64_t key_head, int64_t key, const int64_t type) {
  for (int64_t column = 0; column < PANEL; column += LANES) {
    int64_t at[LANES], left = w->keys - key - column;
    /* Beyond the last key stands that one again: its scores are finite wherever they are, and masked. */
    for (int64_t i = 0; i < LANES; i++) {
      int64_t row = left <= 0 ? w->keys - 1 : key + column + (i < left ? i : left - 1);
      at[i] = (w->rows[row] * a->key_heads + key_head) * a->dim;
    }
    for (int64_t d = 0; d < a->dim; d += LANES) {
      const int64_t n = a->dim - d < LANES ? a->dim - d : LANES;
      VF block[LANES];
      UNROLL for (int i = 0; i < LANES; i++) block[i] = LOAD(a->keys, at[i] + d, type);
      transpose(block);
      if (n == LANES) {
        UNROLL for (int i = 0; i < LANES; i++) store(w->panel, (d + i) * PANEL + column, block[i], FLOAT32);
      } else {
        for (int i = 0; i < n; i++) store(w->panel, (d + i) * PANEL + column, block[i], FLOAT32);
      }
    }
  }
}

INLINE void score(const Attention *a, const Workspace *w, int64_t key_head, int64_t count, const int64_t type) {
  float out[ROWS * PANEL] __attribute__((aligned(64)));
  int64_t tiles = tiles_of(count), bytes = a->value_dim * (type == FLOAT32 ? 4 : 2);
  for (int64_t key = 0; key < w->keys; key += PANEL) {
    pack_keys(a, w, key_head, key, type);
    for (int64_t i = key; i < key + PANEL && i < w->keys; i++)
      fetch(a->values, (w->rows[i] * a->key_heads + key_head) * bytes, bytes);
    const float *x = w->queries;
    float *to = w->scores + key;
    for (int64_t i = 0; i < tiles; i++) {
      int rows = tile_rows(count, tiles, i);
      product_float32(rows, 0, (const uint32_t *)w->panel, x, a->dim, out, (const char *)w->panel, 0);
      for (int r = 0; r < rows; r++, to += w->padded) memcpy(to, out + r * PANEL, 4 * PANEL);
      x += rows * a->dim;
    }
  }
}

/* Scale, cap and mask the scores of one query. */
INLINE void mask(const Attention *a, const Sequence *s, const Workspace *w, int64_t token, float *scores) {
  for (int64_t i = 0; i < w->padded; i += LANES) {
    VF x = load(scores, i, FLOAT32) * a->scaling;
    if (a->softcap != 0) x = a->softcap * hyperbolic_tangent(x / a->softcap);
    store(scores, i, x, FLOAT32);
  }
  int64_t depth = depth_of(s, token), pending = s->committed - w->first;
  const int64_t *bits = s->bits + token * s->words;
  int64_t hidden = a->window ? s->committed + depth - a->window + 1 - w->first : 0;
  for (int64_t i = 0; i < hidden && i < pending; i++) scores[i] = -INFINITY;
  for (int64_t p = pending < 0 ? -pending : 0; p < s->pending; p++) {
    int seen = bits[p / 64] >> (p % 64) & 1;
    if (!seen || (a->window && depth - s->depths[p] >= a->window)) scores[pending + p] = -INFINITY;
  }
  for (int64_t i = w->keys; i < w->padded; i++) scores[i] = -INFINITY;
}

/* e**(score - highest), in place. */
INLINE void exponentials(float *scores, int64_t padded) {
  VF highest = (VF){0} - INFINITY;
  for (int64_t i = 0; i < padded; i += LANES) {
    VF x = load(scores, i, FLOAT32);
    highest = blend(x > highest, x, highest);
  }
  float top = -INFINITY;
  for (int lane = 0; lane < LANES; lane++)
    if (highest[lane] > top) top = highest[lane];
  for (int64_t i = 0; i < padded; i += LANES) store(scores, i, exponential(load(scores, i, FLOAT32) - top), FLOAT32);
}

/* Scores [rows][padded] -> weights [keys][rows], and their sums in the order of the keys.  Writes beyond the weights of a
 * key, never before them. */
INLINE void pack_weights(const float *scores, int64_t padded, int64_t keys, int rows, float *weights, float *sums) {
  enum { PARTS = (ROWS + LANES - 1) / LANES };
  VF sum[PARTS] = {0}, block[PARTS][LANES];
  for (int64_t key = 0; key < keys; key += LANES) {
    int64_t count = keys - key < LANES ? keys - key : LANES;
    UNROLL for (int part = 0; part < PARTS; part++) {
      UNROLL for (int i = 0; i < LANES; i++) {
        int64_t row = part * LANES + i;
        block[part][i] = row < rows ? load(scores, row * padded + key, FLOAT32) : (VF){0};
      }
      transpose(block[part]);
    }
    for (int64_t i = 0; i < count; i++, weights += rows)
      UNROLL for (int part = 0; part < PARTS; part++) {
        store(weights, part * LANES, block[part][i], FLOAT32);
        sum[part] += block[part][i];
      }
  }
  UNROLL for (int part = 0; part < PARTS; part++) store(sums, part * LANES, sum[part], FLOAT32);
}

INLINE void soften(const Attention *a, const Sequence *s, const Workspace *w, int64_t from, int64_t count) {
  int64_t repeat = a->heads / a->key_heads, tiles = tiles_of(count), row = 0;
  float *weights = w->weights;
  for (int64_t i = 0; i < tiles; i++) {
    int rows = tile_rows(count, tiles, i);
    float *scores = w->scores + row * w->padded;
    for (int r = 0; r < rows; r++) {
      mask(a, s, w, (from + row + r) / repeat, scores + r * w->padded);
      exponentials(scores + r * w->padded, w->padded);
    }
    pack_weights(scores, w->padded, w->keys, rows, weights, w->sums + row);
    weights += rows * w->keys;
    row += rows;
  }
}

INLINE void pack_values(const Attention *a, const Workspace *w, int64_t key_head, int64_t key, int64_t count,
                        const int64_t type) {
  for (int64_t i = 0; i < count; i++) {
    int64_t at = (w->rows[key + i] * a->key_heads + key_head) * a->value_dim;
    for (int64_t panel = 0; panel < w->panels; panel++) {
      float *to = w->values + (panel * VALUES + i) * PANEL;
      int64_t first = panel * PANEL, size = a->value_dim - first < PANEL ? a->value_dim - first : PANEL;
      if (size < PANEL) memset(to, 0, 4 * PANEL);
      const int64_t base = at + first;
      for (int64_t d = 0; d < size; d += LANES) {
        const int64_t n = size - d < LANES ? size - d : LANES;
        STORE(to, d, LOAD(a->values, base + d, type), FLOAT32);
      }
    }
  }
}

INLINE void mix(const Attention *a, const Workspace *w, int64_t key_head, int64_t count, const int64_t type) {
  int64_t tiles = tiles_of(count);
  for (int64_t key = 0; key < w->keys; key += VALUES) {
    int64_t steps = w->keys - key < VALUES ? w->keys - key : VALUES;
    pack_values(a, w, key_head, key, steps, type);
    const float *weights = w->weights;
    for (int64_t i = 0; i < tiles; i++) {
      int rows = tile_rows(count, tiles, i);
      for (int64_t panel = 0; panel < w->panels; panel++) {
        const uint32_t *values = (const uint32_t *)(w->values + panel * VALUES * PANEL);
        float *out = w->out + (i * w->panels + panel) * ROWS * PANEL;
        product_float32(rows, key > 0, values, weights + key * rows, steps, out, (const char *)values, 0);
      }
      weights += rows * w->keys;
    }
  }
}

INLINE void write_out(const Attention *a, const Workspace *w, int64_t start, int64_t key_head, int64_t from,
                      int64_t count, float *out) {
  int64_t repeat = a->heads / a->key_heads, tiles = tiles_of(count), row = 0;
  for (int64_t i = 0; i < tiles; i++) {
    int rows = tile_rows(count, tiles, i);
    for (int r = 0; r < rows; r++, row++) {
      int64_t token = start + (from + row) / repeat, head = key_head * repeat + (from + row) % repeat;
      float *to = out + (token * a->heads + head) * a->value_dim;
      for (int64_t panel = 0; panel < w->panels; panel++, to += PANEL) {
        const float *sums = w->out + ((i * w->panels + panel) * ROWS + r) * PANEL;
        int64_t left = a->value_dim - panel * PANEL;
        EACH(left < PANEL ? left : PANEL, STORE(to, i, LOAD(sums, i, FLOAT32) / w->sums[row], FLOAT32);)
      }
    }
  }
}

INLINE void attend(const Attention *a, const Sequence *s, const Fresh *f, Workspace *w, int64_t start, float *out,
                   const int64_t type) {
  int64_t rows = s->fresh * (a->heads / a->key_heads);
  find_rows(a, s, w);
  write_fresh(a, s, w, f, start);
  for (int64_t key_head = 0; key_head < a->key_heads; key_head++)
    for (int64_t from = 0; from < rows; from += CHUNK) {
      int64_t count = rows - from < CHUNK ? rows - from : CHUNK;
      pack_queries(a, f, start, key_head, from, count, w->queries, type);
      score(a, w, key_head, count, type);
      soften(a, s, w, from, count);
      mix(a, w, key_head, count, type);
      write_out(a, w, start, key_head, from, count, out);
    }
}

/* Writes the new keys and values to the pool, then attends.  out: [new, heads, value dim].
 * Returns 0, or, having done nothing, how many floats of scratch it needs if `room` is too small. */
TARGET static int64_t attention(const Attention *a, const Pass *pass, const Fresh *f, float *out, float *scratch,
                                int64_t room) {
  Sequence s;
  Workspace w;
  int64_t longest = 0;
  const int64_t *data = pass->data;
  for (int64_t i = 0; i < pass->sequences; i++) {
    data = read_sequence(data, &s);
    if (s.committed + s.pending > longest) longest = s.committed + s.pending;
  }
  int64_t needed = place(&w, a, longest, scratch);
  if (needed > room) return needed;
  data = pass->data;
  for (int64_t i = 0, start = 0; i < pass->sequences; i++, start += s.fresh) {
    data = read_sequence(data, &s);
    if (a->type == FLOAT32) attend(a, &s, f, &w, start, out, FLOAT32);
    else attend(a, &s, f, &w, start, out, BFLOAT16);
  }
  return 0;
}
