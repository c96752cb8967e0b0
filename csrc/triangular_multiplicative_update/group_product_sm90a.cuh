// SPDX-License-Identifier: Apache-2.0
// What WarpProduct does, on Hopper: a warpgroup multiplies 64 rows with all lines of a piece by
// wgmma, which reads both operands from shared memory as they lie there.
#pragma once

#include "common/cuda/sm90a/split.cuh"
#include "triangular_multiplicative_update/tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

template <Mode mode, int kRows, int kColumns>
struct GroupProduct {
  static_assert(kRows == 64 * (kThreads / 128));
  static constexpr int kRowTiles = 1;  // of a warp
  static constexpr int kColumnTiles = kColumns / 8;

  float total[1][kColumnTiles][4];

  static __device__ __forceinline__ int row(int thread) { return thread / 32 * 16; }
  static __device__ __forceinline__ int column(int) { return 0; }
  static __device__ __forceinline__ void publish() { sm90a::fence_async(); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total[0][j][e] = 0.0f;
    }
  }

  static __device__ __forceinline__ sm80::SharedAddress left(const unsigned char* lines,
                                                             int thread) {
    return sm80::shared_address(lines + thread / 128 * 64 * kLineBytes);
  }
  static __device__ __forceinline__ sm80::SharedAddress right(const unsigned char* lines, int) {
    return sm80::shared_address(lines);
  }

  __device__ __forceinline__ void multiply(sm80::SharedAddress a, int a_lo, sm80::SharedAddress b,
                                           int b_lo) {
    const auto left = sm90a::matrix_descriptor(a), right = sm90a::matrix_descriptor(b);
    // Descriptors count in units of 16 bytes; 16 numbers of the inner axis are two.
    constexpr int kNext = 2;
    if constexpr (mode == Mode::kSplit) {
      const auto left_lo = left + (a_lo >> 4), right_lo = right + (b_lo >> 4);
#pragma unroll
      for (int k = 0; k < 4 * kNext; k += 2 * kNext) {
        float sum[kColumnTiles][4];
        sm90a::wgmma_begin();
        // The small terms first.
        sm90a::wgmma_f16_zero(sum, left_lo + k, right + k);
        sm90a::wgmma_f16(sum, left + k, right_lo + k);
        sm90a::wgmma_f16(sum, left_lo + k + kNext, right + k + kNext);
        sm90a::wgmma_f16(sum, left + k + kNext, right_lo + k + kNext);
        sm90a::wgmma_f16(sum, left + k, right + k);
        sm90a::wgmma_f16(sum, left + k + kNext, right + k + kNext);
        sm90a::wgmma_wait(sum);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) total[0][j][e] += sum[j][e];
        }
      }
    } else {
      sm90a::wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4 * kNext; k += kNext) {
        if constexpr (mode == Mode::kBFloat16) {
          sm90a::wgmma_bf16(total[0], left + k, right + k);
        } else {
          sm90a::wgmma_f16(total[0], left + k, right + k);
        }
      }
      sm90a::wgmma_wait(total[0]);
    }
  }
};

}  // namespace fused_ops::triangular_multiplicative_update
