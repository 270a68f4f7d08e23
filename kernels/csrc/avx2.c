#if defined(__x86_64__)
#define SET paceline_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define VECTORS 2
#define ROWS 5
#include "kernels.h"
#endif
