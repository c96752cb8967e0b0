// SPDX-License-Identifier: Apache-2.0
// The bias of all heads from the pair tensor, which is read once. Bound by memory bandwidth.
//
// Warps work on their own. A warp takes, of a tile of 16 queries by 16 keys, queries w and w + 8
// one after the other: 16 pairs (keys) are the rows of a product, eight heads its columns. In
// blocks of 32 channels lane 4 * g + t takes channels 8t to 8t + 7 of pairs g and g + 8, in the
// order of its operands of two mma.m16n8k16: the order of the inner axis is free. So it reads again
// just those bytes of shared memory that it asked for itself, a step or more ahead, and nobody
// waits for anybody. After both queries a lane holds eight numbers that lie side by side in a block
// of the bias.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/stored.cuh"
#include "msa_row_attention/bias_pieces.cuh"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

// How pieces of 16 bytes may be read.
enum class BiasAccess : std::uint8_t { kPieces, kWords, kElements };

struct BiasParams {
  BiasProblem problem;
  std::int64_t tiles = 0;  // of all groups
  int blocks = 0;          // of kBiasBlock positions
  int chunks = 0;          // of kBiasChunk channels
  int octets = 0;          // of heads
  BiasAccess access = BiasAccess::kElements;
  bool resident = false;  // the tables of all heads and channels are in shared memory
};

constexpr int kBiasThreads = 256;
constexpr int kBiasRing = 64 * 1024;  // bytes of pairs on their way to a block

// Shared memory holds the ring, then the weights, then weight and bias of the LayerNorm.
template <Mode mode, DType pair_type>
struct BiasKernel {
  static constexpr bool kSixteen = type_of(mode) != DType::kFloat32;
  static constexpr int kOctetsHeld = kSixteen ? 2 : 1;  // whose sums a warp has in registers
  static constexpr int kPieceWords = pair_type == DType::kFloat32 ? 8 : 4;  // of eight channels
  static constexpr int kStageLines = 2 * kPieceWords;                       // of 16 bytes a lane
  static constexpr int kStages = kBiasRing / kBiasThreads / 16 / kStageLines;
  static constexpr int kHeldWords = kSixteen ? 2 : 4;
  using Table = BiasTable<mode>;

  static constexpr int shared_bytes(int octets, int chunks) {
    return kBiasRing + octets * chunks * Table::kWeightBytes + chunks * Table::kNormBytes;
  }

  // The walk through the steps of a warp: chunks within passes (of a norm over several chunks there
  // are two: statistics, product), within the two queries, within heads, within tiles.
  struct Walk {
    std::int64_t group;
    int i_block, j_block;
    int octet, query, pass, chunk;
    int tiles;  // left, this one included

    __device__ __forceinline__ void next(const BiasParams& params, int passes) {
      if (++chunk < params.chunks) return;
      chunk = 0;
      if (++pass < passes) return;
      pass = 0;
      query ^= 1;
      if (query != 0) return;
      octet += kOctetsHeld;
      if (octet < params.octets) return;
      octet = 0;
      --tiles;
      if (++j_block < params.blocks) return;
      j_block = 0;
      if (++i_block < params.blocks) return;
      i_block = 0;
      ++group;
    }
  };

  const BiasParams& params;
  int thread;

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int passes() const {
    return params.problem.norm_weight.data && params.chunks > 1 ? 2 : 1;
  }
  __device__ __forceinline__ unsigned char* shared() const {
    return shared_memory<unsigned char[kBiasRing]>();
  }
  __device__ __forceinline__ Table table() const {
    const int octets = params.resident ? params.octets : kOctetsHeld;
    const int chunks = params.resident ? params.chunks : 1;
    unsigned char* weights = shared() + kBiasRing;
    return {weights, reinterpret_cast<float*>(weights + octets * chunks * Table::kWeightBytes),
            chunks};
  }
  // A line of this lane's; those of a warp lie side by side.
  __device__ __forceinline__ uint4* line(int stage, int index) const {
    return reinterpret_cast<uint4*>(shared()) + (thread / 32 * kStages + stage) * kStageLines * 32 +
           index * 32 + lane();
  }

  __device__ __forceinline__ Walk start() const {
    const std::int64_t first = blockIdx.x * params.tiles / gridDim.x;
    const std::int64_t end = (blockIdx.x + std::int64_t{1}) * params.tiles / gridDim.x;
    const std::int64_t of_group = std::int64_t{params.blocks} * params.blocks;
    Walk walk{};
    walk.group = first / of_group;
    walk.i_block = static_cast<int>(first % of_group / params.blocks);
    walk.j_block = static_cast<int>(first % params.blocks);
    walk.tiles = static_cast<int>(end - first);
    return walk;
  }

  // Asks for what the lane needs in a step; what is not there becomes zero.
  __device__ __forceinline__ void ask(const Walk& at, int stage) const {
    const Pairs& pair = params.problem.pair;
    const Sizes& sizes = params.problem.sizes;
    constexpr int kSize = pair_type == DType::kFloat32 ? 4 : 2;
    const std::int64_t i = std::int64_t{at.i_block} * kBiasBlock + thread / 32 + at.query * 8;
    const int channel = at.chunk * kBiasChunk + lane() % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t j = std::int64_t{at.j_block} * kBiasBlock + lane() / 4 + half * 8;
      const int left = i < sizes.n && j < sizes.n ? (sizes.pair_channels - channel) * kSize : 0;
      // Strides of axes of length 1 may be anything, also what spoils the alignment.
      const std::int64_t element =
          at.group * pair.group_stride + i * pair.i_stride + j * pair.j_stride + channel;
      const unsigned char* from =
          static_cast<const unsigned char*>(pair.data) + (left > 0 ? element : 0) * kSize;
      if (params.access == BiasAccess::kPieces) {
#pragma unroll
        for (int index = 0; index < kPieceWords; ++index) {
          constexpr int kLines = kPieceWords / 4;  // of a piece
          const int byte = index / kLines * 32 * kSize + index % kLines * 16;
          sm80::cp_async_16(line(stage, half * kPieceWords + index), from + byte,
                            byte < left ? 16 : 0);
        }
      } else {
        ask_slowly(from, left, stage, half);
      }
    }
  }

  // A pair whose address is not a multiple of 16.
  __device__ __forceinline__ void ask_slowly(const unsigned char* from, int left, int stage,
                                             int half) const {
#pragma unroll 1
    for (int block = 0; block < 4; ++block) {
#pragma unroll
      for (int word = 0; word < kPieceWords; ++word) {
        const int byte = block * kPieceWords * 16 + word * 4;
        const int there = left - byte < 0 ? 0 : left - byte > 4 ? 4 : left - byte;
        auto* to = reinterpret_cast<std::uint32_t*>(
                       line(stage, half * kPieceWords + block * (kPieceWords / 4) + word / 4)) +
                   word % 4;
        if (params.access == BiasAccess::kWords) {
          sm80::cp_async_4(to, there > 0 ? from + byte : from, there);
        } else if constexpr (pair_type != DType::kFloat32) {  // of which words are elements
          const auto* two = reinterpret_cast<const std::uint16_t*>(from + byte);
          const std::uint32_t low = there > 0 ? two[0] : 0;
          const std::uint32_t high = there > 2 ? two[1] : 0;
          *to = low | high << 16;
        }
      }
    }
  }

  __device__ __forceinline__ void read(int stage, BiasPairs& x) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        std::uint32_t words[kPieceWords];
#pragma unroll
        for (int i = 0; i < kPieceWords / 4; ++i) {
          const uint4 four = *line(stage, half * kPieceWords + block * (kPieceWords / 4) + i);
          words[4 * i] = four.x;
          words[4 * i + 1] = four.y;
          words[4 * i + 2] = four.z;
          words[4 * i + 3] = four.w;
        }
        unpack_eight<pair_type>(words, x.numbers[half][block]);
      }
    }
  }

  // Sums of eight heads of pairs g (the first two: heads 2t, 2t + 1) and g + 8 to what is stored of
  // keys 2(g / 2), the next, and both 8 further, of head 2t + g % 2.
  __device__ __forceinline__ void arrange(const Walk& at, const float (&sum)[4],
                                          float (&stored)[4]) const {
    const Sizes& sizes = params.problem.sizes;
    const std::int64_t i = std::int64_t{at.i_block} * kBiasBlock + thread / 32 + at.query * 8;
    const bool odd = lane() / 4 % 2 != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t j = std::int64_t{at.j_block} * kBiasBlock + lane() / 4 + half * 8;
      const bool there = i < sizes.n && j < sizes.n;
      const float first = there ? sum[2 * half] * params.problem.scale : 0.0f;
      const float second = there ? sum[2 * half + 1] * params.problem.scale : 0.0f;
      const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
      stored[2 * half] = odd ? other : first;
      stored[2 * half + 1] = odd ? second : other;
    }
  }

  // Eight numbers of a block of the bias; `held` are those of the first query.
  __device__ __forceinline__ void store(const Walk& at, int octet,
                                        const std::uint32_t (&held)[kHeldWords],
                                        const std::uint32_t (&words)[kHeldWords]) const {
    const int head = octet * 8 + lane() % 4 * 2 + lane() / 4 % 2;
    if (head >= params.problem.sizes.heads) return;
    const std::int64_t line = (at.group * params.problem.sizes.heads + head) * params.blocks;
    const std::int64_t block = (line + at.i_block) * params.blocks + at.j_block;
    auto* to = static_cast<unsigned char*>(params.problem.bias) +
               (block * kBiasNumbers + (thread / 32 * 4 + lane() / 8) * 8) * (kSixteen ? 2 : 4);
    if constexpr (kSixteen) {
      sm80::store_global_16(to, make_uint4(held[0], words[0], held[1], words[1]));
    } else {
      sm80::store_global_16(to, make_uint4(held[0], held[1], words[0], words[1]));
      sm80::store_global_16(to + 16, make_uint4(held[2], held[3], words[2], words[3]));
    }
  }

  __device__ __forceinline__ void run() const {
    Walk ahead = start();
    Walk at = ahead;
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (ahead.tiles > 0) {
        ask(ahead, stage);
        ahead.next(params, passes());
      }
      sm80::cp_async_commit();
    }
    const Table table = this->table();
    if (params.resident) {
      table.fill(params.problem, 0, params.octets, 0, params.chunks, thread, kBiasThreads);
      __syncthreads();
    }

    const bool normed = params.problem.norm_weight.data != nullptr;
    BiasStatistics statistics{};
    float sum[kOctetsHeld][4];
    std::uint32_t held[kOctetsHeld][kHeldWords] = {};
    int stage = 0;
    while (at.tiles > 0) {
      sm80::cp_async_wait<kStages - 1>();
      BiasPairs x;
      read(stage, x);
      if (ahead.tiles > 0) {
        ask(ahead, stage);
        ahead.next(params, passes());
      }
      sm80::cp_async_commit();
      stage = stage + 1 == kStages ? 0 : stage + 1;

      const bool product = at.pass + 1 == passes();
      if (normed) {
        if (at.pass == 0) {
          statistics.take(x, at.chunk, params.problem.sizes.pair_channels, lane() % 4);
        } else {
          statistics.subtract_mean(x);
        }
        if (at.chunk + 1 == params.chunks && at.pass == 0) {
          statistics.finish(params.problem.sizes.pair_channels, params.problem.eps);
        }
      }
      if (product) {
        if (!params.resident) {
          __syncthreads();
          table.fill(params.problem, at.octet, kOctetsHeld, at.chunk, 1, thread, kBiasThreads);
          __syncthreads();
        }
        if (at.chunk == 0) {
#pragma unroll
          for (int o = 0; o < kOctetsHeld; ++o) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[o][e] = 0.0f;
          }
        }
        const int octet = params.resident ? at.octet : 0;
        const int chunk = params.resident ? at.chunk : 0;
        const bool second = at.octet + 1 < params.octets;
        table.multiply(x, normed, statistics, octet, chunk, second, lane(), sum);
        if (at.chunk + 1 == params.chunks) {
#pragma unroll
          for (int o = 0; o < kOctetsHeld; ++o) {
            if (at.octet + o >= params.octets) break;
            float stored[4];
            arrange(at, sum[o], stored);
            std::uint32_t words[kHeldWords];
            if constexpr (kSixteen) {
              words[0] = pack_two<type_of(mode)>(stored[0], stored[1]);
              words[1] = pack_two<type_of(mode)>(stored[2], stored[3]);
            } else {
#pragma unroll
              for (int e = 0; e < 4; ++e) words[e] = __float_as_uint(stored[e]);
            }
            if (at.query != 0) store(at, at.octet + o, held[o], words);
#pragma unroll
            for (int e = 0; e < kHeldWords; ++e) held[o][e] = words[e];
          }
        }
      }
      at.next(params, passes());
    }
    sm80::cp_async_wait<0>();
  }
};

template <Mode mode, DType pair_type>
__global__ void __launch_bounds__(kBiasThreads, 2)
    bias_kernel(const __grid_constant__ BiasParams params) {
  BiasKernel<mode, pair_type>{params, thread_index()}.run();
}

}  // namespace fused_ops::msa_row_attention
