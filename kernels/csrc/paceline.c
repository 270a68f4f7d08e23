/* What the library exports: the kernels of the best instruction set that the processor has. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "paceline.h"

#define EXPORT __attribute__((visibility("default")))

extern const InstructionSet paceline_generic;
#if defined(__x86_64__)
extern const InstructionSet paceline_avx2, paceline_avx512, paceline_avx512_bf16;
#endif

#if defined(__x86_64__) && defined(__linux__)
extern const InstructionSet paceline_amx;

/* Whether the processor has AMX for bfloat16 and int8, and the system lets this process use it, which has to be asked
 * for. */
static int has_amx(void) {
  enum { LEAF = 7, BFLOAT16_TILES = 1 << 22, TILES = 1 << 24, INT8_TILES = 1 << 25, REQUEST = 0x1023, TILE_DATA = 18 };
  unsigned a, b, c, d = 0;
  __get_cpuid_count(LEAF, 0, &a, &b, &c, &d);
  return d & BFLOAT16_TILES && d & INT8_TILES && d & TILES && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

/* The kernels of level 0 (any processor), 1 (AVX2), 2 (AVX-512), 3 (AVX-512 with
 * bfloat16) or 4 (AVX-512 and AMX), or NULL where the processor or the system lacks them. */
EXPORT const InstructionSet *paceline_kernels(int level) {
  if (level == 0) return &paceline_generic;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (level == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &paceline_avx2;
  if (level == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return &paceline_avx512;
  if (level == 3 && paceline_kernels(2) && __builtin_cpu_supports("avx512bf16")) return &paceline_avx512_bf16;
#endif
#if defined(__x86_64__) && defined(__linux__)
  if (level == 4 && paceline_kernels(2) && has_amx()) return &paceline_amx;
#endif
  return NULL;
}

/* Ask for large pages: a pass reads each weight once, and with small ones it would wait for as many address look-ups. */
EXPORT void paceline_advise(void *start, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(start, bytes, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}
