// SPDX-License-Identifier: Apache-2.0
// In which order the warps of the bias kernel take their steps.
#pragma once

#include <cstdint>

#include "common/cuda/device.h"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

// At a time: 16 bytes; four; a number.
enum class BiasAccess : std::uint8_t { kPieces, kWords, kNumbers };

struct BiasParams {
  BiasProblem problem;
  std::int64_t share = 0;   // tiles of a thread block
  std::int64_t longer = 0;  // as many blocks, the first ones, have one tile more
  int n = 0;
  int blocks = 0;      // of kBiasBlock queries
  int key_blocks = 0;  // of as many keys
  int chunks = 0;      // of kBiasChunk channels
  int passes = 0;      // over the channels: with a LayerNorm of several chunks two
  int octets = 0;      // of heads
  float per_channel = 0.0f;
  BiasAccess access = BiasAccess::kNumbers;
  bool resident = false;  // the tables of all heads and channels are in shared memory
};

// Where a warp is: chunks within passes (statistics, product) within the two queries within heads
// within tiles, which follow each other along the keys.
template <int kOctets>
struct BiasWalk {
  int group, i_block, j_block;
  int turn;  // 4 * octet + query * passes + pass: registers are scarce
  int chunk;

  __device__ __forceinline__ BiasWalk(const BiasParams& params, std::int64_t tile) {
    const std::int64_t of_group = std::int64_t{params.blocks} * params.key_blocks;
    group = static_cast<int>(tile / of_group);
    const auto rest = static_cast<std::uint64_t>(tile - group * of_group);
    const auto blocks = static_cast<unsigned>(params.key_blocks);
    i_block = static_cast<int>(rest / blocks);
    j_block = static_cast<int>(rest - static_cast<std::uint64_t>(i_block) * blocks);
    turn = chunk = 0;
  }

  static __device__ __forceinline__ int steps_of_tile(const BiasParams& params) {
    return (params.octets + kOctets - 1) / kOctets * 2 * params.passes * params.chunks;
  }

  __device__ __forceinline__ int octet() const { return turn >> 2; }  // the first of kOctets
  __device__ __forceinline__ bool second_query(const BiasParams& params) const {
    return (turn & 3) >= params.passes;
  }
  __device__ __forceinline__ bool is_product(const BiasParams& params) const {  // not statistics
    return params.passes == 1 || turn % 2 != 0;
  }

  __device__ __forceinline__ void next(const BiasParams& params) {
    if (++chunk < params.chunks) return;
    chunk = 0;
    ++turn;
    if ((turn & 3) != (2 * params.passes & 3)) return;
    turn += 4 * kOctets - 2 * params.passes;
    if (octet() < params.octets) return;
    turn = 0;
    if (++j_block < params.key_blocks) return;
    j_block = 0;
    if (++i_block < params.blocks) return;
    i_block = 0;
    ++group;
  }
};

}  // namespace fused_ops::msa_row_attention
