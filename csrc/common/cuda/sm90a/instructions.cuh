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

// A barrier in shared memory. A phase ends when `count` arrivals were made; phases are numbered
// from 0. What a thread wrote before it arrived is seen by those that wait for the phase to end.
__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(sm80::shared_address(barrier)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(sm80::shared_address(barrier))
               : "memory");
}

// Waits until a phase of this parity (0 for even numbers) has ended: until the current phase is
// another, so that right after mbarrier_init a wait with parity 1 does not block.
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(sm80::shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A meeting of `threads` threads of the block at one of its barriers 1 to 15.
template <int barrier, int threads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}

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
