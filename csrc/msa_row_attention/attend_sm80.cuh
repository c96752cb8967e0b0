// SPDX-License-Identifier: Apache-2.0
// Attention along the rows of an MSA, in 16-bit products: softmax(q k^T / sqrt(d) + bias) v, gate.
//
// A block takes the same queries of a few rows, because these share the bias. A warp has 32 queries
// (16 of wide heads) of one row and walks its keys, 64 at a time through a ring in shared memory,
// 16 at a time through registers. Logits stay in units of q k^T: the bias, stored times sqrt(d), is
// what the products are added to. What is subtracted before the exponential follows the largest
// logit only when it grew by more than 2^kSlack; the sum of the weights is one more column of the
// product with v.
#pragma once

#include "msa_row_attention/dropout.cuh"
#include "msa_row_attention/lines.cuh"

namespace fused_ops::msa_row_attention {

struct AttendParams {
  const std::uint16_t* projected = nullptr;
  const void* bias = nullptr;
  const std::uint64_t* present = nullptr;
  std::uint16_t* out = nullptr;
  float* log_sums = nullptr;
  unsigned rows = 0;        // of a group
  unsigned row_blocks = 0;  // of a group
  unsigned query_tiles = 0;
  unsigned heads = 0;
  int n = 0;
  unsigned tiles = 0;  // of keys
  int blocks = 0;      // of queries, of bias
  int dim = 0;
  int width = 0;             // of all heads
  float logit_scale = 0.0f;  // log2(e) / sqrt(dim)
  float slack_scale = 0.0f;  // 1 / logit_scale
  Dropout dropout;
};

// `width`: of a head in shared memory, a multiple of 16. A block has `row_count` rows and of each
// 16 * `query_tiles` * `query_warps` queries; the bias is asked for `bias_ahead` steps ahead.
template <Mode mode, int width, int row_count, int query_warps, int query_tiles, int stage_count,
          int bias_ahead, bool dropout>
struct Attend {
  static constexpr int kRowThreads = 32 * query_warps;
  static constexpr int kThreads = kRowThreads * row_count;
  static constexpr int kM = query_tiles;  // of 16 queries, of a warp
  static constexpr int kQueries = 16 * kM * query_warps;
  static constexpr int kStages = stage_count;  // 1: for a single tile of keys
  static_assert(kStages == 1 || kStages == 2);
  static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  using Line = Lines<width>;  // of keys and values in shared memory
  static constexpr int kPitch = Line::kPitch;
  static constexpr int kSteps = width / 16;
  static constexpr int kTiles = width / 8;  // of results
  static constexpr int kStep = 16;          // keys at a time
  static constexpr int kTileSteps = kKeys / kStep;
  // A step, so that its numbers arrive while the one before is worked on, or a tile.
  static constexpr bool kTileAhead = bias_ahead == kTileSteps;
  static_assert(kTileAhead || bias_ahead == 1);
  static constexpr float kMinusInfinity = -__builtin_huge_valf();
  // A thread has one piece of a line, of every kKeyStep-th line.
  static constexpr int kPieceRoom = Line::kPieceRoom;
  static constexpr int kKeyStep = kRowThreads / kPieceRoom;
  static_assert(Line::repeats_after(kKeyStep));

  static constexpr int kStageBytes = row_count * 2 * kKeys * kPitch;
  static constexpr int kTileBytes = kKeys * kPitch;  // of a row's keys, or of its values

  struct alignas(1024) Shared {
    unsigned char lines[kStages][row_count][2][kTileBytes];  // keys, values
  };

  static constexpr int kTileBlocks = kKeys / kBiasBlock;

  static __device__ __forceinline__ unsigned piece_at(unsigned key, unsigned piece) {
    return Line::piece_at(key, piece);
  }

  const AttendParams& p;
  // Of the row's keys in the first stage: a number, else the compiler looks for it at each use.
  sm80::SharedAddress lines;
  unsigned thread;  // not signed: cheaper to divide
  bool exists;      // whether there is such a row
  unsigned row;     // its first one if not
  int head;
  int first_query;
  // The lane's numbers of the first keys, of the warp's first 16 queries; those of the next ones
  // are so much further.
  const uint4* bias;
  unsigned bias_line;

  __device__ __forceinline__ unsigned lane() const { return thread % 32; }
  __device__ __forceinline__ unsigned in_row() const {
    return row_count == 1 ? thread : thread % kRowThreads;
  }
  // The warp's first query in the tile.
  __device__ __forceinline__ int warp_query() const { return in_row() / 32 * (16 * kM); }
  __device__ __forceinline__ bool is_inside(int column) const {
    return width == p.dim || column < p.dim;
  }

  // The queries of a row and head follow each other, then the heads: they share keys and values,
  // and the lines these stand in.
  static __device__ __forceinline__ void run(const AttendParams& p) {
    const unsigned index = thread_index();  // by a detour, else it is read again and again
    const unsigned thread = __shfl_sync(0xffffffff, index, index % 32);
    const unsigned slot = row_count == 1 ? 0 : thread / kRowThreads;
    unsigned block = blockIdx.x;
    const unsigned tile = block % p.query_tiles;
    block /= p.query_tiles;
    const unsigned head = block % p.heads;
    block /= p.heads;
    const unsigned group = block / p.row_blocks;
    const unsigned in_group = block % p.row_blocks * row_count + slot;
    const bool exists = row_count == 1 || in_group < p.rows;
    const unsigned row = group * p.rows + (exists ? in_group : 0);
    const int first_query = static_cast<int>(tile) * kQueries;
    const int query_block = first_query / kBiasBlock + thread % kRowThreads / 32 * kM;
    // Queries that do not exist have the last ones'.
    const std::int64_t block_line =
        (std::int64_t{group} * p.heads + head) * p.blocks + min(query_block, p.blocks - 1);
    const unsigned bias_line = p.tiles * (kTileBlocks * 32);
    Attend{p,
           static_cast<sm80::SharedAddress>(
               sm80::opaque(sm80::shared_address(shared_memory<Shared>().lines[0][slot]))),
           thread,
           exists,
           row,
           static_cast<int>(head),
           first_query,
           static_cast<const uint4*>(p.bias) + block_line * bias_line + thread % 32,
           query_block + 1 < p.blocks ? bias_line : 0}
        .all();
  }

  // Of the projections of the block's head at a position of the row: query, key, value, gate.
  __device__ __forceinline__ const std::uint16_t* projected(int position, int which) const {
    return p.projected + (std::int64_t{row} * p.n + position) * (std::int64_t{4} * p.width) +
           which * p.width + head * p.dim;
  }

  // Which keys of a tile are there; none of a row that is not.
  __device__ __forceinline__ std::uint64_t mask_word(unsigned tile) const {
    if (!exists || tile >= p.tiles) return 0;
    if (p.present) return p.present[std::int64_t{row} * p.tiles + tile];
    return tile + 1 < p.tiles ? ~std::uint64_t{0} : ~std::uint64_t{0} >> (-p.n & (kKeys - 1));
  }

  // Asks for the keys and values of a tile. Zeros for keys that are not there; but values are what
  // they are, for NaN times a weight of zero is NaN in PyTorch too. `key` is the thread's piece of
  // its first key.
  __device__ __forceinline__ void copy(const std::uint16_t* key, unsigned tile,
                                       std::uint64_t present) const {
    const int column = static_cast<int>(in_row() % kPieceRoom * 8);
    const unsigned first_key = in_row() / kPieceRoom;
    if (tile < p.tiles && column < width) {
      const auto to = lines + tile % kStages * kStageBytes + piece_at(first_key, column / 8);
      const bool all = present == ~std::uint64_t{0};
      present >>= first_key;
      const int left = p.n - static_cast<int>(tile * kKeys + first_key);
#pragma unroll
      for (int i = 0; i < kKeys / kKeyStep; ++i) {
        // Lines kKeyStep apart have their pieces in the same order.
        const auto line = to + i * kKeyStep * kPitch;
        const bool here = all || (present >> (i * kKeyStep) & 1);
        const bool exists_at_all = all || i * kKeyStep < left;
        sm80::cp_async_16(line, key, here && is_inside(column) ? 16 : 0);
        sm80::cp_async_16(line + kTileBytes, key + p.width,
                          exists_at_all && is_inside(column) ? 16 : 0);
        key += 4 * kKeyStep * p.width;
      }
    }
    sm80::cp_async_commit();
  }

  // Whether all of the block's queries exist, and a head fills its width: without a question at
  // every access the beginning and the end are half as long.
  __device__ __forceinline__ bool is_whole() const {
    return width == p.dim && first_query + kQueries <= p.n;
  }

  // Two numbers of a position, as a word; zeros where there is no such position or number.
  template <bool whole>
  __device__ __forceinline__ std::uint32_t load_two(const std::uint16_t* line, bool here,
                                                    int column) const {
    if (!whole && !(here && is_inside(column))) return 0;
    return *reinterpret_cast<const std::uint32_t*>(line + column);
  }

  using Logits = float[kM][kStep / 8][4];

  uint4 ahead[kTileAhead ? kTileSteps : 2][kM][kStep / kBiasBlock];  // bias of these steps
  std::uint32_t query[kM][kSteps][4];
  float total[kM][kTiles][4];
  float sums[kM][4];   // of the weights; columns are equal
  float shift[kM][2];  // what is subtracted from each of the thread's queries' exponents
  float limit[kM][2];  // the logit from which on it is too little
  uint2 dropout_keys[dropout ? kM : 1][2];

  __device__ __forceinline__ void all() {
    const std::uint16_t* key = projected(in_row() / kPieceRoom, 1) + in_row() % kPieceRoom * 8;
    const auto next_key = [&] { key += std::int64_t{4 * kKeys} * p.width; };
    std::uint64_t present[kAhead + 1];  // of this tile and the next ones
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      present[i] = mask_word(i);
      copy(key, i, present[i]);
      next_key();
    }
    present[kAhead] = mask_word(kAhead);
#pragma unroll
    for (int i = 0; i < bias_ahead; ++i) load_bias(i);
    is_whole() ? load_queries<true>() : load_queries<false>();
    if (dropout) load_dropout_keys();
    clear();
    bool any = false;
    for (unsigned tile = 0; tile < p.tiles; ++tile) {
      sm80::cp_async_wait<kAhead - 1>();
      __syncthreads();
      if (kStages > 1) {
        copy(key, tile + kAhead, present[kAhead]);
        next_key();
      }
      const std::uint64_t here = present[0];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) present[i] = present[i + 1];
      present[kAhead] = mask_word(tile + kAhead + 1);
      const auto keys = lines + tile % kStages * kStageBytes;
      const auto to_next_tile_of_bias = [&] {  // stays at the last one
        if (tile + 1 < p.tiles) bias += kTileBlocks * 32;
      };
      // In one place: asked for where it is needed, heads of 64 spill within the loop.
      const auto load_next_bias = [&](int step) {
        if (kTileAhead) {  // asked for where the one before it has been used
          if (step == 1) to_next_tile_of_bias();
          return;
        }
        if (step == kTileSteps) {
          to_next_tile_of_bias();
          step = 0;
        }
        load_bias(step);
      };
      if (here != 0) {
        any = true;
#pragma unroll
        for (int i = 0; i < kTileSteps; ++i) {
          constexpr std::uint64_t kAll = ~std::uint64_t{0} >> (64 - kStep);
          const std::uint64_t some = here >> (i * kStep) & kAll;
          load_next_bias(i + 1);
          Logits logits;
          start_with_bias(logits, i);
          if (kTileAhead) load_bias(i);
          multiply_keys(logits, keys + i * kStep * kPitch);
          if (some != kAll) remove_absent(logits, some);
          follow_largest(logits);
          add_values(logits, keys + kTileBytes + i * kStep * kPitch,
                     (tile * (kKeys / 2) + lane() % 4 + i * (kStep / 2)) * kDropoutStep);
        }
      } else {
        load_next_bias(kTileAhead ? 1 : kTileSteps);
        if (kTileAhead) {
#pragma unroll
          for (int i = 0; i < kTileSteps; ++i) load_bias(i);
        }
        add_nothing(keys + kTileBytes);
      }
    }
    sm80::cp_async_wait<0>();
    if (!exists) return;
    is_whole() ? store<true>(any) : store<false>(any);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][e] = 0.0f;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) total[m][j][e] = 0.0f;
      }
      shift[m][0] = shift[m][1] = kLowest;
      limit[m][0] = limit[m][1] = kLowest;
    }
  }

  template <bool whole>
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint16_t* line = projected(query_at(m, h), 0);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = s * 16 + i * 8 + lane() % 4 * 2;
            query[m][s][i * 2 + h] = load_two<whole>(line, query_at(m, h) < p.n, column);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void load_dropout_keys() {
#pragma unroll
    for (int m = 0; m < (dropout ? kM : 1); ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = query_at(m, h);
        const auto* keys = reinterpret_cast<const uint2*>(p.dropout.keys);
        dropout_keys[m][h] =
            at < p.n ? keys[(std::int64_t{row} * p.heads + head) * p.n + at] : make_uint2(0, 0);
      }
    }
  }

  // The position of one of the thread's queries.
  __device__ __forceinline__ int query_at(int m, int h) const {
    return first_query + warp_query() + m * 16 + h * 8 + lane() / 4;
  }

  // Where the bias of a step is kept.
  static constexpr int bias_at(int step) { return step % (kTileAhead ? kTileSteps : 2); }

  // Of the keys of a step of the tile that `bias` points to, from global memory: no other warp of
  // the row needs it, and what another row has read is in the first-level cache.
  __device__ __forceinline__ void load_bias(int step) {
#pragma unroll
    for (int b = 0; b < kStep / kBiasBlock; ++b) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ahead[bias_at(step)][m][b] = (bias + m * bias_line)[(step * (kStep / kBiasBlock) + b) * 32];
      }
    }
  }

  __device__ __forceinline__ void start_with_bias(Logits& logits, int step) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int b = 0; b < kStep / kBiasBlock; ++b) {
        const uint4& four = ahead[bias_at(step)][m][b];
        const std::uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = unpack_16<mode>(words[i]);
          logits[m][2 * b + i / 2][i % 2 * 2] = two.x;
          logits[m][2 * b + i / 2][i % 2 * 2 + 1] = two.y;
        }
      }
    }
  }

  static __device__ __forceinline__ sm80::SharedAddress further(sm80::SharedAddress at,
                                                                int pieces) {
    return Line::further(at, pieces);
  }

  __device__ __forceinline__ void multiply_keys(Logits& logits, sm80::SharedAddress keys) const {
    const unsigned l = lane();
    keys += piece_at(l / 16 * 8 + l % 8, l / 8 % 2);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int b = 0; b < kStep / 16; ++b) {
        // Matrices of 8 keys by 8 numbers: two of the first keys, two of the next.
        std::uint32_t four[4];
        sm80::ldmatrix_x4(four, further(keys, 2 * s) + b * 16 * kPitch);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const std::uint32_t right[2] = {four[2 * j], four[2 * j + 1]};
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            multiply_16<mode>(logits[m][2 * b + j], query[m][s], right);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void remove_absent(Logits& logits, std::uint64_t present) const {
    const std::uint64_t mine = present >> (2 * (lane() % 4));
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool there = mine >> (8 * j + e % 2) & 1;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if (!there) logits[m][j][e] = kMinusInfinity;
        }
      }
    }
  }

  // Subtracts another number from now on where logits have outgrown the one before.
  __device__ __forceinline__ void follow_largest(const Logits& logits) {
    float most[kM][2];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = fmaxf(logits[m][0][2 * h], logits[m][0][2 * h + 1]);
#pragma unroll
        for (int j = 1; j < kStep / 8; ++j) {
          x = fmaxf(x, fmaxf(logits[m][j][2 * h], logits[m][j][2 * h + 1]));
        }
        most[m][h] = x;
        outgrown |= x > limit[m][h];
      }
    }
    if (__ballot_sync(0xffffffff, outgrown) == 0) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = most[m][h] * p.logit_scale;
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
        x = fmaxf(x, shift[m][h]);
        const float factor = sm80::exp2_approx(shift[m][h] - x);
        shift[m][h] = x;
        limit[m][h] = (x + kSlack) * p.slack_scale;
        sums[m][2 * h] *= factor;
        sums[m][2 * h + 1] *= factor;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          total[m][j][2 * h] *= factor;
          total[m][j][2 * h + 1] *= factor;
        }
      }
    }
  }

  __device__ __forceinline__ float weight(float logit, int m, int h) const {
    return sm80::exp2_approx(fmaf(logit, p.logit_scale, -shift[m][h]));
  }

  // The weights, and these times the values. What is dropped counts in the sum of the weights.
  // `offset` is that of the hash at the thread's first keys.
  __device__ __forceinline__ void add_values(const Logits& logits, sm80::SharedAddress values,
                                             std::uint32_t offset) {
    constexpr std::uint32_t kOnes = mode == Mode::kBFloat16 ? 0x3f803f80u : 0x3c003c00u;
    const std::uint32_t ones[2] = {kOnes, kOnes};
    const unsigned l = lane();
    values += piece_at(l % 16, l / 16);
#pragma unroll
    for (int b = 0; b < kStep / 16; ++b) {
      std::uint32_t weights[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&four)[4] = logits[m][2 * b + i / 2];
          const int h = i % 2;
          weights[m][i] = pack_16<mode>(weight(four[2 * h], m, h), weight(four[2 * h + 1], m, h));
        }
        multiply_16<mode>(sums[m], weights[m], ones);
#pragma unroll
        for (int i = 0; dropout && i < 4; ++i) {
          const auto numbers = dropout_numbers(dropout_keys[dropout ? m : 0][i % 2],
                                               offset + (b * 8 + i / 2 * 4) * kDropoutStep);
          weights[m][i] = kept_of(weights[m][i], numbers, p.dropout.threshold);
        }
      }
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        std::uint32_t four[4];
        sm80::ldmatrix_x4_trans(four, further(values, j) + b * 16 * kPitch);
        const std::uint32_t left[2] = {four[0], four[1]}, right[2] = {four[2], four[3]};
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply_16<mode>(total[m][j], weights[m], left);
          multiply_16<mode>(total[m][j + 1], weights[m], right);
        }
      }
    }
  }

  // The values of a tile times weights of zero, for NaN among them.
  __device__ __forceinline__ void add_nothing(sm80::SharedAddress values) {
    const std::uint32_t zeros[4] = {};
    const unsigned l = lane();
    values += piece_at(l % 16, l / 16);
#pragma unroll 1
    for (int b = 0; b < kKeys / 16; ++b) {
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        std::uint32_t four[4];
        sm80::ldmatrix_x4_trans(four, further(values, j) + b * 16 * kPitch);
        const std::uint32_t left[2] = {four[0], four[1]}, right[2] = {four[2], four[3]};
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply_16<mode>(total[m][j], zeros, left);
          multiply_16<mode>(total[m][j + 1], zeros, right);
        }
      }
    }
  }

  // Weighted values over the sum of the weights, times the gate. Zeros where no key is there. And
  // what the backward needs to have the weights again.
  template <bool whole>
  __device__ __forceinline__ void store(bool any) const {
    std::uint32_t gates[kM][2][kTiles];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint16_t* line = projected(query_at(m, h), 3);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          gates[m][h][j] = load_two<whole>(line, query_at(m, h) < p.n, j * 8 + lane() % 4 * 2);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = query_at(m, h);
        float inverse = sm80::reciprocal_approx(sums[m][2 * h]);
        if (dropout) inverse *= p.dropout.factor;
        std::uint16_t* out = p.out + (std::int64_t{row} * p.n + at) * p.width + head * p.dim;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const int column = j * 8 + lane() % 4 * 2;
          const float2 gate = unpack_16<mode>(gates[m][h][j]);
          const float x = total[m][j][2 * h] * inverse * sigmoid(gate.x);
          const float y = total[m][j][2 * h + 1] * inverse * sigmoid(gate.y);
          if (!whole && (at >= p.n || !is_inside(column))) continue;
          *reinterpret_cast<std::uint32_t*>(out + column) = any ? pack_16<mode>(x, y) : 0;
        }
        if (p.log_sums && lane() % 4 == 0 && (whole || at < p.n)) {
          p.log_sums[(std::int64_t{row} * p.heads + head) * p.n + at] =
              any ? shift[m][h] + __log2f(sums[m][2 * h]) : 0.0f;
        }
      }
    }
  }
};

// At least 16 warps on a multiprocessor where a head is narrow; else registers come first.
template <Mode mode, int width, int row_count, int query_warps, int query_tiles, int stage_count,
          int bias_ahead, bool dropout>
__global__ void __launch_bounds__(32 * query_warps * row_count,
                                  attend_threads(width, query_tiles, dropout) /
                                      (32 * query_warps * row_count))
    attend_kernel(const __grid_constant__ AttendParams params) {
  Attend<mode, width, row_count, query_warps, query_tiles, stage_count, bias_ahead, dropout>::run(
      params);
}

}  // namespace fused_ops::msa_row_attention
