// SPDX-License-Identifier: Apache-2.0
// Parameters side by side in one matrix, in the type of the products.
#pragma once

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"

namespace fused_ops {

constexpr int kCopyThreads = 128;

// Numbers to be converted, one after the other; zeros where there are none. Of each `chunk` of the
// results the first `filled` come from `from`, where they follow each other, and the rest are
// zeros.
struct WeightCopy {
  Stored from;
  void* to = nullptr;
  std::int64_t count = 0;  // of results
  std::int64_t chunk = 1;
  std::int64_t filled = 1;
  unsigned blocks = 0;
  bool vector = false;  // both begin at 16 bytes, and nothing is filled up

  // `lines` times `filled` numbers of `from`, filled up to `chunk` each.
  static WeightCopy of(const Stored& from, void* to, std::int64_t lines, std::int64_t chunk,
                       std::int64_t filled);
};

constexpr int kCopyNumbers = 8 * kCopyThreads;  // of a block

inline WeightCopy WeightCopy::of(const Stored& from, void* to, std::int64_t lines,
                                 std::int64_t chunk, std::int64_t filled) {
  const auto aligned = [](const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  };
  WeightCopy copy;
  if (!to) return copy;
  copy.from = from;
  copy.to = to;
  copy.count = lines * chunk;
  copy.chunk = chunk;
  copy.filled = filled;
  copy.blocks = static_cast<unsigned>(ceil_div(copy.count, kCopyNumbers));
  copy.vector = from.data && chunk == filled && aligned(from.data) && aligned(to);
  return copy;
}

__device__ __forceinline__ float load_filled(const WeightCopy& copy, std::int64_t at) {
  if (copy.chunk == copy.filled) return load_or(copy.from, at, 0.0f);
  const std::int64_t chunk = at / copy.chunk, in_chunk = at - chunk * copy.chunk;
  if (in_chunk >= copy.filled) return 0.0f;
  return load_or(copy.from, chunk * copy.filled + in_chunk, 0.0f);
}

__device__ __forceinline__ void copy_numbers(const WeightCopy& copy, DType type, unsigned block,
                                             int thread) {
  const std::int64_t first = std::int64_t{block} * kCopyNumbers;
  float numbers[8];
  if (copy.vector && first + 8 * (thread + 1) <= copy.count) {
    load_numbers(copy.from, first + 8 * thread, numbers);
    store_numbers(copy.to, type, first + 8 * thread, numbers);
    return;
  }
  // One by one; of a copy with vectors, what its last vector leaves.
  const std::int64_t from = first + (copy.vector ? 8 * thread : thread);
  const int step = copy.vector ? 1 : kCopyThreads;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::int64_t at = from + i * step;
    numbers[i] = at < copy.count ? load_filled(copy, at) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::int64_t at = from + i * step;
    if (at < copy.count) store_number(copy.to, type, at, numbers[i]);
  }
}

// Of all copies, the block's one: `block` counts over them.
template <int kCopies>
__device__ __forceinline__ void copy_numbers(const WeightCopy (&copies)[kCopies], DType type,
                                             unsigned block, int thread) {
  int i = 0;
  while (block >= copies[i].blocks) block -= copies[i++].blocks;
  copy_numbers(copies[i], type, block, thread);
}

}  // namespace fused_ops
