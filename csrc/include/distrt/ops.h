// Kernels, shared by both builds: the reductions, and the fold of two buffers.
//
// An op is a struct with `apply` on two accumulators, or two vectors of them. A fold combines the partial result that
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

template <class Op>
struct Combine {
    template <class A>
    DISTRT_FN void operator()(A& out, const A& partial, const A& local) const {
        out = Op::apply(partial, local);
    }
};

// A true division: with a rounded reciprocal the mean of 49 ones would be less than one.
template <class Op, class D>
struct CombineDivide {
    D divisor;
    template <class A>
    DISTRT_FN void operator()(A& out, const A& partial, const A& local) const {
        out = Op::apply(partial, local) / divisor;
    }
};

struct Copy {
    template <class A>
    DISTRT_FN void operator()(A& out, const A& in) const {
        out = in;
    }
};

// out = op(partial, local). P: the partial result's type, the accumulators' or, where it is one
// rank's own elements, theirs.
template <class Op, class T, class P>
DISTRT_FN void fold(Acc<T>* out, const P* partial, const T* local, i64 count) {
    each(count, Combine<Op>{}, Out<Acc<T>>{out}, In<P>{partial}, In<T>{local});
}

// The last fold: out = op(partial, local) / divisor, rounded once. Integers are not divided.
template <class Op, class T, class P>
DISTRT_FN void finish(T* out, const P* partial, const T* local, i64 count, f64 divisor) {
    const Out<T> to{out};
    const In<P> travelled{partial};
    const In<T> own{local};
    if constexpr (is_real<T>) {
        if (divisor != 1) {
            const CombineDivide<Op, Acc<T>> divide{static_cast<Acc<T>>(divisor)};
            each(count, divide, to, travelled, own);
            return;
        }
    }
    each(count, Combine<Op>{}, to, travelled, own);
}

// out = in, as accumulators
template <class T>
DISTRT_FN void widen(Acc<T>* out, const T* in, i64 count) {
    each(count, Copy{}, Out<Acc<T>>{out}, In<T>{in});
}

}  // namespace
}  // namespace distrt
