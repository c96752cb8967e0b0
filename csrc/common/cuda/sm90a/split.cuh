// SPDX-License-Identifier: Apache-2.0
// Products of split operands (sm80/split.cuh) by wgmma, which reads them from shared memory: the
// order of the pieces of a line is the one it knows.
#pragma once

#include "common/cuda/sm80/split.cuh"
#include "common/cuda/sm90a/instructions.cuh"

namespace fused_ops::sm90a {

// The registers of a block whose first warpgroups hand some to the others. A block has what it was
// launched with, a multiple of 8 for each thread, and asking for more would wait forever.
template <int givers, int takers, int registers_of_givers>
struct SharedRegisters {
  static constexpr int kThreads = givers + takers;
  static constexpr int kAll = 65536 / kThreads / 8 * 8 * kThreads;
  static constexpr int kGivers = registers_of_givers;
  static constexpr int kTakers = (kAll - kGivers * givers) / takers / 8 * 8;
  static_assert(kGivers * givers + kTakers * takers <= kAll);
  static_assert(kGivers >= 24 && kTakers <= 256);
};

// A warp's part of a warpgroup's product: 16 rows x kColumns results, distributed as those of
// sm80::SplitProduct.
template <int kColumns>
struct SplitProduct {
  static constexpr int kRowTiles = 1;
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr int kTilesAtOnce = 16;  // of a product, which leaves registers for the sums
  static_assert(kColumnTiles % kTilesAtOnce == 0);

  float total[1][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total[0][j][e] = 0.0f;
    }
  }
};

// A block's kRows x kColumns results, 64 rows a warpgroup.
template <int kRows, int kColumns>
struct SplitWarpgroups {
  using Product = SplitProduct<kColumns>;
  static constexpr int kThreads = kRows / 64 * 128;
  static constexpr int kWarpRows = 16;
  static constexpr int kWarpColumns = kColumns;
  static_assert(kRows % 64 == 0);

  int thread;

  __device__ __forceinline__ int row() const { return thread / 32 * 16; }
  __device__ __forceinline__ int column() const { return 0; }

  // Whoever wrote operands calls this before the barrier behind which they are multiplied.
  static __device__ __forceinline__ void publish() { fence_async(); }

  // total += undo * (a * b) for kSplitInner of the inner axis; `release` is called when the
  // operands have been read.
  template <bool scaled, class Release>
  __device__ __forceinline__ void multiply(Product& product, const unsigned char* a,
                                           const float* a_undo, const unsigned char* b,
                                           const float* b_undo, Release release) const {
    constexpr int kLine = sm80::kSplitLineBytes;
    const auto a_hi = matrix_descriptor(sm80::shared_address(a + thread / 128 * 64 * kLine));
    const auto b_hi = matrix_descriptor(sm80::shared_address(b));
    // In units of 16 bytes, as descriptors count: the other half of the inner axis, and lo.
    constexpr int kNext = 2;
    constexpr int kLo = 4;
    const float* a_undo_at = a_undo + row() + thread % 32 / 4;
    const float a_scale[2] = {a_undo_at[0], a_undo_at[8]};
    const float* b_undo_at = scaled ? b_undo + thread % 4 * 2 : b_undo;
    constexpr int kHeld = Product::kTilesAtOnce;
#pragma unroll
    for (int first = 0; first < Product::kColumnTiles; first += kHeld) {
      const auto b_now = b_hi + static_cast<unsigned>(first * 8 * kLine / 16);
      float sum[kHeld][4];
      wgmma_begin();
      // The small terms first.
      wgmma_f16_zero(sum, a_hi + kLo, b_now);
      wgmma_f16(sum, a_hi, b_now + kLo);
      wgmma_f16(sum, a_hi + kLo + kNext, b_now + kNext);
      wgmma_f16(sum, a_hi + kNext, b_now + kLo + kNext);
      wgmma_f16(sum, a_hi, b_now);
      wgmma_f16(sum, a_hi + kNext, b_now + kNext);
      wgmma_wait(sum);
      const bool last = first + kHeld == Product::kColumnTiles;
      if (last && !scaled) release();
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const float2 b_scale = scaled
                                   ? *reinterpret_cast<const float2*>(b_undo_at + (first + j) * 8)
                                   : make_float2(1.0f, 1.0f);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& total = product.total[0][first + j][e];
          const float one = scaled ? sum[j][e] * (e % 2 == 0 ? b_scale.x : b_scale.y) : sum[j][e];
          total = fmaf(one, a_scale[e / 2], total);
        }
      }
      if (last && scaled) release();  // the scales as well
    }
  }
};

}  // namespace fused_ops::sm90a
