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
#include "msa_row_attention/bias_table.cuh"
#include "msa_row_attention/bias_walk.cuh"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

constexpr int kBiasThreads = 256;
constexpr int kBiasRing = 64 * 1024;  // bytes of pairs on their way to a block

// Shared memory holds the ring, then the table's weights, then those of the LayerNorm.
template <Mode mode, DType pair_type>
struct BiasKernel {
  static constexpr DType kType = type_of(mode);
  static constexpr bool kSixteen = kType != DType::kFloat32;
  static constexpr int kOctets = kSixteen ? 2 : 1;  // whose sums a warp has in registers
  static constexpr int kWords = words_of(pair_type, 8);
  static constexpr int kPieces = kWords / 4;  // of 16 bytes, of eight channels
  static constexpr int kStagePieces = 8 * kPieces;
  static constexpr int kStages = kBiasRing / kBiasThreads / 16 / kStagePieces;
  static_assert((kStages & (kStages - 1)) == 0);
  static constexpr int kHeld = kSixteen ? 2 : 4;  // words of four results
  using Table = BiasTable<mode>;
  using Walk = BiasWalk<kOctets>;
  using Words = std::uint32_t[2][4][kWords];  // of pairs g and g + 8

  static constexpr int shared_bytes(int octets, int chunks) {
    return kBiasRing + octets * chunks * Table::kWeightBytes + chunks * Table::kNormBytes;
  }

  const BiasParams& params;
  int thread;

  __device__ __forceinline__ int warp() const { return thread >> 5; }
  __device__ __forceinline__ int g() const { return thread >> 2 & 7; }
  __device__ __forceinline__ int t() const { return thread & 3; }
  __device__ __forceinline__ int query(const Walk& at) const {
    return at.i_block * kBiasBlock + warp() + (at.second_query(params) ? 8 : 0);
  }
  __device__ __forceinline__ int key(const Walk& at, int half) const {
    return at.j_block * kBiasBlock + g() + half * 8;
  }
  __device__ __forceinline__ unsigned char* shared() const {
    return shared_memory<unsigned char[kBiasRing]>();
  }
  __device__ __forceinline__ Table table() const {
    const int octets = params.resident ? params.octets : kOctets;
    const int chunks = params.resident ? params.chunks : 1;
    unsigned char* weights = shared() + kBiasRing;
    return {weights, reinterpret_cast<float*>(weights + octets * chunks * Table::kWeightBytes),
            chunks};
  }
  // This lane's piece (half, block, which) of a stage; those of a warp lie side by side.
  __device__ __forceinline__ uint4* piece(int stage, int half, int block, int which) const {
    const int index = (half * 4 + block) * kPieces + which;
    return reinterpret_cast<uint4*>(shared()) +
           ((warp() * kStages + stage) * kStagePieces + index) * 32 + (thread & 31);
  }

  // Asks for what the lane needs in a step; what is not there becomes zero.
  __device__ __forceinline__ void ask(const Walk& at, int stage) const {
    const Pairs& pair = params.problem.pair;
    constexpr int kSize = pair_type == DType::kFloat32 ? 4 : 2;
    const int channel = at.chunk * kBiasChunk + t() * 8;
    const int left = (params.problem.sizes.pair_channels - channel) * kSize;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = query(at) < params.n && key(at, half) < params.n;
      const std::int64_t element = std::int64_t{at.group} * pair.group_stride +
                                   query(at) * pair.i_stride + key(at, half) * pair.j_stride +
                                   channel;
      // Where there is nothing to read, the address must be aligned still.
      const auto* from =
          static_cast<const unsigned char*>(pair.data) + (there ? element : 0) * kSize;
      const int bytes = there ? left : 0;
      if (params.access == BiasAccess::kPieces) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
#pragma unroll
          for (int which = 0; which < kPieces; ++which) {
            const int byte = block * 32 * kSize + which * 16;
            sm80::cp_async_16(piece(stage, half, block, which), from + byte, byte < bytes ? 16 : 0);
          }
        }
      } else {
        ask_slowly(from, bytes, stage, half);
      }
    }
  }

  __device__ __forceinline__ void ask_slowly(const unsigned char* from, int bytes, int stage,
                                             int half) const {
#pragma unroll 1
    for (int block = 0; block < 4; ++block) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const int byte = block * kWords * 16 + word * 4;
        const int left = bytes - byte;
        auto* to = reinterpret_cast<std::uint32_t*>(piece(stage, half, block, word / 4)) + word % 4;
        if (params.access == BiasAccess::kWords) {
          sm80::cp_async_4(to, left > 0 ? from + byte : from, left < 0 ? 0 : left > 4 ? 4 : left);
        } else if constexpr (kWords == 4) {  // fp32 numbers are words
          const auto* two = reinterpret_cast<const std::uint16_t*>(from + byte);
          const std::uint32_t low = left > 0 ? two[0] : 0;
          const std::uint32_t high = left > 2 ? two[1] : 0;
          *to = low | high << 16;
        }
      }
    }
  }

  __device__ __forceinline__ void read(int stage, Words& words) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int which = 0; which < kPieces; ++which) {
          const uint4 four = *piece(stage, half, block, which);
          std::uint32_t* to = words[half][block] + which * 4;
          to[0] = four.x;
          to[1] = four.y;
          to[2] = four.z;
          to[3] = four.w;
        }
      }
    }
  }

  // A step but for what comes before and after its product.
  template <bool kNormed>
  __device__ __forceinline__ void take(const Words& words, const Walk& at,
                                       BiasStatistics& statistics, float (&sum)[kOctets][4]) const {
    constexpr bool kAsTheyAre = !kNormed && pair_type == kType;
    BiasPairs x;
    if constexpr (!kAsTheyAre || !kSixteen) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          unpack<pair_type, 8>(words[half][block], x.numbers[half][block]);
        }
      }
    }
    if constexpr (kNormed) {
      const bool taken = params.passes > 1 && at.is_product(params);
      statistics.subtract(x, taken, at.chunk, params.problem.sizes.pair_channels, t());
      if (!taken && at.chunk + 1 == params.chunks) {
        statistics.finish(params.per_channel, params.problem.eps);
      }
      if (!at.is_product(params)) return;
    }
    const Table weights = table();
    const int octet = params.resident ? at.octet() : 0;
    const int chunk = params.resident ? at.chunk : 0;
    const bool second = at.octet() + 1 < params.octets;
    [[maybe_unused]] float part[2][8] = {};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if constexpr (kNormed) weights.normalise(x, statistics, chunk, block, t());
      if constexpr (kSixteen) {
        std::uint32_t a[2][4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            std::uint32_t& to = a[word / 2][word % 2 * 2 + half];
            if constexpr (kAsTheyAre) {
              to = words[half][block][word];
            } else {
              const float* two = x.numbers[half][block] + 2 * word;
              to = pack_two<kType>(two[0], two[1]);
            }
          }
        }
        weights.multiply(a, octet, chunk, block, second, thread & 31, sum);
      } else {
        weights.multiply(x, octet, chunk, block, t(), part);
        __syncwarp();  // else the compiler reads more weights ahead than there are registers
      }
    }
    if constexpr (!kSixteen) Table::gather(part, t(), sum[0]);
  }

  // From sums of pair g, heads 2t and 2t + 1, and of pair g + 8, to what is stored: of head
  // 2t + g % 2 the keys 2 * (g / 2), the next one, and both 8 further.
  __device__ __forceinline__ void arrange(const Walk& at, const float (&sum)[4],
                                          std::uint32_t (&words)[kHeld]) const {
    const bool odd = g() % 2 != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = query(at) < params.n && key(at, half) < params.n;
      const float first = there ? sum[2 * half] * params.problem.scale : 0.0f;
      const float second = there ? sum[2 * half + 1] * params.problem.scale : 0.0f;
      const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
      const float low = odd ? other : first;
      const float high = odd ? second : other;
      if constexpr (kSixteen) {
        words[half] = pack_two<kType>(in_range(low), in_range(high));
      } else {
        words[2 * half] = __float_as_uint(low);
        words[2 * half + 1] = __float_as_uint(high);
      }
    }
  }

  // Finite numbers that fp16 has not, for the bias is stored times sqrt(d), become its largest.
  static __device__ __forceinline__ float in_range(float x) {
    constexpr float kMost = 65504.0f;
    const float size = fabsf(x);
    const bool is_finite = size < __uint_as_float(0x7f800000u);
    if (kType != DType::kFloat16 || !is_finite || size <= kMost) return x;
    return x > 0.0f ? kMost : -kMost;
  }

  // Eight numbers of a block of the bias, of both queries.
  __device__ __forceinline__ void store(const Walk& at, int octet,
                                        const std::uint32_t (&first)[kHeld],
                                        const std::uint32_t (&second)[kHeld]) const {
    const int head = octet * 8 + t() * 2 + g() % 2;
    if (head >= params.problem.sizes.heads) return;
    const std::int64_t line =
        (std::int64_t{at.group} * params.problem.sizes.heads + head) * params.blocks;
    const std::int64_t block = (line + at.i_block) * params.key_blocks + at.j_block;
    auto* to = static_cast<unsigned char*>(params.problem.bias) +
               (block * kBiasNumbers + (warp() * 4 + g() / 2) * 8) * (kSixteen ? 2 : 4);
    if constexpr (kSixteen) {
      sm80::store_global_16(to, make_uint4(first[0], second[0], first[1], second[1]));
    } else {
      sm80::store_global_16(to, make_uint4(first[0], first[1], second[0], second[1]));
      sm80::store_global_16(to + 16, make_uint4(first[2], first[3], second[2], second[3]));
    }
  }

  __device__ __forceinline__ void step(Walk& ahead, const Walk& at, int left,
                                       BiasStatistics& statistics, float (&sum)[kOctets][4],
                                       std::uint32_t (&held)[kOctets][kHeld]) const {
    if (!params.resident && at.is_product(params)) {
      __syncthreads();
      table().fill(params.problem, at.octet(), kOctets, at.chunk, 1, thread, kBiasThreads);
      __syncthreads();
    }
    sm80::cp_async_wait<kStages - 1>();
    Words words;
    read(left & (kStages - 1), words);
    if (left > kStages) {
      ask(ahead, left & (kStages - 1));
      ahead.next(params);
    }
    sm80::cp_async_commit();

    if (params.problem.norm_weight.data) {
      take<true>(words, at, statistics, sum);
    } else {
      take<false>(words, at, statistics, sum);
    }
    if (!at.is_product(params) || at.chunk + 1 < params.chunks) return;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (at.octet() + o >= params.octets) break;
      std::uint32_t now[kHeld];
      arrange(at, sum[o], now);
      if (at.second_query(params)) store(at, at.octet() + o, held[o], now);
#pragma unroll
      for (int e = 0; e < kHeld; ++e) held[o][e] = now[e];
#pragma unroll
      for (float& number : sum[o]) number = 0.0f;
    }
  }

  __device__ __forceinline__ void run() const {
    const std::int64_t index = blockIdx.x;
    const bool longer = index < params.longer;
    const std::int64_t first = index * params.share + (longer ? index : params.longer);
    const int tiles = static_cast<int>(params.share) + (longer ? 1 : 0);
    const int steps = tiles * Walk::steps_of_tile(params);
    Walk ahead(params, first);
    Walk at = ahead;
#pragma unroll 1
    for (int left = steps; left > steps - kStages; --left) {
      if (left > 0) {
        ask(ahead, left & (kStages - 1));
        ahead.next(params);
      }
      sm80::cp_async_commit();
    }
    if (params.resident) {
      table().fill(params.problem, 0, params.octets, 0, params.chunks, thread, kBiasThreads);
      __syncthreads();
    }

    BiasStatistics statistics{};
    float sum[kOctets][4] = {};
    std::uint32_t held[kOctets][kHeld] = {};  // of the first query
#pragma unroll 1
    for (int left = steps; left > 0; --left) {
      // Else ptxas keeps addresses from round to round, and spills.
      const BiasKernel now{params, sm80::opaque(thread)};
      now.step(ahead, at, left, statistics, sum, held);
      at.next(params);
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
