/* For any processor: what every x86-64 (SSE2) and every 64-bit Arm (NEON) has. */
#define SET paceline_generic
#define TARGET
#define LANES 4
#if defined(__aarch64__)
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define ROWS 5
#include "kernels.h"
