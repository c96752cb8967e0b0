// SPDX-License-Identifier: Apache-2.0
// What every kernel body includes first: CUDA's language under nvcc, or the emulation's meaning of
// it under a plain C++ compiler (tests/emulation), where the same source runs on the CPU.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "emulation/cuda.h"
#endif

namespace fused_ops {

// The block's dynamic shared memory, seen as a T. Kernels have no other shared memory, so that the
// emulation can poison and check all of it; the launcher passes sizeof(T).
template <class T>
__device__ inline T& shared_memory() {
  static_assert(alignof(T) <= 1024);
#ifdef __CUDACC__
  extern __shared__ __align__(1024) unsigned char fused_ops_shared_memory[];
  return *reinterpret_cast<T*>(fused_ops_shared_memory);
#else
  return *static_cast<T*>(emulation::shared_memory(sizeof(T)));
#endif
}

// threadIdx.x as an int, for one-dimensional blocks. The volatile read keeps the front end from
// repeating it; ptxas still reads the register again where registers are scarce.
__device__ inline int thread_index() {
#ifdef __CUDACC__
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
#else
  return static_cast<int>(threadIdx.x);
#endif
}

}  // namespace fused_ops
