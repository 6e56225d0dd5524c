// Kernels, host build: halves in vectors of 8 (see Vector in platform.h), for avx2.cpp alone.
#pragma once

#include <immintrin.h>

#include "distrt/dtype.h"

namespace distrt {
namespace {

typedef float Floats __attribute__((vector_size(32)));

template <>
constexpr bool is_real<Floats> = true;

DISTRT_FN Floats square_root(Floats x) { return _mm256_sqrt_ps(x); }

template <>
struct Vector<f32> {
    using Wide = Floats;
    static constexpr bool halves = false;
    static constexpr int lanes = 8;
    static DISTRT_FN Wide load(const f32* from) { return _mm256_loadu_ps(from); }
    static DISTRT_FN void store(f32* to, Wide x) { _mm256_storeu_ps(to, x); }
};

template <>
struct Vector<f16> {
    using Wide = Floats;
    static constexpr bool halves = true;
    static constexpr int lanes = 8;

    static DISTRT_FN Wide load(const f16* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static DISTRT_FN void store(f16* to, Wide x) {
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, nearest));
    }
};

template <>
struct Vector<bf16> {
    using Wide = Floats;
    static constexpr bool halves = true;
    static constexpr int lanes = 8;

    static DISTRT_FN Wide load(const bf16* from) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    // The instruction that joins two vectors of 32 bits works in each half of a register; the
    // permutation takes the two lower quarters together.
    static DISTRT_FN void store(bf16* to, Wide x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        const __m256i rounded = _mm256_add_epi32(bits, half);
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        const __m256i twice = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(twice));
    }
};

}  // namespace
}  // namespace distrt
