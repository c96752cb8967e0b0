// SPDX-License-Identifier: Apache-2.0
// Reading the model's tensors as they are stored, whatever their dtype; and small helpers.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/split.cuh"
#include "common/stored.h"

namespace fused_ops {

// The number whose 16 bits these are.
__device__ __forceinline__ float from_bits(std::uint32_t bits, DType type) {
  return type == DType::kBFloat16 ? sm80::unpack_bf16(bits).x : sm80::unpack_f16(bits).x;
}

__device__ __forceinline__ float load_number(const void* data, DType type, std::int64_t index) {
  if (type == DType::kFloat32) return static_cast<const float*>(data)[index];
  return from_bits(static_cast<const std::uint16_t*>(data)[index], type);
}

__device__ __forceinline__ float load_or(const Stored& stored, std::int64_t index,
                                         float otherwise) {
  return stored.data ? load_number(stored.data, stored.type, index) : otherwise;
}

// Rounded to `type`.
__device__ __forceinline__ void store_number(void* data, DType type, std::int64_t index,
                                             float number) {
  if (type == DType::kFloat32) {
    static_cast<float*>(data)[index] = number;
    return;
  }
  const std::uint32_t bits =
      type == DType::kBFloat16 ? sm80::pack_bf16(number, 0.0f) : sm80::pack_f16(number, 0.0f);
  static_cast<std::uint16_t*>(data)[index] = static_cast<std::uint16_t>(bits);
}

// An element of a mask, 1 where there is none.
__device__ __forceinline__ float load_mask(const void* data, MaskType type, std::int64_t at) {
  if (!data) return 1.0f;
  switch (type) {
    case MaskType::kUInt8:
      return static_cast<const std::uint8_t*>(data)[at];
    case MaskType::kInt8:
      return static_cast<const std::int8_t*>(data)[at];
    case MaskType::kInt16:
      return static_cast<const std::int16_t*>(data)[at];
    case MaskType::kInt32:
      return static_cast<float>(static_cast<const std::int32_t*>(data)[at]);
    case MaskType::kInt64:
      return static_cast<float>(static_cast<const std::int64_t*>(data)[at]);
    case MaskType::kFloat16:
      return load_number(data, DType::kFloat16, at);
    case MaskType::kBFloat16:
      return load_number(data, DType::kBFloat16, at);
    case MaskType::kFloat32:
      return static_cast<const float*>(data)[at];
    case MaskType::kFloat64:
      return static_cast<float>(static_cast<const double*>(data)[at]);
  }
  return 1.0f;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
  }
  return x;
}

__device__ __forceinline__ float two_to(int exponent) {
  return sm80::power_of_two(127 + exponent);
}

// The power of two that brings `bound` to [2^top, 2^(top + 1)); 1 for 0, NaN and infinity.
__device__ __forceinline__ int exponent_to(float bound, int top) {
  const int biased = static_cast<int>(__float_as_uint(bound) >> 23 & 0xff);
  if (!(bound > 0.0f) || biased == 255) return 0;
  // Both it and its inverse stay normal numbers, with room for other exponents to be added.
  const int exponent = top + 127 - biased;
  return exponent > 60 ? 60 : exponent < -60 ? -60 : exponent;
}

}  // namespace fused_ops
