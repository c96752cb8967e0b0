// SPDX-License-Identifier: Apache-2.0
// Scales and splits a plane. Bound by memory bandwidth.
#pragma once

#include "common/cuda/sm80/split.cuh"
#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

struct SplitPlaneParams {
  SplitPlaneProblem problem;
  std::int64_t pairs = 0;
  unsigned slabs = 0;  // of a channel, a block each
};

constexpr int kSplitPlaneThreads = 256;
constexpr int kSplitPlanePieces = 2;  // of kPlaces numbers, that a thread takes
constexpr int kSplitPlaneSlab = kSplitPlaneThreads * kSplitPlanePieces * kPlaces;

// The number that stands for a channel's largest when its scale is chosen. Below 2^-112 scale or
// undo would leave fp32's range; with the scale of 2^-112 even 2^-149 is a number in fp16.
__device__ __forceinline__ float split_plane_largest(unsigned bits) {
  return __uint_as_float(min(max(bits, 15u << 23), 0x7f7fffffu));
}

__global__ void __launch_bounds__(kSplitPlaneThreads)
    split_plane_kernel(const __grid_constant__ SplitPlaneParams params) {
  const SplitPlaneProblem& p = params.problem;
  const int channel = static_cast<int>(blockIdx.x / params.slabs);
  const std::int64_t slab = blockIdx.x % params.slabs;
  const std::int64_t pairs = params.pairs;
  const std::int64_t first = slab * kSplitPlaneSlab + thread_index() * kPlaces;
  const std::int64_t at = channel * pairs + first;

  float4 x[kSplitPlanePieces][2];
#pragma unroll
  for (int i = 0; i < kSplitPlanePieces; ++i) {
    constexpr int kStep = kSplitPlaneThreads * kPlaces;
    if (first + i * kStep >= pairs) continue;
    const auto* from = reinterpret_cast<const float4*>(p.plane + at + i * kStep);
    x[i][0] = from[0];
    x[i][1] = from[1];
  }
  const float largest = split_plane_largest(p.largest[channel]);
  const float scale = sm80::split_multiplier(largest);
  if (first == 0) p.undo[channel] = sm80::split_undo(largest);
#pragma unroll
  for (int i = 0; i < kSplitPlanePieces; ++i) {
    constexpr int kStep = kSplitPlaneThreads * kPlaces;
    if (first + i * kStep >= pairs) continue;
    const float numbers[kPlaces] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w,
                                    x[i][1].x, x[i][1].y, x[i][1].z, x[i][1].w};
    std::uint32_t hi[kPlaces / 2];
    std::uint32_t lo[kPlaces / 2];
#pragma unroll
    for (int e = 0; e < kPlaces; e += 2) {
      float y[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        y[half] = numbers[e + half] * scale;
        // An infinite number becomes NaN in both halves: infinite times the other operand's lo
        // could have the wrong sign, or vanish beside a zero.
        y[half] += y[half] - y[half];
      }
      sm80::split_pair(y[0], y[1], &hi[e / 2], &lo[e / 2]);
    }
    *reinterpret_cast<uint4*>(p.hi + at + i * kStep) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    if (p.lo != nullptr) {
      *reinterpret_cast<uint4*>(p.lo + at + i * kStep) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
