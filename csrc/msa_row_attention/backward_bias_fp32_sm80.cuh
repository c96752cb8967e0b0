// SPDX-License-Identifier: Apache-2.0
// Gradient of the bias for fp32 tensors: the sum of dS = P (da v^T - D) over the rows that share
// it, P the weights.
//
// As in backward_bias_sm80.cuh, a block has some queries and some keys of a head and walks the rows
// of the group in order; where blocks are few the rows are cut into slabs. A warp has 16 queries
// and all of the block's keys, whose bias and sums stay in its registers: an operand of 16 queries
// is split once and meets all keys.
#pragma once

#include "msa_row_attention/backward_fp32_pieces.cuh"

namespace fused_ops::msa_row_attention {

struct BackwardBiasFp32Params : BackwardFp32Params {
  float* sums = nullptr;  // (slabs, groups, heads, N, N)
  unsigned key_tiles = 0;
  unsigned query_tiles = 0;
  unsigned slabs = 0;
  unsigned rows_of_slab = 0;
};

// A block has 16 * `query_warps` queries.
template <Mode mode, int width, int query_warps, int block_keys, int stage_count,
          bool dropout = false>
struct BackwardBiasFp32 {
  static constexpr int kThreads = 32 * query_warps;
  static constexpr int kBlockQueries = 16 * query_warps;
  static constexpr int kBlockKeys = block_keys;  // 32 or 64
  static constexpr int kEights = kBlockKeys / 8;
  static constexpr int kStages = stage_count;  // 1 or 2
  using Product = Fp32Products<mode, width>;
  using Left = typename Product::Left;
  using Operands = typename Product::Operands;
  static constexpr int kPitch = Product::kPitch;
  static constexpr int kQueryBytes = kBlockQueries * kPitch;
  static constexpr int kKeyBytes = kBlockKeys * kPitch;

  // What a block works at. The blocks of a group's and head's slab follow each other: they read the
  // same rows.
  struct Block {
    unsigned group, slab, head;
    int first_query;
    int first_key;

    static __device__ __forceinline__ Block of(const BackwardBiasFp32Params& p) {
      unsigned block = blockIdx.x;
      const unsigned key_tile = block % p.key_tiles;
      block /= p.key_tiles;
      const unsigned query_tile = block % p.query_tiles;
      block /= p.query_tiles;
      const unsigned head = block % p.heads;
      block /= p.heads;
      return {block / p.slabs, block % p.slabs, head, static_cast<int>(query_tile) * kBlockQueries,
              static_cast<int>(key_tile) * kBlockKeys};
    }
  };

  struct alignas(1024) PlainStage {
    unsigned char queries[2][kQueryBytes];  // queries, gradients
    unsigned char keys[2][kKeyBytes];       // keys, values
    float statistics[2][kBlockQueries];     // log_sums, row_dots
  };
  struct DropoutStage : PlainStage {
    uint2 dropout_keys[kBlockQueries];
  };
  using Stage = std::conditional_t<dropout, DropoutStage, PlainStage>;
  struct Shared {
    Stage stages[kStages];
    Block block;  // here it occupies no registers
  };
  static constexpr int kStageBytes = sizeof(Stage);

  const BackwardBiasFp32Params& p;
  unsigned char* stages;
  unsigned thread;
  std::int64_t first_row;
  int count;  // of rows

  // What follows from the thread's number is computed again where it is asked for, and occupies no
  // registers.
  __device__ __forceinline__ unsigned again() const {
    return static_cast<unsigned>(sm80::opaque(static_cast<int>(thread)));
  }
  // The warp's first one, of the block's.
  __device__ __forceinline__ int warp_query() const { return static_cast<int>(again() / 32 * 16); }

  static __device__ __forceinline__ void run(const BackwardBiasFp32Params& p) {
    const Block block = Block::of(p);
    const unsigned first = block.slab * p.rows_of_slab;
    const unsigned end = min(first + p.rows_of_slab, p.rows);
    if (thread_index() == 0) shared_memory<Shared>().block = block;
    __syncthreads();
    BackwardBiasFp32{p, reinterpret_cast<unsigned char*>(&shared_memory<Shared>()),
                     static_cast<unsigned>(sm80::opaque(thread_index())),
                     std::int64_t{block.group} * p.rows + first, static_cast<int>(end - first)}
        .all();
  }

  // Which of the block's keys are there in a row.
  __device__ __forceinline__ std::uint64_t mask_word(int row) const {
    if (row >= count) return 0;
    constexpr std::uint64_t kAll = ~std::uint64_t{0} >> (64 - kBlockKeys);
    const int first_key = shared_memory<Shared>().block.first_key;
    return p.mask_word(first_row + row, first_key / kKeys) >> (first_key % kKeys) & kAll;
  }

  // Asks for what belongs to a row; zeros for keys and values that are not `here`.
  __device__ __forceinline__ void copy(int row, int stage, std::uint64_t here) const {
    if (here != 0) {
      const Block& block = shared_memory<Shared>().block;
      const Place place{p, static_cast<std::uint64_t>(first_row + row) * static_cast<unsigned>(p.n),
                        block.head};
      unsigned char* to = stages + stage * kStageBytes;
      const unsigned me = again();
      auto& shared = *reinterpret_cast<Stage*>(to);
      const int left = p.n - block.first_query;
      const std::uint64_t exist = Product::first_lines(left);
      const auto first_query = static_cast<unsigned>(block.first_query);
      Product::template copy<kThreads, kBlockQueries>(shared.queries[0],
                                                      p.projected + place.projected(first_query, 0),
                                                      4 * p.width, p.dim, me, exist);
      Product::template copy<kThreads, kBlockQueries>(
          shared.queries[1], p.d_attended + place.attended(first_query), p.width, p.dim, me, exist);
      const float* key = p.projected + place.projected(static_cast<unsigned>(block.first_key), 1);
      Product::template copy<kThreads, kBlockKeys>(shared.keys[0], key, 4 * p.width, p.dim, me,
                                                   here);
      Product::template copy<kThreads, kBlockKeys>(shared.keys[1], key + p.width, 4 * p.width,
                                                   p.dim, me, here);
      static_assert(2 * kBlockQueries == kThreads);
      const unsigned which = me / kBlockQueries, query = me % kBlockQueries;
      sm80::cp_async_4(
          &shared.statistics[which][query],
          (which == 0 ? p.log_sums : p.row_dots) + place.statistic(first_query + query),
          static_cast<int>(query) < left ? 4 : 0);
      if constexpr (dropout) {  // a word
        const auto* words =
            reinterpret_cast<const std::uint32_t*>(p.dropout.keys + place.statistic(first_query));
        sm80::cp_async_4(reinterpret_cast<std::uint32_t*>(shared.dropout_keys) + me, words + me,
                         static_cast<int>(me / 2) < left ? 4 : 0);
      }
    }
    sm80::cp_async_commit();
  }

  float bias[kEights][4];
  float total[kEights][4];

  __device__ __forceinline__ void all() {
    std::uint64_t here = mask_word(0);
    copy(0, 0, here);
    std::uint64_t next = mask_word(1);
    load_bias();
    // Warps behind the last query only copy.
    const bool works = shared_memory<Shared>().block.first_query + warp_query() < p.n;
    int stage = 0;
    for (int row = 0; row < count; ++row) {
      sm80::cp_async_wait<0>();
      __syncthreads();
      if (kStages > 1) copy(row + 1, 1 - stage, next);
      if (works && here != 0) add_row(stages + stage * kStageBytes, here);
      if (kStages == 1) {
        __syncthreads();
        copy(row + 1, 0, next);
      }
      here = next;
      next = mask_word(row + 2);
      stage = kStages - 1 - stage;
    }
    sm80::cp_async_wait<0>();
    if (works) store();
  }

  // Queries and keys that do not exist have others' bias.
  __device__ __forceinline__ void load_bias() {
    const Block& block = shared_memory<Shared>().block;
    const std::int64_t head = std::int64_t{block.group} * p.heads + block.head;
    const std::int64_t line =
        head * p.blocks + min((block.first_query + warp_query()) / kBiasBlock, p.blocks - 1);
    const float* from =
        p.bias +
        (line * p.tiles * (kKeys / kBiasBlock) + block.first_key / kBiasBlock) * kBiasNumbers +
        thread % 32 * 8;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float4 four = *reinterpret_cast<const float4*>(from + j / 2 * kBiasNumbers + j % 2 * 4);
      bias[j][0] = four.x;
      bias[j][1] = four.y;
      bias[j][2] = four.z;
      bias[j][3] = four.w;
#pragma unroll
      for (int e = 0; e < 4; ++e) total[j][e] = 0.0f;
    }
  }

  // products = queries * keys^T, of the lines at both places.
  __device__ __forceinline__ void multiply(float (&products)[kEights][4],
                                           const unsigned char* queries,
                                           const unsigned char* keys) const {
    const unsigned me = again();
    const int g = static_cast<int>(me / 4 % 8), t = static_cast<int>(me % 4);
    constexpr int kAtATime = width > 32 ? 2 : 4;
#pragma unroll
    for (int s = 0; s < Product::kInner; ++s) {
      float numbers[2][4];
      Operands::load_key(queries, 0, s, g, t, numbers[0]);
      Operands::load_key(queries, 1, s, g, t, numbers[1]);
      Left left;
      left.split(make_float4(numbers[0][0], numbers[0][1], numbers[0][2], numbers[0][3]),
                 make_float4(numbers[1][0], numbers[1][1], numbers[1][2], numbers[1][3]));
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        float sum[4];
        Product::template multiply_eight<false>(sum, left, keys, j, s, g, t);
#pragma unroll
        for (int e = 0; e < 4; ++e) products[j][e] = s == 0 ? sum[e] : products[j][e] + sum[e];
        if (j % kAtATime == kAtATime - 1)
          __syncwarp();  // else the compiler reads far ahead, and spills
      }
    }
  }

  __device__ __forceinline__ void add_row(const unsigned char* at, std::uint64_t here) {
    const auto& stage = *reinterpret_cast<const Stage*>(at);
    float weights[kEights][4], gradients[kEights][4];
    const int first = warp_query();
    multiply(weights, stage.queries[0] + first * kPitch, stage.keys[0]);
    float log_sums[2], row_dots[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      log_sums[h] = stage.statistics[0][first + h * 8 + again() / 4 % 8];
      row_dots[h] = stage.statistics[1][first + h * 8 + again() / 4 % 8];
    }
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weights[j][e] = p.weight<mode>(weights[j][e] + bias[j][e], log_sums[e / 2]);
      }
    }
    multiply(gradients, stage.queries[1] + first * kPitch, stage.keys[1]);
    if constexpr (dropout) {
      const int pair = shared_memory<Shared>().block.first_key / 2 + static_cast<int>(again() % 4);
      const std::uint32_t offset = static_cast<unsigned>(pair) * kDropoutStep;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint2 key = stage.dropout_keys[first + h * 8 + again() / 4 % 8];
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const auto numbers = dropout_numbers(key, offset + j * 4 * kDropoutStep);
          if (!keeps_first(numbers, p.dropout.threshold)) gradients[j][2 * h] = 0.0f;
          if (!keeps_second(numbers, p.dropout.threshold)) gradients[j][2 * h + 1] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) gradients[j][e] -= row_dots[e / 2];
    }
    // An absent key adds nothing, not even a query's NaN.
    if (here != ~std::uint64_t{0} >> (64 - kBlockKeys)) {
      const std::uint64_t mine = here >> (2 * (again() % 4));
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!(mine >> (8 * j + e % 2) & 1)) weights[j][e] = gradients[j][e] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[j][e] = fmaf(weights[j][e], gradients[j][e], total[j][e]);
      }
    }
  }

  __device__ __forceinline__ void store() const {
    const Block& block = shared_memory<Shared>().block;
    const unsigned groups = gridDim.x / (p.key_tiles * p.query_tiles * p.heads * p.slabs);
    const std::int64_t map =
        (std::int64_t{block.slab} * groups + block.group) * p.heads + block.head;
    float* sum = p.sums + map * p.n * p.n;
    const unsigned me = again();
    const int g = static_cast<int>(me / 4 % 8), t = static_cast<int>(me % 4);
    const bool even = p.n % 2 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = block.first_query + warp_query() + h * 8 + g;
      if (query >= p.n) continue;
      float* line = sum + std::int64_t{query} * p.n;
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        const int key = block.first_key + j * 8 + t * 2;
        float x = total[j][2 * h], y = total[j][2 * h + 1];
        if (dropout) {
          x *= p.dropout.factor;
          y *= p.dropout.factor;
        }
        if (even) {
          if (key < p.n) *reinterpret_cast<float2*>(line + key) = make_float2(x, y);
        } else {
          if (key < p.n) line[key] = x;
          if (key + 1 < p.n) line[key + 1] = y;
        }
      }
    }
  }
};

template <Mode mode, int width, int query_warps, int block_keys, int stage_count, int blocks,
          bool dropout = false>
__global__ void __launch_bounds__(32 * query_warps, blocks)
    backward_bias_fp32_kernel(const __grid_constant__ BackwardBiasFp32Params params) {
  BackwardBiasFp32<mode, width, query_warps, block_keys, stage_count, dropout>::run(params);
}

}  // namespace fused_ops::msa_row_attention
