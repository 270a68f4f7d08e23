/* Vectors, and the one product that linear layers and attention are made of.  Included once per instruction set. */

typedef float VF __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t VU __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t VI __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t VH __attribute__((vector_size(2 * LANES), aligned(2)));

#define PANEL (LANES * VECTORS)

INLINE VF blend(VI mask, VF yes, VF no) { return (VF)((mask & (VI)yes) | (~mask & (VI)no)); }

INLINE VF load(const void *x, int64_t i, const int64_t type) {
  if (type == FLOAT32) return *(const VF *)((const float *)x + i);
  return (VF)(__builtin_convertvector(*(const VH *)((const uint16_t *)x + i), VU) << 16);
}

INLINE void store(void *x, int64_t i, VF value, const int64_t type) {
  if (type == FLOAT32) {
    *(VF *)((float *)x + i) = value;
    return;
  }
  /* To the nearest, ties to even.  NaN stays NaN, which rounding up could make an infinity of. */
  VU bits = (VU)value;
  VU rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  VU result = (VU)blend(value == value, (VF)rounded, (VF)((bits >> 16) | 0x40));
  *(VH *)((uint16_t *)x + i) = __builtin_convertvector(result, VH);
}

/* The same for the `count` < LANES elements at the end of a row. */
INLINE VF load_some(const void *x, int64_t i, int64_t count, const int64_t type) {
  float lanes[LANES] = {0};
  int size = type == FLOAT32 ? 4 : 2;
  memcpy(lanes, (const char *)x + i * size, count * size);
  return load(lanes, 0, type);
}

/* A row's elements i to i + LANES - 1, zero beyond its end. */
INLINE VF load_padded(const float *x, int64_t i, int64_t size) {
  int64_t n = size - i < LANES ? size - i : LANES;
  return n == LANES ? load(x, i, FLOAT32) : n > 0 ? load_some(x, i, n, FLOAT32) : (VF){0};
}

INLINE void store_some(void *x, int64_t i, int64_t count, VF value, const int64_t type) {
  float lanes[LANES];
  int size = type == FLOAT32 ? 4 : 2;
  store(lanes, 0, value, type);
  memcpy((char *)x + i * size, lanes, count * size);
}

/* For i in steps of LANES; n is how many elements are left, up to LANES. */
#define EACH(size, ...)                                        \
  for (int64_t i = 0; i < (size); i += LANES) {                \
    const int64_t n = (size) - i < LANES ? (size) - i : LANES; \
    __VA_ARGS__                                                \
  }
#define LOAD(x, at, type) (n == LANES ? load(x, at, type) : load_some(x, at, n, type))
#define STORE(x, at, value, type)                \
  do {                                           \
    if (n == LANES) store(x, at, value, type);   \
    else store_some(x, at, n, value, type);      \
  } while (0)

#if LANES == 4
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#elif LANES == 8
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#elif LANES == 16
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (VI){__VA_ARGS__})
#endif

/* Transposes LANES vectors.  Interleaving vector i with vector i + LANES / 2 moves the highest bit of an element's
 * vector number to the lowest of its lane number, and the others one up: after as many rounds as there are bits, the
 * two numbers have changed places. */
INLINE void transpose(VF *x) {
  VF y[LANES];
  UNROLL for (int round = 1; round < LANES; round *= 2) {
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      y[2 * i] = SHUFFLE(x[i], x[i + LANES / 2], FIRST_HALVES);
      y[2 * i + 1] = SHUFFLE(x[i], x[i + LANES / 2], SECOND_HALVES);
    }
    UNROLL for (int i = 0; i < LANES; i++) x[i] = y[i];
  }
}

INLINE float total(VF x) {
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += x[lane];
  return sum;
}

/* e**x within 2 units in the last place; 0 where it would be less than the smallest normal number. */
INLINE VF exponential(VF x) {
  VF n = x * 1.44269504088896341f + 12582912.0f;
  VI exponent = (VI)n - 0x4b400000;
  n -= 12582912.0f;
  VF r = x - n * 0.693359375f + n * 2.12194440e-4f;
  VF p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  VF result = (VF)((VI)p + (exponent << 23));
  result = blend(x < -87.0f, (VF){0}, result);
  result = blend(x > 88.0f, (VF){0} + INFINITY, result);
  return blend(x == x, result, x);
}

INLINE VF hyperbolic_tangent(VF x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

/* One word of a panel's row, widened: its part-th weight.  int8 comes out times 2**24, which is exact. */
INLINE VF widen(VU word, const int group, const int part) {
  if (group == 1) return (VF)word;
  if (group == 2) return (VF)(part ? word & 0xffff0000u : word << 16);
  VU top = part == 3 ? word : word << (24 - 8 * part);
  if (part) top &= 0xff000000u;
  return __builtin_convertvector((VI)top, VF);
}

/* out[r][c] (+)= sum over k of x[k][r] * w[k][c], for `rows` rows and one panel.  Every sum has one accumulator and runs
 * in the order of k: so a row comes out the same to the last bit, however many rows are computed along with it.
 *
 * w: [steps][PANEL] words.  x: [steps * group][rows].  out: [rows][PANEL].
 * ahead: what to fetch meanwhile, `stride` bytes per step. */
INLINE void tile(const int rows, const int group, const int carry, const uint32_t *w, const float *x, int64_t steps,
                 float *out, const char *ahead, int64_t stride) {
  VF sum[ROWS][VECTORS];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = carry ? ((const VF *)(out + r * PANEL))[v] : (VF){0};
  for (int64_t step = 0; step < steps; step++, w += PANEL, x += group * rows) {
    __builtin_prefetch(ahead, 0, 2);
    if (PANEL > 16) __builtin_prefetch(ahead + 64, 0, 2);
    ahead += stride;
    UNROLL for (int part = 0; part < group; part++) {
      VF wide[VECTORS];
      UNROLL for (int v = 0; v < VECTORS; v++) wide[v] = widen(((const VU *)w)[v], group, part);
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] += wide[v] * x[part * rows + r];
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < VECTORS; v++) ((VF *)(out + r * PANEL))[v] = sum[r][v];
}

typedef void Product(int rows, int carry, const uint32_t *w, const float *x, int64_t steps, float *out,
                     const char *ahead, int64_t stride);

#define ROWS_CASE(r, group) \
  case r: tile(r, group, carry, w, x, steps, out, ahead, stride); break;
#if ROWS == 5
#define ROWS_CASES(group) \
  ROWS_CASE(1, group) ROWS_CASE(2, group) ROWS_CASE(3, group) ROWS_CASE(4, group) ROWS_CASE(5, group)
#elif ROWS == 8
#define ROWS_CASES(group)                                                                               \
  ROWS_CASE(1, group) ROWS_CASE(2, group) ROWS_CASE(3, group) ROWS_CASE(4, group) ROWS_CASE(5, group)   \
  ROWS_CASE(6, group) ROWS_CASE(7, group) ROWS_CASE(8, group)
#endif

/* `tile` for each size of group, with the number of rows known to the compiler. */
#define PRODUCT(name, group)                                                                                  \
  TARGET static void name(int rows, int carry, const uint32_t *w, const float *x, int64_t steps, float *out,  \
                          const char *ahead, int64_t stride) {                                                \
    switch (rows) { ROWS_CASES(group) }                                                                       \
  }
PRODUCT(product_float32, 1)
PRODUCT(product_bfloat16, 2)
PRODUCT(product_int8, 4)

/* Rows of the index-th of `tiles` tiles, of which none is more than one row larger than another. */
INLINE int tile_rows(int64_t count, int64_t tiles, int64_t index) {
  return (int)(count / tiles + (index < count % tiles));
}

INLINE int64_t tiles_of(int64_t count) { return (count + ROWS - 1) / ROWS; }
