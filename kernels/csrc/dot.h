/* Linear layers of bfloat16 by AVX-512's dot product, which multiplies twice as much at once as float32 does.  Rows of x
 * are rounded to bfloat16.  Other types are computed as without it. */
#include <immintrin.h>

/* Most rows of a tile: twice as many sums fit the registers, with two for the weights. */
enum { DOT_ROWS = 14 };

/* Rounded rows [count][columns] -> tiles of [steps][rows of the tile], a word for two columns. */
INLINE void pack_pairs(const float *x, int64_t count, int64_t columns, int64_t steps, uint32_t *packed) {
  for (int64_t done = 0; done < count; packed += steps * DOT_ROWS, done += DOT_ROWS) {
    int rows = count - done < DOT_ROWS ? count - done : DOT_ROWS;
    for (int r = 0; r < rows; r++, x += columns) {
      uint32_t pairs[LANES / 2];
      for (int64_t step = 0; step < steps; step += LANES / 2) {
        store(pairs, 0, load_padded(x, 2 * step, columns), BFLOAT16);
        for (int i = 0; i < LANES / 2 && step + i < steps; i++) packed[(step + i) * rows + r] = pairs[i];
      }
    }
  }
}

/* out[r][c] = sum over k of x[k][r] * w[k][c], for `rows` rows and one panel.  Every sum has one accumulator and runs in
 * the order of k, as in `tile`; see there for the arguments. */
INLINE void dot_tile(const int rows, const uint32_t *w, const uint32_t *x, int64_t steps, float *out, const char *ahead,
                     int64_t stride) {
  __m512 sum[DOT_ROWS][VECTORS];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_setzero_ps();
  for (int64_t step = 0; step < steps; step++, w += PANEL, x += rows, ahead += stride) {
    __m512bh pairs[VECTORS];
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + 64, 0, 2);
    UNROLL for (int v = 0; v < VECTORS; v++) pairs[v] = (__m512bh)_mm512_loadu_si512(w + v * LANES);
    UNROLL for (int r = 0; r < rows; r++) {
      __m512bh both = (__m512bh)_mm512_set1_epi32((int)x[r]);
      UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], pairs[v], both);
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(out + r * PANEL + v * LANES, sum[r][v]);
}

#define DOT_CASE(r) \
  case r: dot_tile(r, w, x, steps, out, ahead, stride); break;

/* `dot_tile` with the number of rows known to the compiler. */
TARGET static void dot_product(int rows, const uint32_t *w, const uint32_t *x, int64_t steps, float *out,
                               const char *ahead, int64_t stride) {
  switch (rows) {
    DOT_CASE(1) DOT_CASE(2) DOT_CASE(3) DOT_CASE(4) DOT_CASE(5) DOT_CASE(6) DOT_CASE(7) DOT_CASE(8) DOT_CASE(9)
    DOT_CASE(10) DOT_CASE(11) DOT_CASE(12) DOT_CASE(13) DOT_CASE(14)
  }
}

/* See `linear`. */
TARGET static void dot_linear(const Weight *w, const float *x, int64_t count, float *y, float *packed) {
  if (w->group != 2) {
    linear(w, x, count, y, packed);
    return;
  }
  const int64_t steps = (w->columns + 1) / 2, tiles = (count + DOT_ROWS - 1) / DOT_ROWS;
  float out[DOT_ROWS * PANEL] __attribute__((aligned(64)));
  pack_pairs(x, count, w->columns, steps, (uint32_t *)packed);
  for (int64_t first = 0; first < w->rows; first += PANEL) {
    const uint32_t *panel = w->words + first * steps, *from = (const uint32_t *)packed;
    /* As in `multiply`. */
    const char *ahead = (const char *)(panel + (tiles == 1 && steps > 128 ? 128 : steps) * PANEL);
    const int64_t stride = 4 * PANEL / tiles;
    float *to = y + first;
    for (int64_t done = 0; done < count; done += DOT_ROWS, from += steps * DOT_ROWS, ahead += stride * steps) {
      int rows = count - done < DOT_ROWS ? count - done : DOT_ROWS;
      dot_product(rows, panel, from, steps, out, ahead, stride);
      for (int r = 0; r < rows; r++, to += w->rows) finish_row(w, first, out + r * PANEL, to);
    }
  }
}
