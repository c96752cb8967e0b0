// SPDX-License-Identifier: Apache-2.0
// Gradient of the bias: the sum of dS = P (da v^T - D) over the rows that share it, P the weights.
//
// A block has some queries and some keys of a head and walks the rows of the group in order, one
// after the other through a ring in shared memory. A warp has 16 or 32 of the queries and 64 of the
// keys; their bias and sums stay in its registers. Nothing is shared between rows but these, so the
// larger a block the less is read: its queries and keys cross from the second-level cache once for
// queries * keys weights. Where blocks are few the rows are cut into slabs, whose sums a second
// kernel adds in order.
#pragma once

#include "msa_row_attention/backward_pieces.cuh"

namespace fused_ops::msa_row_attention {

struct BackwardBiasParams : BackwardParams {
  float* sums = nullptr;  // (slabs, groups, heads, N, N)
  // From a row to the next one, in numbers.
  std::int64_t projected_stride = 0;
  std::int64_t attended_stride = 0;
  std::int64_t statistic_stride = 0;
  unsigned key_tiles = 0;
  unsigned query_tiles = 0;
  unsigned slabs = 0;
  unsigned rows_of_slab = 0;
};

// A block has 16 * `query_tiles` * `query_warps` queries and 64 * `key_warps` keys.
template <Mode mode, int width, int query_warps, int key_warps, int query_tiles, int stage_count,
          bool dropout = false>
struct BackwardBias {
  static constexpr int kThreads = 32 * query_warps * key_warps;
  static constexpr int kM = query_tiles;
  static constexpr int kWarpQueries = 16 * kM;
  static constexpr int kBlockQueries = kWarpQueries * query_warps;
  static constexpr int kBlockKeys = kKeys * key_warps;
  static constexpr int kKeyBlocks = kKeys / 16;  // of a warp
  static constexpr int kStages = stage_count;    // 1 or 2
  static constexpr int kRowsAtHand = 4;
  static_assert(key_warps <= 2 && kStages <= 2);
  using Product = Products<mode, width, kM>;
  using Line = Lines<width>;
  static constexpr int kLines = kThreads / Line::kPieceRoom;  // that threads have a piece of
  static constexpr int kQueryBytes = kBlockQueries * Line::kPitch;
  static constexpr int kKeyBytes = kBlockKeys * Line::kPitch;

  struct alignas(1024) PlainStage {
    unsigned char queries[2][kQueryBytes];  // queries, gradients
    unsigned char keys[2][kKeyBytes];       // keys, values
    // Of 16 queries: log_sums, row_dots. Lanes have two, 8 apart, each twice, as sums of products
    // begin with the latter.
    float statistics[kBlockQueries / 16][2][8][4];
  };
  struct DropoutStage : PlainStage {
    uint2 dropout_keys[kBlockQueries / 16][8][2];  // as statistics are, once
  };
  using Stage = std::conditional_t<dropout, DropoutStage, PlainStage>;
  // Places in a stage that a thread reads ...
  struct alignas(16) Reads {
    unsigned queries, keys, numbers;
  };
  // ... and writes.
  struct alignas(16) Writes {
    std::int64_t keys_from_queries;  // of what is asked for
    unsigned queries, number;
  };
  // In shared memory where registers are scarce, else they are computed for each row.
  static constexpr bool kKeepsPlaces = width <= 32;
  struct Shared {
    Stage stages[kStages];
    // Which of the block's keys are there in a row, of the rows in work and the next ones.
    alignas(16) std::uint64_t here[kRowsAtHand][2];
    // What rows are asked for with: here it occupies no registers.
    alignas(16) std::int64_t first_row;
    int first_tile;
    Reads reads[kKeepsPlaces ? kThreads : 1];
    Writes writes[kKeepsPlaces ? kThreads : 1];
  };
  static constexpr int kStageBytes = sizeof(Stage);
  static constexpr int kKeysAt = 2 * kQueryBytes;
  static constexpr int kStatisticsAt = kKeysAt + 2 * kKeyBytes;
  static constexpr int kDropoutAt = sizeof(PlainStage);
  static constexpr int kHereAt = kStages * kStageBytes;
  static constexpr int kReadsAt = kHereAt + kRowsAtHand * 16 + 16;
  static constexpr int kWritesAt = kReadsAt + kThreads * 16;

  // What a block works at. The blocks of a group's and head's slab follow each other: they read the
  // same rows.
  struct Block {
    unsigned group, slab, head;
    int first_query;
    int first_tile;  // of 64 keys

    static __device__ __forceinline__ Block of(const BackwardBiasParams& p) {
      unsigned block = blockIdx.x;
      const unsigned key_tile = block % p.key_tiles;
      block /= p.key_tiles;
      const unsigned query_tile = block % p.query_tiles;
      block /= p.query_tiles;
      const unsigned head = block % p.heads;
      block /= p.heads;
      return {block / p.slabs, block % p.slabs, head, static_cast<int>(query_tile) * kBlockQueries,
              static_cast<int>(key_tile) * key_warps};
    }
  };

  const BackwardBiasParams& p;
  sm80::SharedAddress lines;  // of the first stage
  unsigned thread;
  int first_query;
  int count;  // of rows
  // The thread's first piece of queries and gradients, and its number of a query, of the next row
  // that is asked for.
  const std::uint16_t* query_piece;
  const std::uint16_t* gradient_piece;
  const float* statistic;

  static __device__ __forceinline__ int query_warp(unsigned thread) {
    return static_cast<int>(thread / 32 % query_warps);
  }
  static __device__ __forceinline__ int key_warp(unsigned thread) {
    return static_cast<int>(thread / 32 / query_warps);
  }

  static __device__ __forceinline__ void run(const BackwardBiasParams& p) {
    const Block block = Block::of(p);
    const unsigned index = thread_index();  // by a detour, else it is read again and again
    const unsigned thread = __shfl_sync(0xffffffff, index, index % 32);
    const unsigned first = block.slab * p.rows_of_slab;
    const unsigned end = min(first + p.rows_of_slab, p.rows);
    const std::int64_t row = std::int64_t{block.group} * p.rows + first;
    const Place place{p, static_cast<std::uint64_t>(row) * static_cast<unsigned>(p.n), block.head};
    const unsigned line = thread / Line::kPieceRoom, column = thread % Line::kPieceRoom * 8;
    const unsigned query = block.first_query + line;
    const float* statistics = thread / kBlockQueries == 0 ? p.log_sums : p.row_dots;
    BackwardBias{p,
                 number_of(&shared_memory<Shared>()),
                 thread,
                 block.first_query,
                 static_cast<int>(end - first),
                 p.projected + place.projected(query, 0) + column,
                 p.d_attended + place.attended(query) + column,
                 statistics + place.statistic(block.first_query + thread % kBlockQueries)}
        .all(block, row);
  }

  static __device__ __forceinline__ std::uint64_t (&here_of(int row))[2] {
    return shared_memory<Shared>().here[row % kRowsAtHand];
  }

  // Words of the block's mask in a row, and others. By numbers, else the address is looked for at
  // each use.
  static __device__ __forceinline__ std::uint64_t word_of(std::uint32_t low, std::uint32_t high) {
    return std::uint64_t{high} << 32 | low;
  }
  __device__ __forceinline__ uint4 words_of(int row) const {
    return sm80::load_shared_16(lines + kHereAt + row % kRowsAtHand * 16);
  }

  __device__ __forceinline__ Reads find_reads() const {
    const unsigned lane = thread % 32, first = query_warp(thread) * kWarpQueries;
    return {first * Line::kPitch + Product::down(lane),
            kKeysAt + key_warp(thread) * (kKeys * Line::kPitch) + Product::across(lane),
            kStatisticsAt + first * 16 + lane / 4 * 16};
  }
  __device__ __forceinline__ Writes find_writes(int first_tile) const {
    const unsigned query = thread % kBlockQueries;
    return {std::int64_t{first_tile * kKeys - first_query} * (4 * p.width) + p.width,
            Line::piece_at(thread / Line::kPieceRoom, thread % Line::kPieceRoom),
            kStatisticsAt + query / 16 * 256 + thread / kBlockQueries * 128 + query % 8 * 16 +
                query / 8 % 2 * 8};
  }
  __device__ __forceinline__ Reads reads() const {
    if (!kKeepsPlaces) return find_reads();
    const uint4 words = sm80::load_shared_16(lines + kReadsAt + thread * 16);
    return {words.x, words.y, words.z};
  }
  __device__ __forceinline__ Writes writes() const {
    if (!kKeepsPlaces) return find_writes(shared_memory<Shared>().first_tile);
    const uint4 words = sm80::load_shared_16(lines + kWritesAt + thread * 16);
    return {static_cast<std::int64_t>(word_of(words.x, words.y)), words.z, words.w};
  }

  // Asks for a row's mask.
  __device__ __forceinline__ void copy_mask(int row) const {
    if (thread >= 4) return;
    const auto& shared = shared_memory<Shared>();
    const int tile = shared.first_tile + static_cast<int>(thread / 2);
    const bool some = row < count && tile < p.tiles && thread / 2 < key_warps;
    const auto* words = reinterpret_cast<const std::uint32_t*>(p.present);
    const std::int64_t at = some ? ((shared.first_row + row) * p.tiles + tile) * 2 + thread % 2 : 0;
    sm80::cp_async_4(reinterpret_cast<std::uint32_t*>(here_of(row)) + thread, words + at,
                     some ? 4 : 0);
  }

  // Masks of all rows, where all keys are there.
  __device__ __forceinline__ void write_masks(int first_tile) const {
    if (thread >= 2 * kRowsAtHand) return;
    const bool some = thread % 2 < key_warps;
    here_of(thread / 2)[thread % 2] =
        some ? p.mask_word(0, first_tile + static_cast<int>(thread % 2)) : 0;
  }

  // Asks for what belongs to the next row, whose mask is at hand, and for the mask of the one after
  // it; zeros for keys and values that are not there.
  __device__ __forceinline__ void copy(int row) {
    if (p.present) copy_mask(row + 1);
    const uint4 words = words_of(row);
    const std::uint64_t here[2] = {word_of(words.x, words.y), key_warps > 1
                                                                  ? word_of(words.z, words.w)
                                                                  : word_of(words.x, words.y)};
    if ((here[0] | here[1]) != 0 && row < count) {
      const unsigned piece = thread % Line::kPieceRoom, line = thread / Line::kPieceRoom;
      const Writes write = writes();
      const auto to = lines + row % kStages * kStageBytes;
      const auto at = to + write.queries;
      const std::uint16_t* key_piece = query_piece + write.keys_from_queries;
      const int left = p.n - first_query;
      // Thread by thread, of queries and keys that `is_here` and `is_there` say yes of.
      const auto copy_lines = [&](bool inside, auto is_here, auto is_there) {
        if (piece < Line::kPieces && (kLines <= kBlockQueries || line < kBlockQueries)) {
          copy_pieces<width, kThreads, kBlockQueries>(at, query_piece, 4 * p.width, inside, line,
                                                      is_here);
          copy_pieces<width, kThreads, kBlockQueries>(at + kQueryBytes, gradient_piece, p.width,
                                                      inside, line, is_here);
        }
        if (piece < Line::kPieces && (kLines <= kBlockKeys || line < kBlockKeys)) {
          copy_pieces<width, kThreads, kBlockKeys>(at + kKeysAt, key_piece, 4 * p.width, inside,
                                                   line, is_there);
          copy_pieces<width, kThreads, kBlockKeys>(at + kKeysAt + kKeyBytes, key_piece + p.width,
                                                   4 * p.width, inside, line, is_there);
        }
      };
      const bool whole = (here[0] & here[1]) == ~std::uint64_t{0} && left >= kBlockQueries;
      if (whole && width == p.dim) {  // no question at every piece
        copy_lines(true, [](int) { return true; }, [](int) { return true; });
      } else {
        copy_lines(
            width == p.dim || piece * 8 < p.dim, [left](int query) { return query < left; },
            [&here](int key) {
              return ((key < kKeys ? here[0] : here[1]) >> (key % kKeys) & 1) != 0;
            });
      }
      static_assert(2 * kBlockQueries <= kThreads);
      if (thread < 2 * kBlockQueries) {
        const int bytes = static_cast<int>(thread % kBlockQueries) < left ? 4 : 0;
        sm80::cp_async_4(to + write.number, statistic, bytes);
        sm80::cp_async_4(to + write.number + 4, statistic, bytes);
        if (dropout && thread < kBlockQueries) {  // those with log_sums
          const auto* key =
              reinterpret_cast<const std::uint32_t*>(p.dropout.keys + (statistic - p.log_sums));
          const auto at =
              to + kDropoutAt + thread / 16 * 128 + thread % 8 * 16 + thread / 8 % 2 * 8;
          sm80::cp_async_4(at, key, bytes);
          sm80::cp_async_4(at + 4, key + 1, bytes);
        }
      }
    }
    sm80::cp_async_commit();
    query_piece += p.projected_stride;
    gradient_piece += p.attended_stride;
    statistic += p.statistic_stride;
  }

  uint4 bias[kM][kKeyBlocks];
  float total[kKeyBlocks][kM][2][4];

  __device__ __forceinline__ void all(const Block& block, std::int64_t first_row) {
    if (thread == 0) {
      shared_memory<Shared>().first_row = first_row;
      shared_memory<Shared>().first_tile = block.first_tile;
    }
    if (kKeepsPlaces) {
      shared_memory<Shared>().reads[thread] = find_reads();
      shared_memory<Shared>().writes[thread] = find_writes(block.first_tile);
    }
    __syncthreads();
    p.present ? copy_mask(0) : write_masks(block.first_tile);
    sm80::cp_async_commit();
    sm80::cp_async_wait<0>();
    __syncthreads();
    copy(0);
    load_bias(block);
    for (int row = 0; row < count; ++row) {
      sm80::cp_async_wait<0>();
      __syncthreads();
      if (kStages > 1) copy(row + 1);
      const uint4 words = words_of(row);
      const std::uint64_t here =
          key_warp(thread) == 0 ? word_of(words.x, words.y) : word_of(words.z, words.w);
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
    const int query_block = (first_query + query_warp(thread) * kWarpQueries) / kBiasBlock;
    const int tile = min(block.first_tile + key_warp(thread), p.tiles - 1);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const std::int64_t line = first_line + min(query_block + m, p.blocks - 1);
      const uint4* from =
          static_cast<const uint4*>(p.bias) + (line * p.tiles + tile) * (kKeyBlocks * 32);
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) {
        bias[m][b] = from[b * 32 + thread % 32];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          total[b][m][i / 4][i % 4] = 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ float bias_of(int b, int m, int j, int e) const {
    const uint4& piece = bias[m][b];
    const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    // Else the compiler keeps the bias of all keys as fp32, and spills.
    const auto word =
        static_cast<std::uint32_t>(sm80::opaque(static_cast<int>(words[2 * j + e / 2])));
    const float2 two = unpack_16<mode>(word);
    return e % 2 == 0 ? two.x : two.y;
  }

  // `all`: whether all of the warp's keys are there.
  template <bool all>
  __device__ __forceinline__ void add_row(sm80::SharedAddress stage, std::uint64_t here) {
    const unsigned lane = thread % 32;
    const Reads at = reads();
    const auto queries = stage + at.queries, keys = stage + at.keys, numbers = stage + at.numbers;
    typename Product::Fragments query, gradient;
    Product::load(query, queries, 0);
    Product::load(gradient, queries, kQueryBytes);
    float log_sums[kM][2], minus_dots[kM][4];  // the latter as sums of products begin with them
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const uint4 two = sm80::load_shared_16(numbers + m * 256);
      log_sums[m][0] = __uint_as_float(two.x);
      log_sums[m][1] = __uint_as_float(two.z);
      const uint4 four = sm80::load_shared_16(numbers + 128 + m * 256);
      minus_dots[m][0] = -__uint_as_float(four.x);
      minus_dots[m][1] = -__uint_as_float(four.y);
      minus_dots[m][2] = -__uint_as_float(four.z);
      minus_dots[m][3] = -__uint_as_float(four.w);
    }
    uint2 dropout_keys[dropout ? kM : 1][2];
    std::uint32_t offset = 0;  // of dropout's hash, at the lane's first key
    if (dropout) {
#pragma unroll
      for (int m = 0; m < (dropout ? kM : 1); ++m) {
        const auto of_query = (query_warp(thread) * kM + m) * 128 + lane / 4 * 16;
        const uint4 four = sm80::load_shared_16(stage + kDropoutAt + of_query);
        dropout_keys[m][0] = make_uint2(four.x, four.y);
        dropout_keys[m][1] = make_uint2(four.z, four.w);
      }
      const int tile = shared_memory<Shared>().first_tile + key_warp(thread);
      offset = (static_cast<unsigned>(tile) * (kKeys / 2) + lane % 4) * kDropoutStep;
    }
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b) {
      typename Product::Columns key_columns, value_columns;
      const std::uint32_t mine = static_cast<std::uint32_t>(here >> (b * 16)) >> (2 * (lane % 4));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        typename Product::Weights weights, gradients;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            weights[m][e] = bias_of(b, m, j, e);
            gradients[m][e] = minus_dots[m][e];
          }
        }
        Product::load(key_columns, keys, b * 16 * Line::kPitch, j);
        Product::multiply(weights, query, key_columns[j]);
        Product::load(value_columns, keys, kKeyBytes + b * 16 * Line::kPitch, j);
        Product::multiply(gradients, gradient, value_columns[j]);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int h = 0; dropout && h < 2; ++h) {
            const auto numbers = dropout_numbers(dropout_keys[dropout ? m : 0][h],
                                                 offset + (b * 8 + j * 4) * kDropoutStep);
            const float dot = minus_dots[m][2 * h];
            if (!keeps_first(numbers, p.dropout.threshold)) gradients[m][2 * h] = dot;
            if (!keeps_second(numbers, p.dropout.threshold)) gradients[m][2 * h + 1] = dot;
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float weight =
                sm80::exp2_approx(fmaf(weights[m][e], p.logit_scale, -log_sums[m][e / 2]));
            // An absent key adds nothing, not even a query's NaN.
            const bool there = all || (mine >> (8 * j + e % 2) & 1) != 0;
            if (!there) weight = gradients[m][e] = 0.0f;
            total[b][m][j][e] = fmaf(weight, gradients[m][e], total[b][m][j][e]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store() const {
    const Block block = Block::of(p);
    const unsigned me = thread, lane = me % 32;
    const unsigned groups = gridDim.x / (p.key_tiles * p.query_tiles * p.heads * p.slabs);
    const std::int64_t map =
        (std::int64_t{block.slab} * groups + block.group) * p.heads + block.head;
    float* sum = p.sums + map * p.n * p.n;
    const int first =
        block.first_query + query_warp(me) * kWarpQueries + static_cast<int>(lane / 4);
    const int first_key =
        (block.first_tile + key_warp(me)) * kKeys + static_cast<int>(lane % 4) * 2;
    const bool even = p.n % 2 == 0;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = first + m * 16 + h * 8;
        if (query >= p.n) continue;
        float* line = sum + std::int64_t{query} * p.n;
#pragma unroll
        for (int b = 0; b < kKeyBlocks; ++b) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int key = first_key + b * 16 + j * 8;
            float x = total[b][m][j][2 * h], y = total[b][m][j][2 * h + 1];
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
  }
};

template <Mode mode, int width, int query_warps, int key_warps, int query_tiles, int stage_count,
          bool dropout = false>
__global__ void __launch_bounds__(32 * query_warps * key_warps, bias_tile(width, dropout).blocks)
    backward_bias_kernel(const __grid_constant__ BackwardBiasParams params) {
  BackwardBias<mode, width, query_warps, key_warps, query_tiles, stage_count, dropout>::run(params);
}

}  // namespace fused_ops::msa_row_attention
