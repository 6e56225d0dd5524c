// Kernels, CUDA build: every row of table.h as a __global__ function.
//
// Compiled at run time by NVRTC for the device at hand (distrt/kernels/cuda.py), with -fmad=false
// and without -ftz, so that it gives the host library's bits. It needs no header but ours.
#define DISTRT_CUDA
#include "distrt/table.h"

DISTRT_DEFINE_KERNELS
