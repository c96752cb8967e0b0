// SPDX-License-Identifier: Apache-2.0
// Operands of the products of attend_fp32_sm80.cuh: lines of keys and values in shared memory, and
// numbers split for TF32.
#pragma once

#include "common/cuda/sm80/instructions.cuh"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

// For one TF32 product. The tensor cores cut 13 bits off. Before, a third of the last bit that
// stays is added: nearly as good as rounding to nearest, and numbers that fit stay as they are, as
// do infinities and NaN.
__device__ __forceinline__ std::uint32_t rounded_tf32(float x) {
  return __float_as_uint(x * (1.0f + 1.0f / 3072.0f));
}

// `width`: of a head in shared memory. A lane is lane 4g + t.
template <Mode mode, int width>
struct Fp32Operands {
  static constexpr bool kSplit = mode == Mode::kSplit;
  // Results of so many tiles of 8 are neighbours, and their values are read at once.
  static constexpr int kVector = width % 32 == 0 ? 4 : 2;
  static constexpr int kGroups = width / (8 * kVector);
  static constexpr bool kSwizzled = kVector == 4;
  // Of lines of keys and values in shared memory, in bytes.
  static constexpr int kPitch = kSwizzled ? width * 4 : width * 4 + 16;

  // Where a piece of a line is. Lanes read the same piece of every other line, or neighbours of two
  // lines, of 8: these lie in different banks, as long as there is no padding.
  static __device__ __forceinline__ int piece_at(int key, int piece) {
    if (kSwizzled) piece ^= (key & 6) ^ (key & 1) << 2;
    return key * kPitch + piece * 16;
  }

  // hi, the number to the nearest of TF32, and what is left. A NaN stays one, in one of both.
  static __device__ __forceinline__ void split(float x, std::uint32_t& high, std::uint32_t& low) {
    if (kSplit) {
      high = (__float_as_uint(x) + 0x1000u) & ~0x1fffu;
      low = __float_as_uint(x - __uint_as_float(high));
    } else {
      high = rounded_tf32(x);
      low = 0;
    }
  }

  // sum += a * b of a step, the small terms first.
  static __device__ __forceinline__ void multiply(float (&sum)[4], const std::uint32_t (&a)[4],
                                                  const std::uint32_t (&a_low)[4],
                                                  const std::uint32_t (&b)[2],
                                                  const std::uint32_t (&b_low)[2]) {
    if (kSplit) {
      sm80::mma_tf32(sum, a_low, b);
      sm80::mma_tf32(sum, a, b_low);
    }
    sm80::mma_tf32(sum, a, b);
  }

  // The lane's numbers of a pair of steps along the head, of eight keys.
  static __device__ __forceinline__ void load_key(const unsigned char* keys, int j, int s, int g,
                                                  int t, float (&numbers)[4]) {
    // Lines 8 apart have their pieces in the same order, which pieces 4s change by one bit.
    const int first = piece_at(g, t);
    const int at = kSwizzled ? (first ^ (s % 2 * 64)) + s / 2 * 128 : first + s * 64;
    const float4 four = *reinterpret_cast<const float4*>(keys + j * 8 * kPitch + at);
    numbers[0] = four.x;
    numbers[1] = four.y;
    numbers[2] = four.z;
    numbers[3] = four.w;
  }

  // Of 16 keys the lane's: [eight][of a pair of keys], neighbouring columns of group j.
  static __device__ __forceinline__ void load_values(const unsigned char* values, int j, int g,
                                                     int t, float (&numbers)[2][2][kVector]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int key = i * 8 + 2 * t + k;
        if constexpr (kSwizzled) {
          const float4 four = *reinterpret_cast<const float4*>(values + piece_at(key, g) + j * 128);
          numbers[i][k][0] = four.x;
          numbers[i][k][1] = four.y;
          numbers[i][k][2] = four.z;
          numbers[i][k][3] = four.w;
        } else {
          const float2 two =
              *reinterpret_cast<const float2*>(values + key * kPitch + j * 64 + g * 8);
          numbers[i][k][0] = two.x;
          numbers[i][k][1] = two.y;
        }
      }
    }
  }

  static __device__ __forceinline__ void replace_nan(float (&numbers)[4], const float (&by)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (numbers[e] != numbers[e]) numbers[e] = by[e];
    }
  }
};

}  // namespace fused_ops::msa_row_attention
