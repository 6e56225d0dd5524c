// Kernels, host build: a variant is all kernels compiled for one instruction set.
//
// Each of baseline.cpp, avx2.cpp and avx512.cpp defines one; dispatch.cpp picks one. A kernel's
// index is its place in DISTRT_KERNELS, equal in all variants.
#pragma once

#include "distrt/table.h"

namespace distrt {
namespace host {

// Every kernel by its address alone; whoever calls one restores its signature by its verb.
using Kernel = void (*)();
using Fold = void (*)(void*, const void*, const void*, long long);
using Finish = void (*)(void*, const void*, const void*, long long, double);
using Widening = void (*)(void*, const void*, long long);
using Sgd = void (*)(void*, const void*, void*, long long, double, double, int);
using AdamStep = void (*)(void*, const void*, void*, void*, long long, double, double, double,
                          double);

#define DISTRT_INDEX_FOLD(OP, DT) fold_##OP##_##DT,
#define DISTRT_INDEX_FINISH(OP, DT) finish_##OP##_##DT,
#define DISTRT_INDEX_WIDEN(DT) widen_##DT,
#define DISTRT_INDEX_SGD(DT) sgd_##DT,
#define DISTRT_INDEX_ADAM(DT) adam_##DT,
namespace index {
enum Index {
    DISTRT_KERNELS(DISTRT_INDEX_FOLD, DISTRT_INDEX_FINISH, DISTRT_INDEX_WIDEN, DISTRT_INDEX_SGD,
                   DISTRT_INDEX_ADAM) count
};
}  // namespace index

// Rows of DISTRT_HALF_ROWS.
constexpr int half_rows = index::fold_sum_f32 - index::fold_sum_f16;

// The pair kernels are folds and finishes whose partial result is a rank's own elements, of a
// half type: what two ranks in shared memory need is then read once and widened in registers.
struct Variant {
    const char* isa;
    Kernel kernels[index::count];
    Kernel pair_folds[half_rows], pair_finishes[half_rows];
};

extern const Variant baseline, avx2, avx512;

// The kernel's name without its prefix, "fold_sum_f32".
extern const char* const names[index::count];

const Variant& active();
// The variants that this processor runs, slowest first; `count` of them.
const Variant* const* runnable(int* count);
// Makes `isa` the active variant; false where this processor does not run it.
bool select(const char* isa);

}  // namespace host
}  // namespace distrt
