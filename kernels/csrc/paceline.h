/* What Python hands over.  All sizes are counts of elements; all arrays are dense unless a stride is given. */
#ifndef PACELINE_H
#define PACELINE_H

#include <stdint.h>

enum { FLOAT32 = 0, BFLOAT16 = 1 };
enum { SILU = 0, GELU_TANH = 1 };
enum { HEAD_LIMIT = 1024 }; /* most elements of a head */

/* A packed weight [rows, columns]: panels of as many rows as the instruction set's `panel`.  Within a panel there are
 * `steps` groups of `group` columns; a group is one 32-bit word per row: 1 float32, 2 bfloat16 or 4 int8, the lowest
 * bits first.  Rows and columns beyond the real ones are zero. */
typedef struct {
  const uint32_t *words;
  const float *scale; /* of each row, or NULL */
  const float *bias;  /* of each row, or NULL */
  int64_t rows, columns, group;
} Weight;

/* A root-mean-square norm over as many elements as it is applied to.  weight NULL: none at all. */
typedef struct {
  const float *weight;
  float epsilon;
} Norm;

/* A decoder layer but for its attention:
 *   before: heads of qkv(input_norm(x)), of which queries and keys are normed, and their first `rotated` elements rotated
 *   after:  x += attention_norm(out(attended)); x += output_norm(down(activation(gate) * up)),
 *           with (gate, up) = gated(mlp_norm(x))
 * `columns` is the most that any of its weights has. */
typedef struct {
  Norm input_norm, attention_norm, mlp_norm, output_norm, query_norm, key_norm;
  const Weight *qkv, *out, *gated, *down;
  int64_t activation, columns, hidden, inner, heads, key_heads, dim, value_dim, rotated;
  int64_t type; /* of x, of the heads, and of the angles of the rotation */
} Layer;

/* Where the queries, keys and values of one pass lie: `new` rows of each, `stride` elements apart. */
typedef struct {
  const void *queries, *keys, *values; /* [.., heads, dim], [.., key heads, dim], [.., key heads, value dim] */
  int64_t query_stride, key_stride, value_stride;
} Fresh;

typedef struct {
  void *keys, *values; /* [pool rows, key heads, dim] and [.., value dim] */
  int64_t heads, key_heads, dim, value_dim, block_size;
  int64_t window; /* 0: none */
  float scaling, softcap; /* softcap 0: none */
  int64_t type;
} Attention;

/* One sequence after another: {new, committed, pending, blocks}, then its block numbers, the depths of its pending
 * slots, and for each new token the pending slots that it sees: bits in (pending + 63) / 64 words. */
typedef struct {
  int64_t sequences;
  const int64_t *data;
} Pass;

typedef struct {
  int64_t panel; /* rows of a weight that lie side by side */
  void (*linear)(const Weight *, const float *x, int64_t count, float *y, float *packed);
  void (*norm)(const Norm *, const void *x, int64_t type, int64_t count, int64_t size, float *y);
  int64_t (*before)(const Layer *, const void *x, const void *cos, const void *sin, int64_t count, void *heads,
                    float *scratch, int64_t room);
  int64_t (*after)(const Layer *, const void *x, const float *attended, int64_t count, void *out, float *scratch,
                   int64_t room);
  int64_t (*attention)(const Attention *, const Pass *, const Fresh *, float *out, float *scratch, int64_t room);
  void (*uniforms)(uint64_t seed, const int64_t *positions, int64_t count, int64_t vocab, double *out);
  int64_t (*contenders)(uint64_t seed, int64_t position, const float *scores, int64_t vocab, float floor,
                        int64_t *tokens, double *out);
} InstructionSet;

#endif
