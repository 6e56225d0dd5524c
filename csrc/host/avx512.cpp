// Kernels, host build: the variant for x86 processors with AVX-512 (F, BW, DQ, VL). The target
// comes before every header, since it holds for what follows it. Some compilers' own headers
// begin intrinsics with an undefined vector and then warn of it.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define DISTRT_VARIANT avx512
#include "vectors_avx512.h"
#include "instantiate.h"
#endif
