// SPDX-License-Identifier: Apache-2.0
// Masks as bits.
#pragma once

#include <cstdint>

#include "common/cuda/device.h"
#include "common/stored.h"

namespace fused_ops {

constexpr int kMaskBitsThreads = 128;
constexpr int kMaskBitsWarps = kMaskBitsThreads / 32;

// Element (outer, row, key) is at outer * outer_stride + row * row_stride + key * stride.
struct MaskBits {
  const void* data = nullptr;
  std::int64_t rows = 0;      // of an outer one
  std::int64_t all_rows = 0;  // of all
  std::int64_t n = 0;         // keys
  std::int64_t outer_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t stride = 0;
  int bytes = 0;                     // of an element
  int shift = 0;                     // 1 for floating numbers
  std::uint64_t* present = nullptr;  // (all_rows, words()); the lowest bit is the first key

  void set_type(MaskType type) {
    bytes = bytes_of(type);
    shift = type == MaskType::kFloat16 || type == MaskType::kBFloat16 ||
            type == MaskType::kFloat32 || type == MaskType::kFloat64;
  }
  __host__ __device__ constexpr std::int64_t words() const { return (n + 63) / 64; }
  unsigned blocks() const {
    return static_cast<unsigned>(ceil_div(all_rows * words(), kMaskBitsWarps));
  }
};

// An element is read as bits: any of them makes a key be there, but not the sign of a floating
// number, which is shifted out.
template <class Bits>
__device__ __forceinline__ bool is_there(Bits bits, int shift) {
  return static_cast<Bits>(bits << shift) != 0;
}

__device__ __forceinline__ bool is_there(const void* data, int bytes, int shift, std::int64_t at) {
  switch (bytes) {
    case 1:
      return static_cast<const std::uint8_t*>(data)[at] != 0;
    case 2:
      return is_there(static_cast<const std::uint16_t*>(data)[at], shift);
    case 4:
      return is_there(static_cast<const std::uint32_t*>(data)[at], shift);
    default:
      return is_there(static_cast<const std::uint64_t*>(data)[at], shift);
  }
}

// A warp takes a word.
template <class Bits>
__device__ __forceinline__ void pack_mask(const MaskBits& mask, int shift, unsigned block,
                                          int thread) {
  const std::int64_t words = mask.words();
  const std::int64_t word = std::int64_t{block} * kMaskBitsWarps + thread / 32;
  if (word >= mask.all_rows * words) return;
  const std::int64_t row = word / words;
  const std::int64_t outer = row / mask.rows;
  const auto* from = static_cast<const Bits*>(mask.data) + outer * mask.outer_stride +
                     (row - outer * mask.rows) * mask.row_stride;
  Bits bits[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t key = (word - row * words) * 64 + half * 32 + thread % 32;
    bits[half] = key < mask.n ? from[key * mask.stride] : Bits{0};
  }
  std::uint32_t present[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    present[half] = __ballot_sync(0xffffffffu, is_there(bits[half], shift));
  }
  if (thread % 32 == 0) {
    mask.present[word] = std::uint64_t{present[1]} << 32 | present[0];
  }
}

__device__ __forceinline__ void pack_mask(const MaskBits& mask, unsigned block, int thread) {
  switch (mask.bytes) {
    case 1:
      return pack_mask<std::uint8_t>(mask, 0, block, thread);
    case 2:
      return pack_mask<std::uint16_t>(mask, mask.shift, block, thread);
    case 4:
      return pack_mask<std::uint32_t>(mask, mask.shift, block, thread);
    default:
      return pack_mask<std::uint64_t>(mask, mask.shift, block, thread);
  }
}

}  // namespace fused_ops
