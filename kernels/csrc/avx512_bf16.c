#if defined(__x86_64__)
#define SET paceline_avx512_bf16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")))
#define LANES 16
#define VECTORS 2
#define ROWS 8
#define DOT
#include "kernels.h"
#endif
