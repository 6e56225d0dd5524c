// Kernels, host build: the body of a variant, included once by baseline.cpp, avx2.cpp and
// avx512.cpp each (so it has no include guard). The including file sets the target and
// DISTRT_VARIANT, the name of the table to define.
#include "variant.h"

DISTRT_DEFINE_KERNELS

#define DISTRT_DEFINE_PAIR(OP, DT)                                                             \
    DISTRT_KERNEL(pair_fold_##OP##_##DT)                                                       \
    (distrt::Acc<distrt::DT> * out, const distrt::DT* first, const distrt::DT* second,         \
     long long count) {                                                                        \
        distrt::fold<distrt::ops::OP, distrt::DT>(out, first, second, count);                  \
    }                                                                                          \
    DISTRT_KERNEL(pair_finish_##OP##_##DT)                                                     \
    (distrt::DT * out, const distrt::DT* first, const distrt::DT* second, long long count,     \
     double divisor) {                                                                         \
        distrt::finish<distrt::ops::OP, distrt::DT>(out, first, second, count, divisor);       \
    }
DISTRT_HALF_ROWS(DISTRT_DEFINE_PAIR)

#define DISTRT_ENTRY_FOLD(OP, DT) reinterpret_cast<Kernel>(::fold_##OP##_##DT),
#define DISTRT_ENTRY_FINISH(OP, DT) reinterpret_cast<Kernel>(::finish_##OP##_##DT),
#define DISTRT_ENTRY_WIDEN(DT) reinterpret_cast<Kernel>(::widen_##DT),
#define DISTRT_ENTRY_SGD(DT) reinterpret_cast<Kernel>(::sgd_##DT),
#define DISTRT_ENTRY_ADAM(DT) reinterpret_cast<Kernel>(::adam_##DT),
#define DISTRT_ENTRY_PAIR_FOLD(OP, DT) reinterpret_cast<Kernel>(::pair_fold_##OP##_##DT),
#define DISTRT_ENTRY_PAIR_FINISH(OP, DT) reinterpret_cast<Kernel>(::pair_finish_##OP##_##DT),
#define DISTRT_TEXT_(NAME) #NAME
#define DISTRT_TEXT(NAME) DISTRT_TEXT_(NAME)

namespace distrt {
namespace host {
const Variant DISTRT_VARIANT = {
    DISTRT_TEXT(DISTRT_VARIANT),
    {DISTRT_KERNELS(DISTRT_ENTRY_FOLD, DISTRT_ENTRY_FINISH, DISTRT_ENTRY_WIDEN, DISTRT_ENTRY_SGD,
                    DISTRT_ENTRY_ADAM)},
    {DISTRT_HALF_ROWS(DISTRT_ENTRY_PAIR_FOLD)},
    {DISTRT_HALF_ROWS(DISTRT_ENTRY_PAIR_FINISH)}};
}  // namespace host
}  // namespace distrt
