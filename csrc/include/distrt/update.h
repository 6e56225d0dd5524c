// Kernels, shared by both builds: one pass of an optimizer over one variable.
//
// The numerics are those of Keras 3 (keras.optimizers.SGD and Adam): the same operations in the
// same order, with the hyperparameters cast to the type that is computed in. Half types are
// computed in float32; what is stored is rounded, what is used in the same pass is not.
// May include dtype.h.
#pragma once

#include "distrt/dtype.h"

namespace distrt {
namespace {

template <class T>
struct SgdPlain {
    Acc<T> lr;
    DISTRT_FN void operator()(T& param, const T& grad) const {
        using S = Storage<T>;
        param = S::narrow(S::widen(param) - S::widen(grad) * lr);
    }
};

template <class T, bool nesterov>
struct SgdMomentum {
    Acc<T> lr, momentum;
    DISTRT_FN void operator()(T& param, T& velocity, const T& grad) const {
        using S = Storage<T>;
        const Acc<T> step = S::widen(grad) * lr;
        const Acc<T> v = momentum * S::widen(velocity) - step;
        const Acc<T> w = S::widen(param);
        velocity = S::narrow(v);
        if constexpr (nesterov)
            param = S::narrow(w + (momentum * v - step));
        else
            param = S::narrow(w + v);
    }
};

template <class T>
struct Adam {
    Acc<T> alpha, rest1, rest2, epsilon;
    DISTRT_FN void operator()(T& param, T& m, T& v, const T& grad) const {
        using S = Storage<T>;
        const Acc<T> g = S::widen(grad);
        const Acc<T> m_old = S::widen(m);
        const Acc<T> v_old = S::widen(v);
        const Acc<T> m_new = m_old + (g - m_old) * rest1;
        const Acc<T> v_new = v_old + (g * g - v_old) * rest2;
        const Acc<T> w = S::widen(param) - (m_new * alpha) / (square_root(v_new) + epsilon);
        m = S::narrow(m_new);
        v = S::narrow(v_new);
        param = S::narrow(w);
    }
};

// Without a velocity (null) plain gradient descent.
template <class T>
DISTRT_FN void sgd(T* param, const T* grad, T* velocity, i64 count, f64 lr, f64 momentum,
                   i32 nesterov) {
    const Acc<T> rate = static_cast<Acc<T>>(lr);
    const Acc<T> keep = static_cast<Acc<T>>(momentum);
    const InOut<T> w{param}, v{velocity};
    const In<T> g{grad};
    if (velocity == nullptr)
        each(count, SgdPlain<T>{rate}, w, g);
    else if (nesterov)
        each(count, SgdMomentum<T, true>{rate, keep}, w, v, g);
    else
        each(count, SgdMomentum<T, false>{rate, keep}, w, v, g);
}

// `alpha` is the bias-corrected rate lr * sqrt(1 - beta2^t) / (1 - beta1^t).
template <class T>
DISTRT_FN void adam(T* param, const T* grad, T* m, T* v, i64 count, f64 alpha, f64 beta1,
                    f64 beta2, f64 epsilon) {
    const Adam<T> step{static_cast<Acc<T>>(alpha), static_cast<Acc<T>>(1 - beta1),
                       static_cast<Acc<T>>(1 - beta2), static_cast<Acc<T>>(epsilon)};
    each(count, step, InOut<T>{param}, InOut<T>{m}, InOut<T>{v}, In<T>{grad});
}

}  // namespace
}  // namespace distrt
