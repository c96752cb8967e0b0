// SPDX-License-Identifier: Apache-2.0
// What both kernels for small problems are made of, beside common/: reading masks, and a block's
// product of fp32 numbers in shared memory.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/small.cuh"
#include "triangular_multiplicative_update/small.h"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kSmallThreads = 256;

__device__ inline float load_mask(const Mask& mask, std::int64_t index) {
  const auto half = [&] {
    return std::uint32_t{__ldg(static_cast<const unsigned short*>(mask.data) + index)};
  };
  switch (mask.type) {
    case MaskType::kUInt8:
      return __ldg(static_cast<const unsigned char*>(mask.data) + index);
    case MaskType::kInt8:
      return __ldg(static_cast<const signed char*>(mask.data) + index);
    case MaskType::kInt16:
      return static_cast<std::int16_t>(half());
    case MaskType::kInt32:
      return static_cast<float>(__ldg(static_cast<const int*>(mask.data) + index));
    case MaskType::kInt64:
      return static_cast<float>(__ldg(static_cast<const long long*>(mask.data) + index));
    case MaskType::kFloat16:
      return sm80::unpack_f16(half()).x;
    case MaskType::kBFloat16:
      return sm80::unpack_bf16(half()).x;
    case MaskType::kFloat32:
      return __ldg(static_cast<const float*>(mask.data) + index);
    case MaskType::kFloat64:
      return static_cast<float>(__ldg(static_cast<const double*>(mask.data) + index));
  }
  return 0.0f;
}

// Products ---------------------------------------------------------------------------------------
// In shared memory a line of up to `most` numbers has most + 4 places, an odd number of 16 bytes:
// eight neighbouring lines read at one column lie in different banks. Lines end in zeros.
template <int most>
constexpr int kPitch = most + 4;

// A block's reading of a matrix (rows, columns) into `lines` lines of shared memory.
template <int most, int lines, bool plain>
struct WeightTile {
  static constexpr int kLanes = most / 4;
  static constexpr int kRows = kSmallThreads / kLanes;  // at a time
  static constexpr int kSteps = lines / kRows;
  static_assert(lines % kRows == 0);

  uint4 raw[kSteps];

  __device__ __forceinline__ void load(const Source& weight, int first_row, int rows, int columns,
                                       int thread) {
    const int column = thread % kLanes * 4;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = first_row + thread / kLanes + i * kRows;
      raw[i] = load_four<plain>(weight, row * columns + column, row < rows ? columns - column : 0);
    }
  }

  __device__ __forceinline__ void store(float (*to)[kPitch<most>], DType type, int thread) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float* line = to[thread / kLanes + i * kRows];
      *reinterpret_cast<float4*>(line + thread % kLanes * 4) = converted<plain>(raw[i], type);
    }
  }
};

// sum[p][r] += x[p * kPairStep] . w[r * row_step] over `inner` numbers, in steps of 16. Lanes of a
// warp hold 4 neighbouring lines of x (lane / 8) and 8 of w (lane % 8).
constexpr int kPairStep = 4;

template <int most, int row_step, int pairs, int rows>
__device__ __forceinline__ void multiply(float (&sum)[pairs][rows], const float* x, const float* w,
                                         int inner) {
#pragma unroll 1
  for (int first = 0; first < inner; first += 16) {
#pragma unroll
    for (int k = 0; k < 16; k += 4) {
      float4 left[pairs];
      float4 right[rows];
#pragma unroll
      for (int p = 0; p < pairs; ++p) {
        left[p] = *reinterpret_cast<const float4*>(x + first + k + p * kPairStep * kPitch<most>);
      }
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        right[r] = *reinterpret_cast<const float4*>(w + first + k + r * row_step * kPitch<most>);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int p = 0; p < pairs; ++p) {
#pragma unroll
          for (int r = 0; r < rows; ++r) {
            sum[p][r] = fmaf(element(left[p], e), element(right[r], e), sum[p][r]);
          }
        }
      }
    }
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
