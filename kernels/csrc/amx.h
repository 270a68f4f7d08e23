/* Linear layers by AMX, which multiplies tiles: so fast that a pass over many rows takes hardly longer than the weights'
 * way from memory.  With bfloat16, rows of x are rounded to it; with int8, to 15 bits, in two parts. */
#include <immintrin.h>

enum {
  TILE_ROWS = 16, /* rows of x in a tile, words of a weight's row, and rows of words */
  MOST_ROWS = 2 * TILE_ROWS,
  LINE = 64, /* bytes in a row of a tile */
  NEAR = 8 * TILE_ROWS * PANEL, /* how many words ahead of their use weights are fetched */
};

/* Compilers are not told that tiles are loaded from memory, so what was written there may not have been, yet. */
#define WRITTEN(address) __asm__ volatile("" : : "r"(address) : "memory")

/* Tiles 0 to 3 are for sums, 4 and 5 for weights, 6 and 7 for x: `first` rows in 0, 1 and 6, `second` in 2, 3 and 7. */
TARGET static void shape_tiles(int first, int second) {
  struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  const int rows[8] = {first, first, second, second, TILE_ROWS, TILE_ROWS, first, second};
  for (int i = 0; i < 8; i++) {
    shape.rows[i] = rows[i];
    shape.bytes[i] = rows[i] ? LINE : 0;
  }
  WRITTEN(&shape);
  _tile_loadconfig(&shape);
}

/* The index-th of the tiles of a panel's words, which are two, side by side: where it lies, or if it ends early, a copy
 * in `room`. */
INLINE const uint32_t *words_of(const uint32_t *panel, int64_t steps, int64_t index, uint32_t *room) {
  const uint32_t *from = panel + index * TILE_ROWS * PANEL;
  int64_t left = steps - index * TILE_ROWS;
  if (left >= TILE_ROWS) return from;
  memset(room, 0, 4 * PANEL * TILE_ROWS);
  memcpy(room, from, 4 * PANEL * left);
  return room;
}

INLINE void fetch_lines(const char *from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += LINE) __builtin_prefetch(from + line, 0, 2);
}

/* [rows][columns] of float32 -> [blocks][rows][32] of bfloat16. */
INLINE void round_rows(const float *x, int rows, int64_t columns, int64_t blocks, uint16_t *rounded) {
  const int64_t depth = LINE / 2;
  for (int r = 0; r < rows; r++, x += columns)
    for (int64_t i = 0; i < blocks * depth; i += LANES)
      store(rounded, (i / depth * rows + r) * depth + i % depth, load_padded(x, i, columns), BFLOAT16);
}

#define MULTIPLY(group, x, from, low, high) \
  do {                                      \
    _tile_loadd(x, from, LINE);             \
    if (group == 2) {                       \
      _tile_dpbf16ps(low, x, 4);            \
      _tile_dpbf16ps(high, x, 5);           \
    } else {                                \
      _tile_dpbssd(low, x, 4);              \
      _tile_dpbssd(high, x, 5);             \
    }                                       \
  } while (0)
#define STORE_SUMS(low, high, to)                \
  do {                                           \
    _tile_stored(low, to, 4 * PANEL);            \
    _tile_stored(high, (to) + LANES, 4 * PANEL); \
  } while (0)

/* out: [first + second][PANEL], float or int32: the products of so many rows with one panel.  x: [blocks][first][LINE]
 * bytes, then [blocks][second][LINE].  Every sum has one accumulator and runs in the order of the columns, so that a row
 * comes out the same however many there are. */
INLINE void multiply_panel(const int group, const uint32_t *panel, int64_t steps, int64_t blocks, const void *x,
                           int first, int second, void *out, const char *ahead, int64_t stride) {
  uint32_t room[PANEL * TILE_ROWS] __attribute__((aligned(64)));
  const char *rows = x, *more = rows + blocks * first * LINE;
  uint32_t *to = out;
  _tile_zero(0);
  _tile_zero(1);
  if (second) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < blocks; i++, ahead += stride) {
    const uint32_t *words = words_of(panel, steps, i, room);
    WRITTEN(words);
    fetch_lines(ahead, stride);
    _tile_loadd(4, words, 4 * PANEL);
    _tile_loadd(5, words + LANES, 4 * PANEL);
    MULTIPLY(group, 6, rows + i * first * LINE, 0, 1);
    if (second) MULTIPLY(group, 7, more + i * second * LINE, 2, 3);
  }
  STORE_SUMS(0, 1, to);
  if (second) STORE_SUMS(2, 3, to + first * PANEL);
}

/* See `linear`; of bfloat16. */
TARGET static void multiply_bfloat16(const Weight *w, const float *x, int64_t count, float *y, uint16_t *rounded) {
  const int64_t depth = LINE / 2, steps = (w->columns + 1) / 2, blocks = (w->columns + depth - 1) / depth;
  const int64_t groups = (count + MOST_ROWS - 1) / MOST_ROWS, stride = 4 * PANEL * TILE_ROWS / groups;
  float out[MOST_ROWS * PANEL] __attribute__((aligned(64)));
  for (int64_t done = 0; done < count; done += TILE_ROWS) {
    int rows = count - done < TILE_ROWS ? count - done : TILE_ROWS;
    round_rows(x + done * w->columns, rows, w->columns, blocks, rounded + done * blocks * depth);
  }
  int first = 0, second = 0;
  for (int64_t panel = 0; panel < w->rows; panel += PANEL) {
    const uint32_t *words = w->words + panel * steps;
    /* Several groups together fetch the next panel while they compute this one. */
    const char *ahead = (const char *)(words + (groups == 1 ? NEAR : steps * PANEL));
    const uint16_t *from = rounded;
    for (int64_t done = 0; done < count; done += MOST_ROWS, ahead += stride * blocks) {
      int rows = count - done < MOST_ROWS ? count - done : MOST_ROWS, head = rows < TILE_ROWS ? rows : TILE_ROWS;
      if (first != head || second != rows - head) shape_tiles(first = head, second = rows - head);
      multiply_panel(2, words, steps, blocks, from, first, second, out, ahead, stride);
      for (int r = 0; r < rows; r++) finish_row(w, panel, out + r * PANEL, y + (done + r) * w->rows + panel);
      from += blocks * rows * depth;
    }
  }
  _tile_release();
}

typedef int8_t VB __attribute__((vector_size(LANES), aligned(1)));

/* One row of float32 as scale * (128 * high + low), both of int8: [blocks][rows][64] each, of which this is one row.
 * Returns the scale: NaN if an element is not finite. */
INLINE float split_row(const float *x, int rows, int64_t columns, int64_t blocks, int8_t *high, int8_t *low) {
  const float most = 127 * 128;
  VI largest = {0};
  for (int64_t i = 0; i < columns; i += LANES) {
    VI size = (VI)load_padded(x, i, columns) & 0x7fffffff;
    VI larger = size > largest;
    largest = (larger & size) | (~larger & largest);
  }
  union {
    int32_t bits;
    float value;
  } top = {0};
  for (int lane = 0; lane < LANES; lane++)
    if (largest[lane] > top.bits) top.bits = largest[lane];
  const int finite = top.bits < 0x7f800000;
  /* The factor of a row of tiny numbers would be infinite. */
  const float factor = finite && top.value > 1e-30f ? most / top.value : 0;
  for (int64_t i = 0; i < blocks * LINE; i += LANES) {
    VF value = finite ? load_padded(x, i, columns) : (VF){0};
    VI whole = (VI)(value * factor + 12582912.0f) - 0x4b400000;
    VI upper = (whole + 64) >> 7;
    int64_t at = i / LINE * rows * LINE + i % LINE;
    *(VB *)(high + at) = __builtin_convertvector(upper, VB);
    *(VB *)(low + at) = __builtin_convertvector(whole - (upper << 7), VB);
  }
  return finite ? top.value / most : NAN;
}

/* See `linear`; of int8, for up to TILE_ROWS rows.  Sums of int8 are exact. */
INLINE void multiply_int8_rows(const Weight *w, const float *x, int rows, float *y, int8_t *split) {
  const int64_t steps = (w->columns + 3) / 4, blocks = (w->columns + LINE - 1) / LINE, stride = 4 * PANEL * TILE_ROWS;
  int8_t *high = split, *low = split + blocks * rows * LINE;
  int32_t sums[2 * TILE_ROWS * PANEL] __attribute__((aligned(64))), *upper = sums, *lower = sums + rows * PANEL;
  float scales[TILE_ROWS], out[PANEL] __attribute__((aligned(64)));
  for (int r = 0; r < rows; r++)
    /* The 2**24 is what finish_row takes away again. */
    scales[r] = 0x1p24f * split_row(x + r * w->columns, rows, w->columns, blocks, high + r * LINE, low + r * LINE);
  shape_tiles(rows, rows);
  for (int64_t panel = 0; panel < w->rows; panel += PANEL) {
    const uint32_t *words = w->words + panel * steps;
    multiply_panel(4, words, steps, blocks, split, rows, rows, sums, (const char *)(words + NEAR), stride);
    for (int r = 0; r < rows; r++) {
      for (int v = 0; v < PANEL; v += LANES) {
        VF above = __builtin_convertvector(*(const VI *)(upper + r * PANEL + v), VF);
        VF below = __builtin_convertvector(*(const VI *)(lower + r * PANEL + v), VF);
        store(out, v, (128.0f * above + below) * scales[r], FLOAT32);
      }
      finish_row(w, panel, out, y + r * w->rows + panel);
    }
  }
  _tile_release();
}

TARGET static void multiply_int8(const Weight *w, const float *x, int64_t count, float *y, int8_t *split) {
  for (int64_t done = 0; done < count; done += TILE_ROWS) {
    int rows = count - done < TILE_ROWS ? count - done : TILE_ROWS;
    multiply_int8_rows(w, x + done * w->columns, rows, y + done * w->rows, split);
  }
}

/* See `linear`. */
TARGET static void amx_linear(const Weight *w, const float *x, int64_t count, float *y, float *packed) {
  if (w->group == 1) linear(w, x, count, y, packed);
  else if (w->group == 2) multiply_bfloat16(w, x, count, y, (uint16_t *)packed);
  else multiply_int8(w, x, count, y, (int8_t *)packed);
}
