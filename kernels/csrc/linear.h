/* y = x W^T + bias for few rows x, bound by how fast W comes from memory.  Included once per instruction set. */

/* [count][columns] -> tiles of [padded columns][rows of the tile], one after the other. */
INLINE void pack_rows(const float *x, int64_t count, int64_t columns, int64_t padded, float *packed) {
  int64_t tiles = tiles_of(count);
  for (int64_t i = 0; i < tiles; i++) {
    int rows = tile_rows(count, tiles, i);
    for (int r = 0; r < rows; r++) {
      for (int64_t k = 0; k < columns; k++) packed[k * rows + r] = x[r * columns + k];
      for (int64_t k = columns; k < padded; k++) packed[k * rows + r] = 0;
    }
    x += rows * columns;
    packed += rows * padded;
  }
}

INLINE void finish_row(const Weight *w, int64_t first, const float *out, float *y) {
  int64_t size = w->rows - first < PANEL ? w->rows - first : PANEL;
  EACH(size, {
    VF value = load(out, i, FLOAT32);
    /* The scale undoes the 2**24 of widened int8 as well. */
    if (w->scale) value *= 0x1p-24f * LOAD(w->scale + first, i, FLOAT32);
    if (w->bias) value += LOAD(w->bias + first, i, FLOAT32);
    STORE(y, i, value, FLOAT32);
  })
}

TARGET static void multiply(const Weight *w, Product *product, const float *packed, int64_t count, float *y) {
  int64_t steps = (w->columns + w->group - 1) / w->group, tiles = tiles_of(count);
  float out[ROWS * PANEL] __attribute__((aligned(64)));
  for (int64_t first = 0; first < w->rows; first += PANEL) {
    const uint32_t *panel = w->words + first * steps;
    /* All tiles together fetch the next panel while they compute this one.  A single one is so quick that it has to
     * look less far ahead, lest the lines be gone again. */
    const char *ahead = (const char *)(panel + (tiles == 1 && steps > 128 ? 128 : steps) * PANEL);
    const float *x = packed;
    float *to = y + first;
    for (int64_t i = 0; i < tiles; i++) {
      int rows = tile_rows(count, tiles, i);
      product(rows, 0, panel, x, steps, out, ahead, 4 * PANEL / tiles);
      ahead += 4 * PANEL / tiles * steps;
      for (int r = 0; r < rows; r++, to += w->rows) finish_row(w, first, out + r * PANEL, to);
      x += rows * steps * w->group;
    }
  }
}

/* x: [count, columns].  y: [count, rows].  packed: room for count * (columns + 64) floats. */
TARGET static void linear(const Weight *w, const float *x, int64_t count, float *y, float *packed) {
  int64_t padded = (w->columns + w->group - 1) / w->group * w->group;
  pack_rows(x, count, w->columns, padded, packed);
  multiply(w, w->group == 1 ? product_float32 : w->group == 2 ? product_bfloat16 : product_int8, packed, count, y);
}
