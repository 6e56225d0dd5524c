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

template <class R>
struct SgdPlain {
    R lr;
    template <class A>
    DISTRT_FN void operator()(A& param, const A& grad) const {
        param = param - grad * lr;
    }
};

template <class R, bool nesterov>
struct SgdMomentum {
    R lr, momentum;
    template <class A>
    DISTRT_FN void operator()(A& param, A& velocity, const A& grad) const {
        const A step = grad * lr;
        velocity = momentum * velocity - step;
        if constexpr (nesterov)
            param = param + (momentum * velocity - step);
        else
            param = param + velocity;
    }
};

template <class R>
struct Adam {
    R alpha, rest1, rest2, epsilon;
    template <class A>
    DISTRT_FN void operator()(A& param, A& m, A& v, const A& grad) const {
        m = m + (grad - m) * rest1;
        v = v + (grad * grad - v) * rest2;
        param = param - (m * alpha) / (square_root(v) + epsilon);
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
        each(count, SgdPlain<Acc<T>>{rate}, w, g);
    else if (nesterov)
        each(count, SgdMomentum<Acc<T>, true>{rate, keep}, w, v, g);
    else
        each(count, SgdMomentum<Acc<T>, false>{rate, keep}, w, v, g);
}

// `alpha` is the bias-corrected rate lr * sqrt(1 - beta2^t) / (1 - beta1^t).
template <class T>
DISTRT_FN void adam(T* param, const T* grad, T* m, T* v, i64 count, f64 alpha, f64 beta1,
                    f64 beta2, f64 epsilon) {
    const Adam<Acc<T>> step{static_cast<Acc<T>>(alpha), static_cast<Acc<T>>(1 - beta1),
                       static_cast<Acc<T>>(1 - beta2), static_cast<Acc<T>>(epsilon)};
    each(count, step, InOut<T>{param}, InOut<T>{m}, InOut<T>{v}, In<T>{grad});
}

}  // namespace
}  // namespace distrt
