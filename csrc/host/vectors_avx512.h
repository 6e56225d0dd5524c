// Kernels, host build: halves in vectors of 16 (see Vector in platform.h), for avx512.cpp alone.
//
// bfloat16 is rounded in integers: the processor's own instruction takes subnormals for zero.
#pragma once

#include <immintrin.h>

#include "distrt/dtype.h"

namespace distrt {
namespace {

typedef float Floats __attribute__((vector_size(64)));

template <>
constexpr bool is_real<Floats> = true;

DISTRT_FN Floats square_root(Floats x) { return _mm512_sqrt_ps(x); }

template <>
struct Vector<f32> {
    using Wide = Floats;
    static constexpr bool halves = false;
    static constexpr int lanes = 16;
    static DISTRT_FN Wide load(const f32* from) { return _mm512_loadu_ps(from); }
    static DISTRT_FN void store(f32* to, Wide x) { _mm512_storeu_ps(to, x); }
};

template <>
struct Vector<f16> {
    using Wide = Floats;
    static constexpr bool halves = true;
    static constexpr int lanes = 16;

    static DISTRT_FN Wide load(const f16* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static DISTRT_FN void store(f16* to, Wide x) {
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, nearest));
    }
};

template <>
struct Vector<bf16> {
    using Wide = Floats;
    static constexpr bool halves = true;
    static constexpr int lanes = 16;

    static DISTRT_FN Wide load(const bf16* from) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static DISTRT_FN void store(bf16* to, Wide x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        const __m512i rounded = _mm512_add_epi32(bits, half);
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i quiet = _mm512_set1_epi32(0x400000);
        const __m512i result = _mm512_mask_or_epi32(rounded, nan, bits, quiet);
        const __m256i upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), upper);
    }
};

}  // namespace
}  // namespace distrt
