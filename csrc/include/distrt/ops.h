// Kernels, shared by both builds: the reductions, and the fold of two buffers.
//
// An op is a struct with `apply` on two accumulators. A fold combines the partial result that
// travels (always of the accumulator type) with this rank's own elements. To add an op: a struct
// here, a row in table.h, a member in reduce_op.py. May include dtype.h.
#pragma once

#include "distrt/dtype.h"

namespace distrt {
namespace {
namespace ops {

struct sum {
    template <class A>
    static DISTRT_FN A apply(A a, A b) {
        if constexpr (is_real<A>)
            return a + b;
        else
            return static_cast<A>(static_cast<Word<A>>(a) + static_cast<Word<A>>(b));
    }
};

struct prod {
    template <class A>
    static DISTRT_FN A apply(A a, A b) {
        if constexpr (is_real<A>)
            return a * b;
        else
            return static_cast<A>(static_cast<Word<A>>(a) * static_cast<Word<A>>(b));
    }
};

// A NaN on either side is the result: `a` by its own test, `b` because no comparison holds.
struct min {
    template <class A>
    static DISTRT_FN A apply(A a, A b) {
        if constexpr (is_real<A>)
            return (a < b) | (a != a) ? a : b;
        else
            return a < b ? a : b;
    }
};

struct max {
    template <class A>
    static DISTRT_FN A apply(A a, A b) {
        if constexpr (is_real<A>)
            return (a > b) | (a != a) ? a : b;
        else
            return a > b ? a : b;
    }
};

}  // namespace ops

template <class Op, class T>
struct Combine {
    DISTRT_FN void operator()(Acc<T>& out, const Acc<T>& partial, const T& local) const {
        out = Op::apply(partial, Storage<T>::widen(local));
    }
};

template <class Op, class T>
struct CombineRound {
    DISTRT_FN void operator()(T& out, const Acc<T>& partial, const T& local) const {
        out = Storage<T>::narrow(Op::apply(partial, Storage<T>::widen(local)));
    }
};

// A true division: with a rounded reciprocal the mean of 49 ones would be less than one.
template <class Op, class T>
struct CombineDivideRound {
    Acc<T> divisor;
    DISTRT_FN void operator()(T& out, const Acc<T>& partial, const T& local) const {
        out = Storage<T>::narrow(Op::apply(partial, Storage<T>::widen(local)) / divisor);
    }
};

template <class T>
struct Widen {
    DISTRT_FN void operator()(Acc<T>& out, const T& in) const { out = Storage<T>::widen(in); }
};

// out = op(partial, local)
template <class Op, class T>
DISTRT_FN void fold(Acc<T>* out, const Acc<T>* partial, const T* local, i64 count) {
    each(count, Combine<Op, T>{}, Out<Acc<T>>{out}, In<Acc<T>>{partial}, In<T>{local});
}

// The last fold: out = op(partial, local) / divisor, rounded once. Integers are not divided.
template <class Op, class T>
DISTRT_FN void finish(T* out, const Acc<T>* partial, const T* local, i64 count, f64 divisor) {
    const Out<T> to{out};
    const In<Acc<T>> travelled{partial};
    const In<T> own{local};
    if constexpr (is_real<T>) {
        if (divisor != 1) {
            const CombineDivideRound<Op, T> divide{static_cast<Acc<T>>(divisor)};
            each(count, divide, to, travelled, own);
            return;
        }
    }
    each(count, CombineRound<Op, T>{}, to, travelled, own);
}

// out = in, as accumulators
template <class T>
DISTRT_FN void widen(Acc<T>* out, const T* in, i64 count) {
    each(count, Widen<T>{}, Out<Acc<T>>{out}, In<T>{in});
}

}  // namespace
}  // namespace distrt
