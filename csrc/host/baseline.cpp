// Kernels, host build: the variant for any processor of the architecture.
#define DISTRT_VARIANT baseline
#include "instantiate.h"
