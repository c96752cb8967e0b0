// SPDX-License-Identifier: Apache-2.0
// Between the order in which tensor cores leave results and rows of memory.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/instructions.cuh"

namespace fused_ops {

// Four lanes hold two numbers each of four column tiles of 8; afterwards lane t holds the eight of
// tile t. Numbers are words: two of 16 bits, or one of 32 bits taken separately.
__device__ __forceinline__ void turn_quad(std::uint32_t (&word)[4], int lane) {
  const int t = lane % 4;
  // Exchange with the lane at distance 1, then 2: a transposition in two steps.
  const auto exchange = [&](std::uint32_t& mine_low, std::uint32_t& mine_high, int distance) {
    const bool upper = t & distance;
    const std::uint32_t sent = upper ? mine_low : mine_high;
    const std::uint32_t got = __shfl_xor_sync(0xffffffff, sent, distance);
    (upper ? mine_low : mine_high) = got;
  };
  exchange(word[0], word[1], 1);
  exchange(word[2], word[3], 1);
  exchange(word[0], word[2], 2);
  exchange(word[1], word[3], 2);
}

}  // namespace fused_ops
