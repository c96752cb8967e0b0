// SPDX-License-Identifier: Apache-2.0
// Products of fp32 numbers for the scores' backward, as one TF32 product or, split into two numbers
// each, to fp32's accuracy; and their lines in shared memory.
//
// Which number is which along an inner axis is free, as long as both operands agree, and so is the
// order of columns. Lane 4g + t has, of eight lines that are an inner axis, lines t and t + 4; of
// sixteen numbers that are one, numbers 4t to 4t + 3; of four tiles of columns, columns 4g to 4g +
// 3 of operands and 8t to 8t + 7 of results.
#pragma once

#include "invariant_point_attention/scores_pieces.cuh"

namespace fused_ops::invariant_point_attention {

constexpr int kFp32Columns = 64;  // of each result in registers
constexpr int kFp32Tiles = kFp32Columns / 8;

// In bytes: 32 more than a multiple of 128.
constexpr int scores_fp32_pitch(int numbers) {
  return static_cast<int>(round_up(numbers, 32)) * 4 + 32;
}

// Where a piece of 16 bytes of a line is. Eight lanes read two pieces of lines t, or four pieces of
// lines i and i + 4: all in different banks.
__device__ __forceinline__ int fp32_piece_at(int line, int piece, int pitch) {
  return line * pitch + (piece ^ (line & 4)) * 16;
}

template <Mode mode>
struct Fp32Product {
  static constexpr bool kSplit = mode == Mode::kSplit;

  // What the tensor cores take of a number: they cut off 13 bits.
  template <int count>
  struct Numbers {
    std::uint32_t high[count], low[kSplit ? count : 1];

    __device__ __forceinline__ void set(int i, float x) {
      high[i] = __float_as_uint(x) + 0x1000u;
      if constexpr (kSplit) {
        high[i] &= ~0x1fffu;
        low[i] = __float_as_uint(x - __uint_as_float(high[i]));
      }
    }
  };
  using Left = Numbers<4>;
  using Right = Numbers<2>;

  // The small terms first.
  static __device__ __forceinline__ void multiply(float (&sum)[4], const Left& left,
                                                  const Right& right) {
    if constexpr (kSplit) {
      sm80::mma_tf32(sum, left.low, right.high);
      sm80::mma_tf32(sum, left.high, right.low);
    }
    sm80::mma_tf32(sum, left.high, right.high);
  }

  // sums += left * lines, of 8 * kSteps lines from line `first` on, and `groups` groups of 32
  // columns from piece `piece` on. Tensor cores cut off what they add up; so that this does not
  // grow with the number of lines, a split product's sums leave them each time.
  template <int kSteps>
  static __device__ __forceinline__ void add(float (&sums)[kFp32Tiles][4],
                                             const Left (&left)[kSteps], const unsigned char* lines,
                                             int first, int pitch, int piece, int groups,
                                             int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kFp32Tiles / 4; ++j) {
      if (j >= groups) break;
      float sum[4][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float4 two[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          two[i] = *reinterpret_cast<const float4*>(
              lines + fp32_piece_at(first + s * 8 + i * 4 + t, piece + j * 8 + g, pitch));
        }
        const float numbers[4][2] = {
            {two[0].x, two[1].x}, {two[0].y, two[1].y}, {two[0].z, two[1].z}, {two[0].w, two[1].w}};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          Right right;
          right.set(0, numbers[c][0]);
          right.set(1, numbers[c][1]);
          multiply(kSplit ? sum[c] : sums[j * 4 + c], left[s], right);
        }
      }
      if constexpr (kSplit) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[j * 4 + c][e] += sum[c][e];
        }
      }
    }
  }
};

// The lane's results of a line, those of half `h` of the operand's rows. `count` columns exist;
// from `filled` on they are zeros.
__device__ __forceinline__ void store_fp32_sums(float* line, const float (&sums)[kFp32Tiles][4],
                                                int h, int count, int filled, bool accumulate,
                                                int lane) {
#pragma unroll
  for (int j = 0; j < kFp32Tiles / 4; ++j) {
#pragma unroll
    for (int c = 0; c < 8; c += 4) {
      const int column = j * 32 + lane % 4 * 8 + c;
      if (column >= count) continue;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float x = sums[j * 4 + i][2 * h + c / 4], y = sums[j * 4 + i + 1][2 * h + c / 4];
        store_sums(line + column + i, column + i < filled ? x : 0.0f,
                   column + i + 1 < filled ? y : 0.0f, accumulate);
      }
    }
  }
}

}  // namespace fused_ops::invariant_point_attention
