// Kernels, shared by both builds: how a kernel is declared and how it walks over its arrays.
//
// This is the only file that knows which build it is in. The host build loops over the elements
// and leaves vectors to the compiler, but for half types, which it takes in the vectors that a
// variant offers; the CUDA build spreads them over a grid in packs of 16 bytes. Every other header
// says what happens to one element, or to a vector of them, in accumulators. Includes nothing,
// not even the standard library, because NVRTC has none.
#pragma once

#ifdef DISTRT_CUDA
#define DISTRT_FN __device__ __forceinline__
#define DISTRT_KERNEL(name) extern "C" __global__ void __launch_bounds__(256) distrt_##name
#else
#define DISTRT_FN inline
#define DISTRT_KERNEL(name) static void name
#if defined(__x86_64__)
#define DISTRT_X86 1
#else
#define DISTRT_X86 0
#endif
#endif

// Unnamed, because the host library compiles these headers once per instruction set: each
// translation unit must keep its own copies, or the linker would merge AVX-512 code into the
// baseline.
namespace distrt {
namespace {

// How elements are stored, and what they are computed in; dtype.h says it for every type.
template <class T>
struct Storage;

// One array of a kernel: what is loaded before an element is computed and stored after it.
// Streams may be the same array, element on element; they never overlap in another way.
template <class T, class Pointer, bool Loads, bool Stores>
struct Stream {
    using Value = T;
    static constexpr bool loads = Loads;
    static constexpr bool stores = Stores;
    Pointer data;
};
template <class T>
using In = Stream<T, const T*, true, false>;
template <class T>
using Out = Stream<T, T*, false, true>;
template <class T>
using InOut = Stream<T, T*, true, true>;

// One element on its way through a kernel: widened where it is loaded, rounded where it is stored.
template <class S>
struct Element {
    using Stored = Storage<typename S::Value>;
    decltype(*S::data) place;
    typename Stored::acc value;

    DISTRT_FN explicit Element(decltype(*S::data) at) : place(at) {
        if constexpr (S::loads) value = Stored::widen(place);
    }
    DISTRT_FN void store() const {
        if constexpr (S::stores) place = Stored::narrow(value);
    }
};

template <class F, class... E>
DISTRT_FN void compute(const F& f, E... elements) {
    f(elements.value...);
    (elements.store(), ...);
}

#ifdef DISTRT_CUDA

template <class T, int lanes>
struct alignas(sizeof(T) * lanes < 16 ? sizeof(T) * lanes : 16) Pack {
    T lane[lanes];
};

template <int lanes, class S>
struct Held {
    using One = Element<S>;
    using Packed = Pack<typename S::Value, lanes>;
    S stream;
    Packed pack;

    DISTRT_FN Held(S from, long long at) : stream{from.data + at} {
        if constexpr (S::loads) pack = *reinterpret_cast<const Packed*>(stream.data);
    }
    DISTRT_FN void store() const {
        if constexpr (S::stores) *reinterpret_cast<Packed*>(stream.data) = pack;
    }
};

template <int lanes, class F, class... H>
DISTRT_FN void through_packs(const F& f, H... held) {
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) compute(f, typename H::One(held.pack.lane[lane])...);
    (held.store(), ...);
}

DISTRT_FN bool aligned(const void* address) {
    return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}

// Calls f(value of each stream) for all `count` elements. The last stream must have the
// narrowest elements: its first 16-byte boundary is where packs begin. Where another stream has
// no boundary there, every element goes alone. Elements before and after the packs form the rest,
// whose loop stays rolled: unrolled, it would double the code and take registers from the packs.
template <class F, class Last, class... Before>
DISTRT_FN void each_from(long long count, const F& f, Last last, Before... before) {
    constexpr int size = sizeof(typename Last::Value);
    constexpr int lanes = 16 / size;
    static_assert(((sizeof(typename Before::Value) >= size) && ...), "narrowest stream last");
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long past = reinterpret_cast<unsigned long long>(last.data) / size % lanes;
    const long long head = past ? lanes - past : 0;
    const bool packed = head < count && aligned(last.data + head) &&
                        (aligned(before.data + head) && ...);
    const long long packs = packed ? (count - head) / lanes : 0;
    for (long long k = first; k < packs; k += stride) {
        const long long at = head + k * lanes;
        through_packs<lanes>(f, Held<lanes, Before>(before, at)..., Held<lanes, Last>(last, at));
    }
    const long long bulk = packs * lanes;
#pragma unroll 1
    for (long long k = first; k < count - bulk; k += stride) {
        const long long i = k < head ? k : k + bulk;
        compute(f, Element<Before>(before.data[i])..., Element<Last>(last.data[i]));
    }
}

template <class F, class A, class B>
DISTRT_FN void each(long long count, const F& f, A a, B b) {
    each_from(count, f, b, a);
}
template <class F, class A, class B, class C>
DISTRT_FN void each(long long count, const F& f, A a, B b, C c) {
    each_from(count, f, c, a, b);
}
template <class F, class A, class B, class C, class D>
DISTRT_FN void each(long long count, const F& f, A a, B b, C c, D d) {
    each_from(count, f, d, a, b, c);
}

DISTRT_FN unsigned int to_bits(float x) { return __float_as_uint(x); }
DISTRT_FN float from_bits(unsigned int bits) { return __uint_as_float(bits); }
DISTRT_FN float square_root(float x) { return sqrtf(x); }
DISTRT_FN double square_root(double x) { return sqrt(x); }

#else

// The vectors in which a variant computes elements of type T. Compilers do not find the
// processor's instructions that convert halves, so a variant that has some specialises this, and
// for float32, which travels with halves: `halves` tells them apart, `lanes` are as many for all,
// and load() and store() convert. The operators of a vector are those of its elements.
template <class T>
struct Vector {
    static constexpr bool halves = false;
};

template <class S>
struct Elements {
    using Stored = Vector<typename S::Value>;
    decltype(S::data) place;
    typename Stored::Wide value;

    DISTRT_FN explicit Elements(decltype(S::data) at) : place(at) {
        if constexpr (S::loads) value = Stored::load(place);
    }
    DISTRT_FN void store() const {
        if constexpr (S::stores) Stored::store(place, value);
    }
};

template <class S, class...>
constexpr int lanes_of = Vector<typename S::Value>::lanes;

// Calls f(value of each stream) for all `count` elements. ivdep: streams are either the same
// array or apart, so no element depends on another one; without it an in-place fold would fail
// the compiler's overlap check and run element by element.
template <class F, class... S>
DISTRT_FN void each(long long count, const F& f, S... streams) {
    long long i = 0;
    if constexpr ((Vector<typename S::Value>::halves || ...)) {
        constexpr int lanes = lanes_of<S...>;
        for (; i <= count - lanes; i += lanes) compute(f, Elements<S>(streams.data + i)...);
    }
#pragma GCC ivdep
    for (; i < count; ++i) compute(f, Element<S>(streams.data[i])...);
}

DISTRT_FN unsigned int to_bits(float x) {
    unsigned int bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
DISTRT_FN float from_bits(unsigned int bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
DISTRT_FN float square_root(float x) { return __builtin_sqrtf(x); }
DISTRT_FN double square_root(double x) { return __builtin_sqrt(x); }

#endif

}  // namespace
}  // namespace distrt
