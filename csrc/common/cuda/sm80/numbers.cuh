// SPDX-License-Identifier: Apache-2.0
// Numbers of the dtypes that kernels read and write, as words of 32 bits.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/instructions.cuh"
#include "common/stored.h"

namespace fused_ops {

__host__ __device__ constexpr int words_of(DType type, int numbers) {
  return numbers * bytes_of(type) / 4;
}

// Of kBFloat16 or kFloat16, the first in the lower half.
template <DType type>
__device__ __forceinline__ float2 unpack_two(std::uint32_t word) {
  static_assert(type == DType::kBFloat16 || type == DType::kFloat16);
  return type == DType::kBFloat16 ? sm80::unpack_bf16(word) : sm80::unpack_f16(word);
}

template <DType type, int kNumbers>
__device__ __forceinline__ void unpack(const std::uint32_t (&words)[words_of(type, kNumbers)],
                                       float (&numbers)[kNumbers]) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    if constexpr (type == DType::kFloat32) {
      numbers[i] = __uint_as_float(words[i]);
    } else if (i % 2 == 0) {
      const float2 two = unpack_two<type>(words[i / 2]);
      numbers[i] = two.x;
      numbers[i + 1] = two.y;
    }
  }
}

// The bits of one number.
template <DType type>
__device__ __forceinline__ std::uint32_t load_bits(const void* data, std::int64_t index) {
  if constexpr (type == DType::kFloat32) {
    return static_cast<const std::uint32_t*>(data)[index];
  } else {
    return static_cast<const std::uint16_t*>(data)[index];
  }
}

// Consecutive words, in accesses of 16 bytes, or of 8 where there are two.
template <int kWords>
__device__ __forceinline__ void load_words(const void* data, std::uint32_t (&words)[kWords]) {
  static_assert(kWords == 2 || kWords % 4 == 0);
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = static_cast<const uint4*>(data)[i / 4];
      words[i] = four.x;
      words[i + 1] = four.y;
      words[i + 2] = four.z;
      words[i + 3] = four.w;
    }
  } else {
    const uint2 two = *static_cast<const uint2*>(data);
    words[0] = two.x;
    words[1] = two.y;
  }
}

template <int kWords>
__device__ __forceinline__ void store_words(void* data, const std::uint32_t (&words)[kWords]) {
  static_assert(kWords % 2 == 0);
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      static_cast<uint4*>(data)[i / 4] =
          make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  } else {
    *static_cast<uint2*>(data) = make_uint2(words[0], words[1]);
  }
}

template <DType type>
__device__ __forceinline__ std::uint32_t pack_two(float first, float second) {
  static_assert(type == DType::kBFloat16 || type == DType::kFloat16);
  return type == DType::kBFloat16 ? sm80::pack_bf16(first, second) : sm80::pack_f16(first, second);
}

// Consecutive numbers, in accesses of 16 bytes, or of 8 where they are no more.
template <DType type, int kNumbers>
__device__ __forceinline__ void load_numbers_as(const void* data, std::int64_t index,
                                                float (&numbers)[kNumbers]) {
  std::uint32_t words[words_of(type, kNumbers)];
  load_words(static_cast<const unsigned char*>(data) + index * bytes_of(type), words);
  unpack<type>(words, numbers);
}

template <int kNumbers>
__device__ __forceinline__ void load_numbers(const Stored& stored, std::int64_t index,
                                             float (&numbers)[kNumbers]) {
  if (stored.type == DType::kFloat32) {
    load_numbers_as<DType::kFloat32>(stored.data, index, numbers);
  } else if (stored.type == DType::kBFloat16) {
    load_numbers_as<DType::kBFloat16>(stored.data, index, numbers);
  } else {
    load_numbers_as<DType::kFloat16>(stored.data, index, numbers);
  }
}

template <DType type, int kNumbers>
__device__ __forceinline__ void store_numbers_as(void* data, std::int64_t index,
                                                 const float (&numbers)[kNumbers]) {
  std::uint32_t words[words_of(type, kNumbers)];
#pragma unroll
  for (int i = 0; i < kNumbers; i += 2) {
    if constexpr (type == DType::kFloat32) {
      words[i] = __float_as_uint(numbers[i]);
      words[i + 1] = __float_as_uint(numbers[i + 1]);
    } else {
      words[i / 2] = pack_two<type>(numbers[i], numbers[i + 1]);
    }
  }
  store_words(static_cast<unsigned char*>(data) + index * bytes_of(type), words);
}

template <int kNumbers>
__device__ __forceinline__ void store_numbers(void* data, DType type, std::int64_t index,
                                              const float (&numbers)[kNumbers]) {
  if (type == DType::kFloat32) {
    store_numbers_as<DType::kFloat32>(data, index, numbers);
  } else if (type == DType::kBFloat16) {
    store_numbers_as<DType::kBFloat16>(data, index, numbers);
  } else {
    store_numbers_as<DType::kFloat16>(data, index, numbers);
  }
}

}  // namespace fused_ops
