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

// The power of two that brings numbers up to `largest`, in [2^-112, 2^128), to the top of fp16's
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

// Sixteen rows of the left operand, kSplitInner of the inner axis, as the MMA takes them.
struct SplitFragmentA {
  std::uint32_t hi[2][4];
  std::uint32_t lo[2][4];
};

// Eight columns of the right one.
struct SplitFragmentB {
  std::uint32_t hi[2][2];
  std::uint32_t lo[2][2];
};

__device__ __forceinline__ void take_slices(std::uint32_t (&to)[2][2],
                                            const std::uint32_t (&four)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i / 2][i % 2] = four[i];
}

// A warp's view of an operand whose lines run along the inner axis. Lines a multiple of 8 apart
// have the same order of pieces, and another piece is the same address with other bits flipped.
class SplitLinesA {
 public:
  __device__ __forceinline__ SplitLinesA(const unsigned char* lines, const float* undo,
                                         int first_row, int lane)
      : at_(shared_address(lines + split_offset(first_row + lane % 16, lane / 16))),
        undo_(undo + first_row + lane / 4) {}

  __device__ __forceinline__ void load(int tile, SplitFragmentA* fragment) const {
    const int offset = tile * 16 * kSplitLineBytes;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      ldmatrix_x4(fragment->lo[s], (at_ ^ (4 << 4 | s << 5)) + offset);
      ldmatrix_x4(fragment->hi[s], (at_ ^ (s << 5)) + offset);
    }
  }

  __device__ __forceinline__ float undo(int tile, int half) const {
    return undo_[tile * 16 + half * 8];
  }

 private:
  SharedAddress at_;
  const float* undo_;
};

// Of the right operand; `scaled`: its lines have scales that change along the inner axis.
template <bool scaled>
class SplitLinesB {
 public:
  static constexpr bool kScaled = scaled;

  __device__ __forceinline__ SplitLinesB(const unsigned char* lines, const float* undo,
                                         int first_column, int lane)
      : at_(shared_address(lines + split_offset(first_column + lane % 8, lane / 8))),
        undo_(scaled ? undo + first_column + lane % 4 * 2 : undo) {}

  __device__ __forceinline__ void load(int tile, SplitFragmentB* fragment) const {
    const int offset = tile * 8 * kSplitLineBytes;
    std::uint32_t four[4];
    ldmatrix_x4(four, at_ + offset);
    take_slices(fragment->hi, four);
    ldmatrix_x4(four, (at_ ^ 4 << 4) + offset);
    take_slices(fragment->lo, four);
  }

  __device__ __forceinline__ float2 undo(int tile) const {
    return scaled ? *reinterpret_cast<const float2*>(undo_ + tile * 8) : make_float2(1.0f, 1.0f);
  }

 private:
  SharedAddress at_;
  const float* undo_;
};

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

  // total += undo * (a * b) for kSplitInner of the inner axis.
  template <class A, class B>
  __device__ __forceinline__ void multiply(const A& a, const B& b) {
    // Four column tiles of b are held at a time, and one row tile of a: with the sums they leave
    // registers for an order of the instructions in which four chains of multiplications, no one
    // waiting for another, are under way.
    constexpr int kHeld = kColumnTiles < 4 ? kColumnTiles : 4;
#pragma unroll
    for (int half = 0; half < kColumnTiles; half += kHeld) {
      SplitFragmentB held[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) b.load(half + j, &held[j]);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        SplitFragmentA now;
        a.load(i, &now);
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
        const float a_undo[2] = {a.undo(i, 0), a.undo(i, 1)};
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
          // Read again for each row tile: shared memory has time, and registers are scarce.
          const float2 b_undo = b.undo(half + j);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float scaled =
                B::kScaled ? sum[j][e] * (e % 2 == 0 ? b_undo.x : b_undo.y) : sum[j][e];
            total[i][half + j][e] = fmaf(scaled, a_undo[e / 2], total[i][half + j][e]);
          }
        }
      }
      __syncwarp();  // else the compiler holds both halves at once, and spills
    }
  }
};

// A block's kRows x kColumns results, shared out among its warps.
template <int kRows, int kColumns, int kRowsOfWarp, int kColumnsOfWarp>
struct SplitWarps {
  using Product = SplitProduct<kRowsOfWarp, kColumnsOfWarp>;
  static constexpr int kWarpRows = kRowsOfWarp;
  static constexpr int kWarpColumns = kColumnsOfWarp;
  static constexpr int kWarpsAcross = kColumns / kWarpColumns;
  static constexpr int kThreads = 32 * (kRows / kWarpRows) * kWarpsAcross;

  int thread;

  __device__ __forceinline__ int row() const { return thread / 32 / kWarpsAcross * kWarpRows; }
  __device__ __forceinline__ int column() const {
    return thread / 32 % kWarpsAcross * kWarpColumns;
  }

  // Whoever wrote operands calls this before the barrier behind which they are multiplied.
  static __device__ __forceinline__ void publish() {}

  // total += undo * (a * b) for kSplitInner of the inner axis, both operands in lines; `release` is
  // called when they have been read.
  template <bool scaled, class Release>
  __device__ __forceinline__ void multiply(Product& product, const unsigned char* a,
                                           const float* a_undo, const unsigned char* b,
                                           const float* b_undo, Release release) const {
    product.multiply(SplitLinesA(a, a_undo, row(), thread % 32),
                     SplitLinesB<scaled>(b, b_undo, column(), thread % 32));
    release();
  }
};

}  // namespace fused_ops::sm80
