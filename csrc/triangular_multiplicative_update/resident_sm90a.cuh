// SPDX-License-Identifier: Apache-2.0
// What the kernels share that stay on a multiprocessor of Hopper, with all their weights in shared
// memory, and take tile after tile of pairs: 16-bit operands, up to 128 channels. One warpgroup
// brings the rows of the next tiles while four multiply and finish those of the present one.
#pragma once

#include <utility>

#include "common/cuda/sm80/ring.cuh"
#include "common/cuda/sm90a/split.cuh"
#include "triangular_multiplicative_update/tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kResidentChannels = 128;  // at most
constexpr int kProducers = 128;         // threads
constexpr int kConsumers = 512;
constexpr int kResidentThreads = kProducers + kConsumers;

// A number of pairs as the planes have them, taken apart.
struct PairSteps {
  int batches, lines, columns;

  __device__ __forceinline__ PairSteps(const Sizes& sizes, std::int64_t pairs) {
    const std::int64_t all = pairs / sizes.pitch;
    columns = static_cast<int>(pairs % sizes.pitch);
    lines = static_cast<int>(all % sizes.n);
    batches = static_cast<int>(all / sizes.n);
  }
};

// A pair as the planes have it: additions where divisions would be.
class PairWalk {
 public:
  __device__ __forceinline__ PairWalk(const Sizes& sizes, std::int64_t pair)
      : sizes_(sizes), at_(sizes, pair) {}

  __device__ __forceinline__ bool exists() const {
    return at_.columns < static_cast<int>(sizes_.n) && at_.batches < static_cast<int>(sizes_.batch);
  }

  // Of this pair and the next seven, those that exist; it is a line's first, ninth, ...
  __device__ __forceinline__ int existing() const {
    return exists() ? min(static_cast<int>(sizes_.n) - at_.columns, 8) : 0;
  }

  // Of the pair's first element in a tensor whose strides for lines and columns are i_stride and
  // j_stride.
  template <class Strides>  // Pairs, Mask
  __device__ __forceinline__ std::int64_t offset(const Strides& strides) const {
    return at_.batches * strides.batch_stride + at_.lines * strides.i_stride +
           at_.columns * strides.j_stride;
  }

  __device__ __forceinline__ void advance(const PairSteps& by) {
    at_.columns += by.columns;
    at_.lines += by.lines;
    at_.batches += by.batches;
    if (at_.columns >= static_cast<int>(sizes_.pitch)) {
      at_.columns -= static_cast<int>(sizes_.pitch);
      ++at_.lines;
    }
    if (at_.lines >= static_cast<int>(sizes_.n)) {
      at_.lines -= static_cast<int>(sizes_.n);
      ++at_.batches;
    }
  }

 private:
  const Sizes& sizes_;
  PairSteps at_;
};

// With lines and columns of the planes in the place of i and j; `turned`: those are (k, line) of
// the tensor.
template <class Strides>
Strides in_planes(Strides strides, bool turned) {
  if (turned) std::swap(strides.i_stride, strides.j_stride);
  return strides;
}

// d = a * b over one block or two of 64 of the inner axis; the distances of blocks are in bytes.
// Returns when the product is there.
template <Mode mode, bool a_across, int kTiles>
__device__ __forceinline__ void multiply_blocks(float (&d)[kTiles][4], sm90a::MatrixDescriptor a,
                                                int a_block, sm90a::MatrixDescriptor b, int b_block,
                                                int blocks) {
  constexpr int kNextA = a_across ? kLineBytes : 2, kNextB = 2;  // in units of 16 bytes
  const auto add = [&](sm90a::MatrixDescriptor a, sm90a::MatrixDescriptor b, bool zero) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto left = a + k * kNextA, right = b + k * kNextB;
      if constexpr (mode == Mode::kBFloat16) {
        if (zero && k == 0) {
          sm90a::wgmma_bf16_zero<a_across>(d, left, right);
        } else {
          sm90a::wgmma_bf16<a_across>(d, left, right);
        }
      } else {
        if (zero && k == 0) {
          sm90a::wgmma_f16_zero<a_across>(d, left, right);
        } else {
          sm90a::wgmma_f16<a_across>(d, left, right);
        }
      }
    }
  };
  // No branch within a product: the compiler would have to be told again whose registers are whose.
  if (blocks == 1) {
    sm90a::wgmma_begin();
    add(a, b, true);
    sm90a::wgmma_wait(d);
  } else {
    sm90a::wgmma_begin();
    add(a, b, true);
    add(a + (a_block >> 4), b + (b_block >> 4), false);
    sm90a::wgmma_wait(d);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
