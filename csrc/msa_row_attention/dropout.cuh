// SPDX-License-Identifier: Apache-2.0
// Which attention weights are kept: the hash of docs/ops/msa_row_attention.md, as the composition
// takes it. Two neighbouring keys share 32 bits of it, and a lane has just these two of a result.
#pragma once

#include "common/cuda/sm80/instructions.cuh"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

constexpr std::uint32_t kDropoutStep = 0x9E3779B9u;  // of the hash, from a pair of keys to the next

// The numbers of keys j, in the lower half, and j + 1. `offset`: j / 2 times kDropoutStep. Threads
// have it, so that what is constant in it costs nothing.
__device__ __forceinline__ std::uint32_t dropout_numbers(uint2 key, std::uint32_t offset) {
  std::uint32_t x = key.x + offset;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x = x ^ x >> 15 ^ key.y;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

// Whether the first of two weights is kept, or the second.
__device__ __forceinline__ bool keeps_first(std::uint32_t numbers, std::uint32_t threshold) {
  return numbers << 16 >= threshold;
}
__device__ __forceinline__ bool keeps_second(std::uint32_t numbers, std::uint32_t threshold) {
  return numbers >= threshold;
}

// Where results are transposed, keys along M: `numbers` are of key pairs as above and of one of two
// neighbouring queries, the first in lanes of an even key, the second in those of an odd one; what
// comes back are the numbers of the lane's own key and the first query, in the lower half, and the
// second.
__device__ __forceinline__ std::uint32_t exchange_numbers(std::uint32_t numbers, unsigned lane) {
  const std::uint32_t others = __shfl_xor_sync(0xffffffff, numbers, 4);
  return __byte_perm(numbers, others, lane & 4 ? 0x3276u : 0x5410u);
}

// Of two 16-bit weights those that are kept.
__device__ __forceinline__ std::uint32_t kept_of(std::uint32_t weights, std::uint32_t numbers,
                                                 std::uint32_t threshold) {
  if (!keeps_first(numbers, threshold)) weights &= 0xffff0000u;
  if (!keeps_second(numbers, threshold)) weights &= 0x0000ffffu;
  return weights;
}

}  // namespace fused_ops::msa_row_attention
