/* All kernels for one instruction set.  The file that includes this defines
 *   SET      the name of the table that it exports
 *   TARGET   the attribute that lets the compiler use the set
 *   LANES    floats in a vector
 *   VECTORS  vectors side by side in a panel
 *   ROWS     most rows of a tile: ROWS * VECTORS accumulators have to fit the registers, with a few to spare
 *   AMX or DOT  where linear layers shall be computed by it */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "paceline.h"

#define INLINE TARGET static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#include "tile.h"

#include "linear.h"

#if defined(AMX)
#include "amx.h"
#define LINEAR amx_linear
#elif defined(DOT)
#include "dot.h"
#define LINEAR dot_linear
#else
#define LINEAR linear
#endif

#include "rows.h"

#include "attention.h"

#include "noise.h"

const InstructionSet SET = {PANEL, LINEAR, norm, before, after, attention, uniforms, contenders};
