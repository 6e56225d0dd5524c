// Kernels, host build: the variant for x86 processors with AVX-512 (F, BW, DQ, VL).
#include "distrt/platform.h"
#if DISTRT_X86
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define DISTRT_VARIANT avx512
#include "instantiate.h"
#endif
