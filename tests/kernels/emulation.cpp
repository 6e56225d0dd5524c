// The CUDA kernels on the CPU: csrc/cuda/kernels.cu itself, compiled by g++.
//
// A launch runs every thread of every block in turn, which is one of the orders that a GPU may
// choose and all there is to see: these kernels neither synchronise nor share. Compiled with
// -fsanitize=alignment, because x86 forgives the misaligned packs that a GPU refuses. What it
// cannot show: PTX, timing, launch limits.
#include <cmath>
#include <cstring>

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Index {
    unsigned x;
};
static Index gridDim, blockDim, blockIdx, threadIdx;

static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

#include "cuda/kernels.cu"

template <class... A>
static void launch(unsigned grid, unsigned block, void (*kernel)(A...), A... arguments) {
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel(arguments...);
}

using Address = void*;
using Count = long long;

extern "C" {
__global__ void emulate_fold(unsigned grid, unsigned block,
                             void (*kernel)(Address, Address, Address, Count), Address out,
                             Address partial, Address local, Count count) {
    launch(grid, block, kernel, out, partial, local, count);
}
__global__ void emulate_finish(unsigned grid, unsigned block,
                               void (*kernel)(Address, Address, Address, Count, double),
                               Address out, Address partial, Address local, Count count,
                               double divisor) {
    launch(grid, block, kernel, out, partial, local, count, divisor);
}
__global__ void emulate_widen(unsigned grid, unsigned block,
                              void (*kernel)(Address, Address, Count), Address out, Address in,
                              Count count) {
    launch(grid, block, kernel, out, in, count);
}
__global__ void emulate_sgd(unsigned grid, unsigned block,
                            void (*kernel)(Address, Address, Address, Count, double, double, int),
                            Address param, Address grad, Address velocity, Count count, double lr,
                            double momentum, int nesterov) {
    launch(grid, block, kernel, param, grad, velocity, count, lr, momentum, nesterov);
}
__global__ void emulate_adam(unsigned grid, unsigned block,
                             void (*kernel)(Address, Address, Address, Address, Count, double,
                                            double, double, double),
                             Address param, Address grad, Address m, Address v, Count count,
                             double alpha, double beta1, double beta2, double epsilon) {
    launch(grid, block, kernel, param, grad, m, v, count, alpha, beta1, beta2, epsilon);
}
}
