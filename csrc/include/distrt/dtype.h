// Kernels, shared by both builds: the element types and how each is widened and rounded.
//
// A half type is a struct of bits with conversions of its own, so that the host and every GPU
// give the same bits. The conversions have no branches, only selects, which compilers turn into
// vector code, and no step passes through a float32 subnormal, so they hold where some library
// has told the processor to flush those to zero. May include platform.h.
#pragma once

#include "distrt/platform.h"

namespace distrt {
namespace {

using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "LP64 or alike");

// What a storage type computes in (`acc`) and the way there and back. A NaN keeps its sign and the
// upper bits of its payload; float16 makes it quiet both ways, bfloat16 where it is rounded, as
// processors with instructions for them do.
template <class T>
struct Storage {
    using acc = T;
    static DISTRT_FN T widen(T x) { return x; }
    static DISTRT_FN T narrow(T x) { return x; }
};

template <>
struct Storage<f16> {
    using acc = f32;

    // The exponent moves from bias 15 to bias 127. A subnormal is given the exponent of the
    // least normal and loses that number again; the subtraction is exact.
    static DISTRT_FN f32 widen(f16 x) {
        const u32 magnitude = (x.bits & 0x7fffu) << 13;
        const u32 exponent = magnitude & 0x0f800000u;
        const u32 special = exponent == 0x0f800000u ? 112u << 23 : 0u;
        const u32 quiet = magnitude > 0x0f800000u ? 1u << 22 : 0u;
        const u32 normal = (magnitude + (112u << 23) + special) | quiet;
        const u32 subnormal = to_bits(from_bits(magnitude + (113u << 23)) - from_bits(113u << 23));
        const u32 sign = (x.bits & 0x8000u) << 16;
        return from_bits(sign | (exponent == 0 ? subnormal : normal));
    }

    // To nearest, ties to even. Normal: half a unit less one, plus the last bit that stays,
    // carries into it; a carry out of the top gives infinity. Subnormal: adding one half lines
    // the number up with units of 2^-24, so the processor rounds it.
    static DISTRT_FN f16 narrow(f32 x) {
        const u32 bits = to_bits(x);
        const u32 magnitude = bits & 0x7fffffffu;
        const u32 odd = (magnitude >> 13) & 1u;
        const u32 normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
        const u32 subnormal = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
        const u32 finite = magnitude < 113u << 23 ? subnormal : normal;
        const u32 bounded = magnitude >= 143u << 23 ? 0x7c00u : finite;
        const u32 quiet = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
        const u32 result = magnitude > 0x7f800000u ? quiet : bounded;
        return {static_cast<u16>(((bits >> 16) & 0x8000u) | result)};
    }
};

template <>
struct Storage<bf16> {
    using acc = f32;

    static DISTRT_FN f32 widen(bf16 x) { return from_bits(static_cast<u32>(x.bits) << 16); }

    // The upper half of a float32, to nearest, ties to even. A NaN is not rounded, since that
    // could carry it into infinity.
    static DISTRT_FN bf16 narrow(f32 x) {
        const u32 bits = to_bits(x);
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const u32 quiet = (bits >> 16) | 0x40u;
        return {static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
    }
};

template <class T>
using Acc = typename Storage<T>::acc;

// Whether T has fractions: one half survives only there. A vector has those of its elements.
template <class T>
constexpr bool is_real = Acc<T>(0.5) != Acc<T>(0);

// The unsigned type in which integers of this size wrap. Never narrower than 32 bits: C++ would
// promote to int, whose overflow is undefined.
template <int bytes>
struct Modular {
    using type = u32;
};
template <>
struct Modular<8> {
    using type = u64;
};
template <class T>
using Word = typename Modular<sizeof(T)>::type;

}  // namespace
}  // namespace distrt
