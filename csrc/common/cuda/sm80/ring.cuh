// SPDX-License-Identifier: Apache-2.0
// Barriers of a ring in shared memory: some warps fill its stages, others empty them.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/instructions.cuh"

namespace fused_ops::sm80 {

// A stage of a ring and the number of times that the ring came round, modulo 2.
template <int kStages>
struct RingSlot {
  int stage = 0;
  int round = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      round ^= 1;
    }
  }
};

// How a warp arrives at a barrier of the ring: its lanes meet, then one of them arrives for all. A
// race checker does not see that the meeting orders the others' accesses as well; for its sake
// every thread can arrive by itself (common/sanitizers.h), which costs a tenth of the time.
__device__ __forceinline__ int arrivals(int threads, bool every_thread) {
  return every_thread ? threads : threads / 32;
}

__device__ __forceinline__ void warp_arrives(std::uint64_t* barrier, int thread,
                                             bool every_thread) {
  __syncwarp();
  if (thread % 32 == 0 || every_thread) mbarrier_arrive(barrier);
}

}  // namespace fused_ops::sm80
