// Kernels, shared by both builds: the rows, that is which kernels exist, and their definition.
//
// Both builds expand DISTRT_KERNELS with the same five definitions, so they hold the same kernels
// under the same names (distrt_fold_sum_f32). The Python table is DTYPES in distrt/arrays.py;
// the tests compare the two. May include ops.h and update.h.
#pragma once

#include "distrt/ops.h"
#include "distrt/update.h"

#define DISTRT_OPS_OF(ROW, DT) ROW(sum, DT) ROW(prod, DT) ROW(min, DT) ROW(max, DT)

// Halves come first: a half's fold or finish has the same place among these alone.
#define DISTRT_HALF_ROWS(ROW) DISTRT_OPS_OF(ROW, f16) DISTRT_OPS_OF(ROW, bf16)

#define DISTRT_FOLD_ROWS(ROW) \
    DISTRT_HALF_ROWS(ROW)     \
    DISTRT_OPS_OF(ROW, f32)   \
    DISTRT_OPS_OF(ROW, f64)   \
    DISTRT_OPS_OF(ROW, i8)    \
    DISTRT_OPS_OF(ROW, i16)   \
    DISTRT_OPS_OF(ROW, i32)   \
    DISTRT_OPS_OF(ROW, i64)   \
    DISTRT_OPS_OF(ROW, u8)    \
    DISTRT_OPS_OF(ROW, u16)   \
    DISTRT_OPS_OF(ROW, u32)   \
    DISTRT_OPS_OF(ROW, u64)

#define DISTRT_WIDEN_ROWS(ROW) ROW(f16) ROW(bf16)
#define DISTRT_UPDATE_ROWS(ROW) ROW(f16) ROW(bf16) ROW(f32) ROW(f64)

#define DISTRT_KERNELS(FOLD, FINISH, WIDEN, SGD, ADAM) \
    DISTRT_FOLD_ROWS(FOLD)                             \
    DISTRT_FOLD_ROWS(FINISH)                           \
    DISTRT_WIDEN_ROWS(WIDEN)                           \
    DISTRT_UPDATE_ROWS(SGD)                            \
    DISTRT_UPDATE_ROWS(ADAM)

#define DISTRT_DEFINE_FOLD(OP, DT)                                                    \
    DISTRT_KERNEL(fold_##OP##_##DT)                                                   \
    (distrt::Acc<distrt::DT> * out, const distrt::Acc<distrt::DT>* partial,           \
     const distrt::DT* local, long long count) {                                      \
        distrt::fold<distrt::ops::OP, distrt::DT>(out, partial, local, count);        \
    }

#define DISTRT_DEFINE_FINISH(OP, DT)                                                    \
    DISTRT_KERNEL(finish_##OP##_##DT)                                                   \
    (distrt::DT * out, const distrt::Acc<distrt::DT>* partial, const distrt::DT* local, \
     long long count, double divisor) {                                                 \
        distrt::finish<distrt::ops::OP, distrt::DT>(out, partial, local, count, divisor); \
    }

#define DISTRT_DEFINE_WIDEN(DT)                                                     \
    DISTRT_KERNEL(widen_##DT)                                                       \
    (distrt::Acc<distrt::DT> * out, const distrt::DT* in, long long count) {        \
        distrt::widen<distrt::DT>(out, in, count);                                  \
    }

#define DISTRT_DEFINE_SGD(DT)                                                              \
    DISTRT_KERNEL(sgd_##DT)                                                                \
    (distrt::DT * param, const distrt::DT* grad, distrt::DT* velocity, long long count,    \
     double lr, double momentum, int nesterov) {                                           \
        distrt::sgd<distrt::DT>(param, grad, velocity, count, lr, momentum, nesterov);     \
    }

#define DISTRT_DEFINE_ADAM(DT)                                                                 \
    DISTRT_KERNEL(adam_##DT)                                                                   \
    (distrt::DT * param, const distrt::DT* grad, distrt::DT* m, distrt::DT* v, long long count, \
     double alpha, double beta1, double beta2, double epsilon) {                               \
        distrt::adam<distrt::DT>(param, grad, m, v, count, alpha, beta1, beta2, epsilon);      \
    }

#define DISTRT_DEFINE_KERNELS                                                     \
    DISTRT_KERNELS(DISTRT_DEFINE_FOLD, DISTRT_DEFINE_FINISH, DISTRT_DEFINE_WIDEN, \
                   DISTRT_DEFINE_SGD, DISTRT_DEFINE_ADAM)
