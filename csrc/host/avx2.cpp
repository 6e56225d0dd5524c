// Kernels, host build: the variant for x86 processors with AVX2. No FMA: the bits must agree.
#include "distrt/platform.h"
#if DISTRT_X86
#pragma GCC target("avx2")
#define DISTRT_VARIANT avx2
#include "instantiate.h"
#endif
