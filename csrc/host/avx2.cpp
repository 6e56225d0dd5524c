// Kernels, host build: the variant for x86 processors with AVX2 and F16C. No FMA: the bits must
// agree. The target comes before every header, since it holds for what follows it.
#if defined(__x86_64__)
#pragma GCC target("avx2,f16c")
#define DISTRT_VARIANT avx2
#include "vectors_avx2.h"
#include "instantiate.h"
#endif
