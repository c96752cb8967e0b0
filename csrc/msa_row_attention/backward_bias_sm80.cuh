// SPDX-License-Identifier: Apache-2.0
// Gradient of the bias: the sum of dS = P (da v^T - D) over the rows that share it, P the weights.
//
// A block has 64 queries and 64 keys of a head and walks the rows of the group in order, one after
// the other through a ring in shared memory. A warp has 16 of the queries and all of the keys;
// their bias and sums stay in its registers. Where blocks are few the rows are cut into slabs,
// whose sums a second kernel adds in order.
#pragma once

#include "msa_row_attention/backward_pieces.cuh"

namespace fused_ops::msa_row_attention {

struct BackwardBiasParams : BackwardParams {
  float* sums = nullptr;  // (slabs, groups, heads, N, N)
  // From a row to the next one, in numbers.
  std::int64_t projected_stride = 0;
  std::int64_t attended_stride = 0;
  std::int64_t statistic_stride = 0;
  unsigned slabs = 0;
  unsigned rows_of_slab = 0;
};

template <Mode mode, int width, bool dropout = false>
struct BackwardBias {
  static constexpr int kQueries = kBiasQueries;
  static_assert(kQueries == kKeys);
  static constexpr int kThreads = kQueries / 16 * 32;
  static constexpr int kKeyBlocks = kKeys / 16;
  static constexpr int kStages = bias_tile(width, dropout).stages;  // 1 or 2
  static constexpr int kRowsAtHand = 4;
  using Product = Products<mode, width, 1>;
  using Line = Lines<width>;
  static constexpr int kTileBytes = kKeys * Line::kPitch;

  struct alignas(1024) PlainStage {
    unsigned char tiles[4][kTileBytes];  // queries, gradients, keys, values
    // Of 16 queries: log_sums, row_dots. Lanes have two, 8 apart, each twice, as sums of products
    // begin with the latter.
    float statistics[kQueries / 16][2][8][4];
  };
  struct DropoutStage : PlainStage {
    uint2 dropout_keys[kQueries / 16][8][2];  // as statistics are, once
  };
  using Stage = std::conditional_t<dropout, DropoutStage, PlainStage>;
  // Places in a stage that a thread reads, and writes. Kept in shared memory: registers are scarce.
  struct alignas(16) Reads {
    unsigned queries, keys, numbers;
  };
  struct alignas(16) Writes {
    std::int64_t keys_from_queries;  // of what is asked for
    unsigned queries, number;
  };
  struct Shared {
    Stage stages[kStages];
    // Which of the block's keys are there in a row, of the rows in work and the next ones.
    std::uint64_t here[kRowsAtHand];
    // What rows are asked for with: here it occupies no registers.
    std::int64_t first_mask;  // of the first row, in words
    int key_tile;
    int left;   // queries from the block's first one on
    int count;  // of rows
    Reads reads[kThreads];
    Writes writes[kThreads];
  };
  static constexpr int kStageBytes = sizeof(Stage);
  static constexpr unsigned kKeysAt = 2 * kTileBytes;
  static constexpr int kStatisticsAt = 4 * kTileBytes;
  static constexpr int kDropoutAt = sizeof(PlainStage);
  static constexpr int kHereAt = kStages * kStageBytes;
  static constexpr int kReadsAt = kHereAt + kRowsAtHand * 8 + 32;
  static constexpr int kWritesAt = kReadsAt + kThreads * 16;

  // What a block works at. The blocks of a group's and head's slab follow each other: they read the
  // same rows.
  struct Block {
    unsigned group, slab, head;
    int query_tile, key_tile;

    static __device__ __forceinline__ Block of(const BackwardBiasParams& p) {
      unsigned block = blockIdx.x;
      const auto tiles = static_cast<unsigned>(p.tiles);
      const auto key_tile = static_cast<int>(block % tiles);
      block /= tiles;
      const auto query_tile = static_cast<int>(block % tiles);
      block /= tiles;
      const unsigned head = block % p.heads;
      block /= p.heads;
      return {block / p.slabs, block % p.slabs, head, query_tile, key_tile};
    }
  };

  const BackwardBiasParams& p;
  sm80::SharedAddress lines;  // of the first stage
  unsigned thread;
  // The thread's first piece of queries and gradients, and its number of a query, of the next row
  // that is asked for.
  const std::uint16_t* query_piece;
  const std::uint16_t* gradient_piece;
  const float* statistic;

  static __device__ __forceinline__ void run(const BackwardBiasParams& p) {
    const Block block = Block::of(p);
    const unsigned index = thread_index();  // by a detour, else it is read again and again
    const unsigned thread = __shfl_sync(0xffffffff, index, index % 32);
    const unsigned first = block.slab * p.rows_of_slab;
    const unsigned end = min(first + p.rows_of_slab, p.rows);
    const std::int64_t row = std::int64_t{block.group} * p.rows + first;
    const Place place{p, static_cast<std::uint64_t>(row) * static_cast<unsigned>(p.n), block.head};
    const unsigned line = thread / Line::kPieceRoom, column = thread % Line::kPieceRoom * 8;
    const int first_query = block.query_tile * kQueries;
    const unsigned query = first_query + line;
    const float* statistics = thread < kQueries ? p.log_sums : p.row_dots;
    BackwardBias{p,
                 number_of(&shared_memory<Shared>()),
                 thread,
                 p.projected + place.projected(query, 0) + column,
                 p.d_attended + place.attended(query) + column,
                 statistics + place.statistic(first_query + thread % kQueries)}
        .all(block, static_cast<int>(end - first), row);
  }

  // Words that are read by numbers, else the address is looked for at each use.
  static __device__ __forceinline__ std::uint64_t word_of(std::uint32_t low, std::uint32_t high) {
    return std::uint64_t{high} << 32 | low;
  }
  __device__ __forceinline__ std::uint64_t here_in(int row) const {
    const uint2 words = sm80::load_shared_8(lines + kHereAt + row % kRowsAtHand * 8);
    return word_of(words.x, words.y);
  }

  __device__ __forceinline__ Reads find_reads() const {
    const unsigned lane = thread % 32, first = thread / 32 * 16;
    return {first * Line::kPitch + Product::down(lane), kKeysAt + Product::across(lane),
            kStatisticsAt + first * 16 + lane / 4 * 16};
  }
  __device__ __forceinline__ Writes find_writes(const Block& block) const {
    const unsigned query = thread % kQueries;
    return {std::int64_t{(block.key_tile - block.query_tile) * kKeys} * (4 * p.width) + p.width,
            Line::piece_at(thread / Line::kPieceRoom, thread % Line::kPieceRoom),
            kStatisticsAt + query / 16 * 256 + thread / kQueries * 128 + query % 8 * 16 +
                query / 8 % 2 * 8};
  }
  __device__ __forceinline__ Reads reads() const {
    const uint4 words = sm80::load_shared_16(lines + kReadsAt + thread * 16);
    return {words.x, words.y, words.z};
  }
  __device__ __forceinline__ Writes writes() const {
    const uint4 words = sm80::load_shared_16(lines + kWritesAt + thread * 16);
    return {static_cast<std::int64_t>(word_of(words.x, words.y)), words.z, words.w};
  }

  // Asks for a row's mask.
  __device__ __forceinline__ void copy_mask(int row) const {
    if (thread >= 2) return;
    auto& shared = shared_memory<Shared>();
    if (row >= shared_memory<Shared>().count) return;
    const auto* words = reinterpret_cast<const std::uint32_t*>(p.present);
    const std::int64_t at = (shared.first_mask + std::int64_t{row} * p.tiles) * 2 + thread;
    sm80::cp_async_4(reinterpret_cast<std::uint32_t*>(&shared.here[row % kRowsAtHand]) + thread,
                     words + at, 4);
  }

  // Masks of all rows, where all keys are there.
  __device__ __forceinline__ void write_masks(int key_tile) const {
    if (thread < kRowsAtHand) shared_memory<Shared>().here[thread] = p.mask_word(0, key_tile);
  }

  // Asks for what belongs to the next row, whose mask is at hand, and for the mask of the one after
  // it; zeros for keys and values that are not there.
  __device__ __forceinline__ void copy(int row) {
    if (p.present) copy_mask(row + 1);
    // Of a row that is not there nobody has written which keys are.
    const std::uint64_t here = row < shared_memory<Shared>().count ? here_in(row) : 0;
    if (here != 0) {
      const unsigned piece = thread % Line::kPieceRoom, line = thread / Line::kPieceRoom;
      const Writes write = writes();
      const auto to = lines + row % kStages * kStageBytes;
      const auto at = to + write.queries;
      const std::uint16_t* key_piece = query_piece + write.keys_from_queries;
      const int left = shared_memory<Shared>().left;
      // Of queries and keys that `is_here` and `is_there` say yes of.
      const auto copy_lines = [&](bool inside, auto is_here, auto is_there) {
        if (piece >= Line::kPieces) return;
        copy_pieces<width, kThreads, kQueries>(at, query_piece, 4 * p.width, inside, line, is_here);
        copy_pieces<width, kThreads, kQueries>(at + kTileBytes, gradient_piece, p.width, inside,
                                               line, is_here);
        copy_pieces<width, kThreads, kKeys>(at + kKeysAt, key_piece, 4 * p.width, inside, line,
                                            is_there);
        copy_pieces<width, kThreads, kKeys>(at + kKeysAt + kTileBytes, key_piece + p.width,
                                            4 * p.width, inside, line, is_there);
      };
      // Where all are there, no question at every piece.
      if (width == p.dim && here == ~std::uint64_t{0} && left >= kQueries) {
        copy_lines(true, [](int) { return true; }, [](int) { return true; });
      } else {
        copy_lines(
            width == p.dim || piece * 8 < p.dim, [left](int query) { return query < left; },
            [here](int key) { return (here >> key & 1) != 0; });
      }
      const int bytes = static_cast<int>(thread % kQueries) < left ? 4 : 0;
      sm80::cp_async_4(to + write.number, statistic, bytes);
      sm80::cp_async_4(to + write.number + 4, statistic, bytes);
      if (dropout && thread < kQueries) {  // those with log_sums
        const auto* key =
            reinterpret_cast<const std::uint32_t*>(p.dropout.keys + (statistic - p.log_sums));
        const auto at = to + kDropoutAt + thread / 16 * 128 + thread % 8 * 16 + thread / 8 % 2 * 8;
        sm80::cp_async_4(at, key, bytes);
        sm80::cp_async_4(at + 4, key + 1, bytes);
      }
    }
    sm80::cp_async_commit();
    query_piece += p.projected_stride;
    gradient_piece += p.attended_stride;
    statistic += p.statistic_stride;
  }

  uint4 bias[kKeyBlocks];
  float total[kKeyBlocks][2][4];

  __device__ __forceinline__ void all(const Block& block, int count, std::int64_t first_row) {
    if (thread == 0) {
      shared_memory<Shared>().first_mask = first_row * p.tiles + block.key_tile;
      shared_memory<Shared>().key_tile = block.key_tile;
      shared_memory<Shared>().left = p.n - block.query_tile * kQueries;
      shared_memory<Shared>().count = count;
    }
    shared_memory<Shared>().reads[thread] = find_reads();
    shared_memory<Shared>().writes[thread] = find_writes(block);
    __syncthreads();
    p.present ? copy_mask(0) : write_masks(block.key_tile);
    sm80::cp_async_commit();
    sm80::cp_async_wait<0>();
    __syncthreads();
    copy(0);
    load_bias(block);
    for (int row = 0; row < shared_memory<Shared>().count; ++row) {
      sm80::cp_async_wait<0>();
      __syncthreads();
      if (kStages > 1) copy(row + 1);
      const std::uint64_t here = here_in(row);
      const auto stage = lines + row % kStages * kStageBytes;
      if (here == ~std::uint64_t{0}) {
        add_row<true>(stage, here);
      } else if (here != 0) {
        add_row<false>(stage, here);
      }
      if (kStages == 1) {
        __syncthreads();
        copy(row + 1);
      }
    }
    sm80::cp_async_wait<0>();
    store();
  }

  // Queries and keys that do not exist have others' bias.
  __device__ __forceinline__ void load_bias(const Block& block) {
    const std::int64_t first_line = (std::int64_t{block.group} * p.heads + block.head) * p.blocks;
    const int query_block =
        block.query_tile * (kQueries / kBiasBlock) + static_cast<int>(thread / 32);
    const std::int64_t line = first_line + min(query_block, p.blocks - 1);
    const uint4* from =
        static_cast<const uint4*>(p.bias) + (line * p.tiles + block.key_tile) * (kKeyBlocks * 32);
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b) {
      bias[b] = from[b * 32 + thread % 32];
#pragma unroll
      for (int i = 0; i < 8; ++i) total[b][i / 4][i % 4] = 0.0f;
    }
  }

  __device__ __forceinline__ float bias_of(int b, int j, int e) const {
    const uint4& piece = bias[b];
    const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    // Else the compiler keeps the bias of all keys as fp32, and spills.
    const auto word =
        static_cast<std::uint32_t>(sm80::opaque(static_cast<int>(words[2 * j + e / 2])));
    const float2 two = unpack_16<mode>(word);
    return e % 2 == 0 ? two.x : two.y;
  }

  // `all`: whether all of the keys are there.
  template <bool all>
  __device__ __forceinline__ void add_row(sm80::SharedAddress stage, std::uint64_t here) {
    const unsigned lane = thread % 32;
    const Reads at = reads();
    const auto queries = stage + at.queries, keys = stage + at.keys, numbers = stage + at.numbers;
    typename Product::Fragments query, gradient;
    Product::load(query, queries, 0);
    Product::load(gradient, queries, kTileBytes);
    const uint4 two = sm80::load_shared_16(numbers), four = sm80::load_shared_16(numbers + 128);
    const float log_sums[2] = {__uint_as_float(two.x), __uint_as_float(two.z)};
    const float minus_dots[4] = {-__uint_as_float(four.x), -__uint_as_float(four.y),
                                 -__uint_as_float(four.z), -__uint_as_float(four.w)};
    uint2 dropout_keys[2];
    std::uint32_t offset = 0;  // of dropout's hash, at the lane's first key
    if (dropout) {
      const uint4 keys =
          sm80::load_shared_16(stage + kDropoutAt + thread / 32 * 128 + lane / 4 * 16);
      dropout_keys[0] = make_uint2(keys.x, keys.y);
      dropout_keys[1] = make_uint2(keys.z, keys.w);
      const auto tile = static_cast<unsigned>(shared_memory<Shared>().key_tile);
      offset = (tile * (kKeys / 2) + lane % 4) * kDropoutStep;
    }
    const std::uint64_t mine = here >> (2 * (lane % 4));
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b) {
      typename Product::Columns key_columns, value_columns;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        typename Product::Weights weights, gradients;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          weights[0][e] = bias_of(b, j, e);
          gradients[0][e] = minus_dots[e];
        }
        Product::load(key_columns, keys, b * 16 * Line::kPitch, j);
        Product::multiply(weights, query, key_columns[j]);
        Product::load(value_columns, keys, kTileBytes + b * 16 * Line::kPitch, j);
        Product::multiply(gradients, gradient, value_columns[j]);
#pragma unroll
        for (int h = 0; dropout && h < 2; ++h) {
          const auto numbers =
              dropout_numbers(dropout_keys[h], offset + (b * 8 + j * 4) * kDropoutStep);
          const float dot = minus_dots[2 * h];
          if (!keeps_first(numbers, p.dropout.threshold)) gradients[0][2 * h] = dot;
          if (!keeps_second(numbers, p.dropout.threshold)) gradients[0][2 * h + 1] = dot;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float weight = sm80::exp2_approx(fmaf(weights[0][e], p.logit_scale, -log_sums[e / 2]));
          // An absent key adds nothing, not even a query's NaN.
          const bool there = all || (mine >> (b * 16 + j * 8 + e % 2) & 1) != 0;
          if (!there) weight = gradients[0][e] = 0.0f;
          total[b][j][e] = fmaf(weight, gradients[0][e], total[b][j][e]);
        }
      }
    }
  }

  __device__ __forceinline__ void store() const {
    const Block block = Block::of(p);
    const unsigned me = thread, lane = me % 32;
    const auto tiles = static_cast<unsigned>(p.tiles);
    const unsigned groups = gridDim.x / (tiles * tiles * p.heads * p.slabs);
    const std::int64_t map =
        (std::int64_t{block.slab} * groups + block.group) * p.heads + block.head;
    float* sum = p.sums + map * p.n * p.n;
    const int first = block.query_tile * kQueries + static_cast<int>(me / 32 * 16 + lane / 4);
    const int first_key = block.key_tile * kKeys + static_cast<int>(lane % 4) * 2;
    const bool even = p.n % 2 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = first + h * 8;
      if (query >= p.n) continue;
      float* line = sum + std::int64_t{query} * p.n;
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = first_key + b * 16 + j * 8;
          float x = total[b][j][2 * h], y = total[b][j][2 * h + 1];
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
  }
};

template <Mode mode, int width, bool dropout = false>
__global__ void __launch_bounds__(BackwardBias<mode, width, dropout>::kThreads,
                                  bias_tile(width, dropout).blocks)
    backward_bias_kernel(const __grid_constant__ BackwardBiasParams params) {
  BackwardBias<mode, width, dropout>::run(params);
}

}  // namespace fused_ops::msa_row_attention
