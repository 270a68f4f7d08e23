#if defined(__x86_64__) && defined(__linux__)
#define SET paceline_amx
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,amx-tile,amx-bf16,amx-int8")))
#define LANES 16
#define VECTORS 2
#define ROWS 8
#define AMX
#include "kernels.h"
#endif
