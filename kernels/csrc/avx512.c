#if defined(__x86_64__)
#define SET paceline_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define LANES 16
#define VECTORS 2
#define ROWS 8
#include "kernels.h"
#endif
