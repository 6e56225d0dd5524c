// Kernels, host build: picks the variant for this processor and exports the kernels' names.
//
// The exported functions (distrt_fold_sum_f32 ...) have the signatures of the CUDA kernels and
// run the active variant.
#include <cstring>

#include "variant.h"

namespace distrt {
namespace host {

#define DISTRT_NAME_FOLD(OP, DT) "fold_" #OP "_" #DT,
#define DISTRT_NAME_FINISH(OP, DT) "finish_" #OP "_" #DT,
#define DISTRT_NAME_WIDEN(DT) "widen_" #DT,
#define DISTRT_NAME_SGD(DT) "sgd_" #DT,
#define DISTRT_NAME_ADAM(DT) "adam_" #DT,
const char* const names[index::count] = {DISTRT_KERNELS(
    DISTRT_NAME_FOLD, DISTRT_NAME_FINISH, DISTRT_NAME_WIDEN, DISTRT_NAME_SGD, DISTRT_NAME_ADAM)};

namespace {

struct Runnable {
    const Variant* variants[3] = {&baseline};
    int count = 1;

    Runnable() {
#if DISTRT_X86
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
            variants[count++] = &avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            variants[count++] = &avx512;
#endif
    }
};

const Runnable found;
const Variant* chosen = found.variants[found.count - 1];

}  // namespace

const Variant& active() { return *chosen; }

const Variant* const* runnable(int* count) {
    *count = found.count;
    return found.variants;
}

bool select(const char* isa) {
    for (int i = 0; i < found.count; ++i) {
        if (std::strcmp(found.variants[i]->isa, isa) == 0) {
            chosen = found.variants[i];
            return true;
        }
    }
    return false;
}

}  // namespace host
}  // namespace distrt

#define DISTRT_EXPORT extern "C" __attribute__((visibility("default"))) void
#define DISTRT_RUN(VERB, NAME) \
    reinterpret_cast<distrt::host::VERB>(distrt::host::active().kernels[distrt::host::index::NAME])

#define DISTRT_EXPORT_FOLD(OP, DT)                                                        \
    DISTRT_EXPORT distrt_fold_##OP##_##DT(void* out, const void* partial, const void* local, \
                                          long long count) {                              \
        DISTRT_RUN(Fold, fold_##OP##_##DT)(out, partial, local, count);                   \
    }
#define DISTRT_EXPORT_FINISH(OP, DT)                                                        \
    DISTRT_EXPORT distrt_finish_##OP##_##DT(void* out, const void* partial, const void* local, \
                                            long long count, double divisor) {              \
        DISTRT_RUN(Finish, finish_##OP##_##DT)(out, partial, local, count, divisor);        \
    }
#define DISTRT_EXPORT_WIDEN(DT)                                                       \
    DISTRT_EXPORT distrt_widen_##DT(void* out, const void* in, long long count) {     \
        DISTRT_RUN(Widening, widen_##DT)(out, in, count);                             \
    }
#define DISTRT_EXPORT_SGD(DT)                                                                \
    DISTRT_EXPORT distrt_sgd_##DT(void* param, const void* grad, void* velocity,             \
                                  long long count, double lr, double momentum, int nesterov) { \
        DISTRT_RUN(Sgd, sgd_##DT)(param, grad, velocity, count, lr, momentum, nesterov);     \
    }
#define DISTRT_EXPORT_ADAM(DT)                                                                   \
    DISTRT_EXPORT distrt_adam_##DT(void* param, const void* grad, void* m, void* v,              \
                                   long long count, double alpha, double beta1, double beta2,    \
                                   double epsilon) {                                             \
        DISTRT_RUN(AdamStep, adam_##DT)(param, grad, m, v, count, alpha, beta1, beta2, epsilon); \
    }

DISTRT_KERNELS(DISTRT_EXPORT_FOLD, DISTRT_EXPORT_FINISH, DISTRT_EXPORT_WIDEN, DISTRT_EXPORT_SGD,
               DISTRT_EXPORT_ADAM)
