// SPDX-License-Identifier: Apache-2.0
// The instructions of compute capability 9.0 that CUDA C++ has no name for, one thin wrapper each.
// Under a plain C++ compiler the emulation gives the same names the same meaning.
#pragma once

#include "common/cuda/sm80/instructions.cuh"

#ifndef __CUDACC__
#include "emulation/sm90a.h"
#else

#include <cstdint>

namespace fused_ops::sm90a {

// Changes how many registers each thread of a warpgroup has; all four warps call it.
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace fused_ops::sm90a

#endif  // __CUDACC__
