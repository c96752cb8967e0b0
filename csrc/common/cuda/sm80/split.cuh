// SPDX-License-Identifier: Apache-2.0
// fp32-accurate products on the fp16 tensor cores.
//
// A number x, scaled by a power of two, is split into hi = fp16(x) and lo = fp16(x - hi), and
// lo*hi, hi*lo and hi*hi are accumulated, the small terms first. The accumulators of the tensor
// cores truncate, so after a short chain a sum is promoted: added to a separate fp32 register by
// an FFMA that also takes back the scale. What has to hold stands in docs/numerics.md.
//
// In shared memory a line (a row of A, a column of B) of kSplitInner numbers is 128 bytes, halves
// hi before halves lo in pieces of 16 bytes, whose order depends on the line so that eight lines
// read at one piece meet eight different groups of banks.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/instructions.cuh"

namespace fused_ops::sm80 {

// Elements of the inner axis that share one scale and lie in shared memory together.
constexpr int kSplitInner = 32;
constexpr int kSplitLineBytes = 128;

// Operands are scaled so that the largest is in [2^14, 2^15), the top of fp16's range.
constexpr int kSplitTop = 14;

__device__ __forceinline__ int split_offset(int line, int piece) {
  return line * kSplitLineBytes + ((piece ^ (line & 7)) << 4);
}

// 2^exponent for a biased exponent of a normal number, 1 to 254.
__device__ __forceinline__ float power_of_two(int biased) {
  return __uint_as_float(static_cast<std::uint32_t>(biased) << 23);
}

// The power of two that brings numbers up to `largest`, in [2^-100, 2^128), to the top of fp16's
// range. A largest number that is infinite or NaN gives a finite scale; itself shows in the result.
__device__ __forceinline__ float split_multiplier(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 0xff);
  return power_of_two(254 + kSplitTop - exponent);
}

// The way back from that.
__device__ __forceinline__ float split_undo(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 0xff);
  return power_of_two(exponent - kSplitTop);
}

// Splits two scaled numbers; the first is in the lower half of each word.
__device__ __forceinline__ void split_pair(float x, float y, std::uint32_t* hi, std::uint32_t* lo) {
  *hi = pack_f16(x, y);
  const float2 rounded = unpack_f16(*hi);
  *lo = pack_f16(x - rounded.x, y - rounded.y);
}

// One warp's part of a product of split operands: kRows x kColumns results.
// Lane l holds, of each 16x8 tile, the results (l/4, 2*(l%4)), the next column, and both 8 rows on.
template <int kRows, int kColumns>
struct SplitProduct {
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kColumnTiles = kColumns / 8;

  float total[kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) total[i][j][e] = 0.0f;
      }
    }
  }

  // total += undo * (a * b) for kSplitInner of the inner axis. `a` and `b` are tiles of lines in
  // shared memory, `undo` the scales of a's lines; the warp takes those from first_row and
  // first_column on.
  __device__ __forceinline__ void multiply(const unsigned char* a, const unsigned char* b,
                                           const float* undo, int first_row, int first_column,
                                           int lane) {
    const SharedAddress a_at = shared_address(a + split_offset(first_row + lane % 16, lane / 16));
    const SharedAddress b_at = shared_address(b + split_offset(first_column + lane % 8, lane / 8));
    undo += first_row + lane / 4;
    // Four column tiles of b are held at a time, and one row tile of a: with the sums they leave
    // registers for an order of the instructions in which four chains of multiplications, no one
    // waiting for another, are under way.
#pragma unroll
    for (int half = 0; half < kColumnTiles; half += kHeld) {
      FragmentB held[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) held[j].load(b_at, half + j);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        FragmentA now;
        now.load(a_at, i);
        float sum[kHeld][4];
        // The small terms first.
#pragma unroll
        for (int j = 0; j < kHeld; ++j) mma_f16_zero(sum[j], now.lo[0], held[j].hi[0]);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) mma_f16(sum[j], now.hi[0], held[j].lo[0]);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) mma_f16(sum[j], now.lo[1], held[j].hi[1]);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) mma_f16(sum[j], now.hi[1], held[j].lo[1]);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int j = 0; j < kHeld; ++j) mma_f16(sum[j], now.hi[s], held[j].hi[s]);
        }
        const float scale[2] = {undo[i * 16], undo[i * 16 + 8]};
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            total[i][half + j][e] = fmaf(sum[j][e], scale[e / 2], total[i][half + j][e]);
          }
        }
      }
      __syncwarp();  // else the compiler holds both halves at once, and spills
    }
  }

 private:
  static constexpr int kHeld = kColumnTiles < 4 ? kColumnTiles : 4;

  // Lines a multiple of 8 apart have the same order of pieces, and another piece is the same
  // address with other bits flipped.
  static constexpr int kNextSlice = 2 << 4;
  static constexpr int kLow = 4 << 4;

  // Sixteen rows of a.
  struct FragmentA {
    std::uint32_t hi[2][4];
    std::uint32_t lo[2][4];

    __device__ __forceinline__ void load(SharedAddress at, int tile) {
      const int offset = tile * 16 * kSplitLineBytes;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        ldmatrix_x4(lo[s], (at ^ (kLow | s * kNextSlice)) + offset);
        ldmatrix_x4(hi[s], (at ^ (s * kNextSlice)) + offset);
      }
    }
  };

  // Eight columns of b.
  struct FragmentB {
    std::uint32_t hi[2][2];
    std::uint32_t lo[2][2];

    __device__ __forceinline__ void load(SharedAddress at, int tile) {
      const int offset = tile * 8 * kSplitLineBytes;
      std::uint32_t four[4];
      ldmatrix_x4(four, at + offset);
      take(hi, four);
      ldmatrix_x4(four, (at ^ kLow) + offset);
      take(lo, four);
    }

    static __device__ __forceinline__ void take(std::uint32_t (&to)[2][2],
                                                const std::uint32_t (&four)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i / 2][i % 2] = four[i];
    }
  };
};

}  // namespace fused_ops::sm80
