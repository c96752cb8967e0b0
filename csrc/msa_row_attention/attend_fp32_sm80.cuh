// SPDX-License-Identifier: Apache-2.0
// Attention along the rows of an MSA for fp32 tensors: softmax(q k^T / sqrt(d) + bias) v, gate.
//
// A block takes queries of one row, of short rows those of two. A warp has 16 queries and walks its
// row's keys through a ring in shared memory, as in attend_sm80.cuh. Products are taken by the
// tensor cores in TF32: once, or for fp32's accuracy three times with numbers split into hi + lo.
// Tensor cores cut sums off, so after 16 numbers of a head, or 8 keys (of which all terms may have
// one sign), a sum is added to another register by an ordinary addition; the sum of the weights
// too.
//
// The order of an inner axis, and of results, is free: a lane reads 16 bytes of a key, numbers 4t
// to 4t + 3, for two steps of the product; the weights of keys 2t and 2t + 1 are used where they
// are; and a lane has neighbouring numbers of the results.
//
// An infinite number has no lo, and times a lo that is zero it makes a NaN that PyTorch does not
// make. So if there is any NaN in the end, the block does all again carefully: NaN among the
// products of a step is replaced by the product of the numbers themselves, cut off to TF32.
#pragma once

#include "common/cuda/sm80/instructions.cuh"
#include "msa_row_attention/attend_fp32_operands.cuh"
#include "msa_row_attention/config.h"
#include "msa_row_attention/dropout.cuh"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

struct AttendFp32Params {
  const float* projected = nullptr;
  const float* projection_bias = nullptr;
  const float* bias = nullptr;
  const std::uint64_t* present = nullptr;
  float* out = nullptr;
  float* log_sums = nullptr;
  float* factors = nullptr;
  unsigned rows = 0;        // of a group
  unsigned row_blocks = 0;  // of a group
  unsigned query_tiles = 0;
  unsigned heads = 0;
  int n = 0;
  int tiles = 0;   // of keys
  int words = 0;   // of a row's mask
  int blocks = 0;  // of queries, of bias
  int dim = 0;
  int width = 0;             // of all heads
  float logit_scale = 0.0f;  // log2(e) / sqrt(dim), cut off
  float logit_rest = 0.0f;   // what was; above zero, so that it makes no NaN of -inf
  float slack_scale = 0.0f;  // 1 / logit_scale
  Dropout dropout;
};

// `width`: of a head in shared memory, a multiple of 16. A block has `row_count` rows and of each
// 16 * `query_warps` queries. kSplit or kTf32.
template <Mode mode, int width, int row_count, int query_warps, int keys_of_tile, int stage_count,
          bool dropout = false>
struct AttendFp32 {
  using Operands = Fp32Operands<mode, width>;
  static constexpr bool kSplit = Operands::kSplit;
  static constexpr int kPitch = Operands::kPitch;
  static constexpr int kVector = Operands::kVector;
  static constexpr int kGroups = Operands::kGroups;
  static constexpr int kRowThreads = 32 * query_warps;
  static constexpr int kThreads = kRowThreads * row_count;
  static constexpr int kQueries = 16 * query_warps;
  static constexpr int kKeys = keys_of_tile;
  static constexpr int kStages = stage_count;  // 1: for a single tile of keys
  static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  static constexpr int kStep = 16;  // keys at a time
  static constexpr int kSteps = kKeys / kStep;
  static constexpr int kBlocks = kStep / 16;
  static constexpr int kPieces = width / 4;  // of 16 bytes
  static constexpr int kInner = width / 16;  // pairs of steps along a head
  // In registers; those of wide heads, too many, are read again each time, from the first-level
  // cache.
  static constexpr bool kKeepsQueries = width <= 64;
  // A thread has one piece of a line, of every kKeyStep-th line.
  static constexpr int kPieceRoom = kPieces <= 4 ? 4 : kPieces <= 8 ? 8 : kPieces <= 16 ? 16 : 32;
  static constexpr int kKeyStep = kRowThreads / kPieceRoom;
  static constexpr int kTileBytes = kKeys * kPitch;  // of a row's keys, or of its values
  static constexpr int kStageBytes = row_count * 2 * kTileBytes;
  static constexpr float kMinusInfinity = -__builtin_huge_valf();

  struct alignas(1024) Shared {
    unsigned char lines[kStages][row_count][2][kTileBytes];  // keys, values
  };

  using Logits = float[2 * kBlocks][4];
  struct Query {
    std::uint32_t high[2][4], low[2][4];
  };

  const AttendFp32Params& p;
  unsigned char* lines;  // of the row's keys in the first stage
  int thread;
  bool exists;       // whether there is such a row
  std::int64_t row;  // its first one if not
  int head;
  int first_query;                          // of the warp
  const float* bias;                        // the lane's numbers of the next keys
  Query query[kKeepsQueries ? kInner : 1];  // of 16 numbers of a head each
  float ahead[kBlocks][8];                  // bias of the next step
  float total[kGroups * kVector][4];
  float sums[2];   // of the weights that this lane has
  float shift[2];  // what is subtracted from each of the thread's queries' exponents
  float limit[2];  // the logit from which on it is too little
  uint2 dropout_keys[2];

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int g() const { return thread / 4 % 8; }
  __device__ __forceinline__ int t() const { return thread % 4; }
  __device__ __forceinline__ int in_row() const { return thread % kRowThreads; }
  __device__ __forceinline__ bool is_inside(int column) const {
    return width == p.dim || column < p.dim;
  }
  __device__ __forceinline__ int query_at(int h) const { return first_query + h * 8 + g(); }

  // The queries of a row and head follow each other, then the heads: they share keys and values,
  // and the lines these stand in.
  static __device__ __forceinline__ void run(const AttendFp32Params& p) {
    const int thread = sm80::opaque(thread_index());
    const int slot = thread / kRowThreads;
    unsigned block = blockIdx.x;
    const unsigned tile = block % p.query_tiles;
    block /= p.query_tiles;
    const unsigned head = block % p.heads;
    block /= p.heads;
    const unsigned group = block / p.row_blocks;
    const unsigned in_group = block % p.row_blocks * row_count + slot;
    const bool exists = in_group < p.rows;
    const std::int64_t row = std::int64_t{group} * p.rows + (exists ? in_group : 0);
    const int query = static_cast<int>(tile) * kQueries + thread % kRowThreads / 32 * 16;
    // Queries that do not exist have the last ones'.
    const std::int64_t line =
        (std::int64_t{group} * p.heads + head) * p.blocks + min(query / kBiasBlock, p.blocks - 1);
    AttendFp32{p,      shared_memory<Shared>().lines[0][slot][0],
               thread, exists,
               row,    static_cast<int>(head),
               query,  p.bias + line * p.words * (4 * kBiasNumbers) + thread % 32 * 8}
        .all();
  }

  // Of the projections of the block's head at a position of the row: query, key, value, gate.
  __device__ __forceinline__ const float* projected(int position, int which) const {
    return p.projected + (row * p.n + position) * (std::int64_t{4} * p.width) + which * p.width +
           head * p.dim;
  }

  // Which keys of a tile are there; none of a row that is not.
  __device__ __forceinline__ std::uint64_t mask_word(int tile) const {
    if (!exists || tile >= p.tiles) return 0;
    constexpr std::uint64_t kAll = ~std::uint64_t{0} >> (64 - kKeys);
    if (p.present) {
      constexpr int kOfWord = 64 / kKeys;
      return p.present[row * p.words + tile / kOfWord] >> (tile % kOfWord * kKeys) & kAll;
    }
    const int left = p.n - tile * kKeys;
    return left >= kKeys ? kAll : ~(~std::uint64_t{0} << left);
  }

  // Asks for the thread's pieces of a tile's keys and values; `key` is of its first key. Keys that
  // are not there become zeros; values are what they are, for NaN times a weight of zero is NaN in
  // PyTorch too.
  __device__ __forceinline__ void copy(const float* key, int tile, int stage,
                                       std::uint64_t present) const {
    const int piece = in_row() % kPieceRoom, first_key = in_row() / kPieceRoom;
    if (tile < p.tiles && piece < kPieces) {
      unsigned char* to = lines + stage * kStageBytes;
      present >>= first_key;
      const int left = p.n - tile * kKeys - first_key;
#pragma unroll
      for (int i = 0; i < kKeys / kKeyStep; ++i) {
        const int at = Operands::piece_at(first_key + i * kKeyStep, piece);
        const bool here = present >> (i * kKeyStep) & 1, exists_at_all = i * kKeyStep < left;
        sm80::cp_async_16(to + at, key, here && is_inside(piece * 4) ? 16 : 0);
        sm80::cp_async_16(to + kTileBytes + at, key + p.width,
                          exists_at_all && is_inside(piece * 4) ? 16 : 0);
        key += std::int64_t{4 * kKeyStep} * p.width;
      }
    }
    sm80::cp_async_commit();
  }

  __device__ __forceinline__ void all() {
    if (kKeepsQueries) {
#pragma unroll
      for (int s = 0; s < kInner; ++s) query[kKeepsQueries ? s : 0] = split_query(s);
    }
#pragma unroll
    for (int h = 0; dropout && h < 2; ++h) {
      const auto* keys = reinterpret_cast<const uint2*>(p.dropout.keys);
      dropout_keys[h] =
          query_at(h) < p.n ? keys[(row * p.heads + head) * p.n + query_at(h)] : make_uint2(0, 0);
    }
    bool any = walk<false>();
    // The barrier also stands between the last reading of shared memory and the next writing.
    if (kSplit && __syncthreads_or(exists && has_nan())) {
      thread = sm80::opaque(thread);  // else much is kept for here through the first round
      first_query = sm80::opaque(first_query);
      any = walk<kSplit>();
    }
    if (!exists) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h] += __shfl_xor_sync(0xffffffff, sums[h], 1);
      sums[h] += __shfl_xor_sync(0xffffffff, sums[h], 2);
      store(h, any);
    }
  }

  __device__ __forceinline__ bool has_nan() const {
    bool bad = false;
#pragma unroll
    for (int j = 0; j < kGroups * kVector; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) bad |= total[j][e] != total[j][e];
    }
    return bad;
  }

  // All keys. Whether there is any.
  template <bool careful>
  __device__ __forceinline__ bool walk() {
    const float* key = projected(in_row() / kPieceRoom, 1) + in_row() % kPieceRoom * 4;
    const auto next_key = [&] { key += std::int64_t{4 * kKeys} * p.width; };
    std::uint64_t present[kAhead + 1];  // of this tile and the next ones
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      present[i] = mask_word(i);
      copy(key, i, i, present[i]);
      next_key();
    }
    present[kAhead] = mask_word(kAhead);
    load_bias();
    clear();
    bool any = false;
    int stage = 0;
    for (int tile = 0; tile < p.tiles; ++tile) {
      sm80::cp_async_wait<kAhead - 1>();
      __syncthreads();
      if (kStages > 1) {
        copy(key, tile + kAhead, stage == 0 ? kStages - 1 : stage - 1, present[kAhead]);
        next_key();
      }
      std::uint64_t here = present[0];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) present[i] = present[i + 1];
      present[kAhead] = mask_word(tile + kAhead + 1);
      any |= here != 0;
      const unsigned char* keys = lines + stage * kStageBytes;
#pragma unroll 1
      for (int i = 0; i < kSteps; ++i) {
        constexpr std::uint32_t kAll = ~std::uint32_t{0} >> (32 - kStep);
        const std::uint32_t some = static_cast<std::uint32_t>(here) & kAll;
        here >>= kStep;
        const bool is_last = tile + 1 == p.tiles && i + 1 == kSteps;  // reads its own again
        bias += is_last ? 0 : kBlocks * kBiasNumbers;
        if (some != 0) {
          step<careful>(keys, some, some != kAll,
                        static_cast<unsigned>(tile * (kKeys / 2) + i * (kStep / 2)));
        } else {
          load_bias();
          const Logits zeros = {};  // for NaN among the values
          add_values<false>(zeros, keys + kTileBytes);
        }
        keys += kStep * kPitch;
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    sm80::cp_async_wait<0>();
    bias -= std::int64_t{p.tiles * kSteps - 1} * (kBlocks * kBiasNumbers);  // back at the first
    return any;
  }

  template <bool careful>
  __device__ __forceinline__ void step(const unsigned char* keys, std::uint32_t present,
                                       bool some_absent, unsigned pair) {
    Logits logits;
    multiply_keys(logits, keys);
    if (careful) repair_logits(logits, keys);
#pragma unroll
    for (int j = 0; j < 2 * kBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) logits[j][e] += ahead[j / 2][j % 2 * 4 + e];
    }
    load_bias();
    if (some_absent) remove_absent(logits, present);
    follow_largest(logits);
    weigh(logits);
    if (dropout) drop(logits, (pair + t()) * kDropoutStep);
    add_values<careful>(logits, keys + kTileBytes);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kGroups * kVector; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total[j][e] = 0.0f;
    }
    sums[0] = sums[1] = 0.0f;
    shift[0] = shift[1] = limit[0] = limit[1] = kLowest;
  }

  // Four numbers of a position; zeros where there is no such position or number.
  __device__ __forceinline__ float4 load_four(int position, int which, int column) const {
    if (position >= p.n || !is_inside(column)) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return *reinterpret_cast<const float4*>(projected(position, which) + column);
  }

  // Numbers 16s to 16s + 15 of the queries' heads, as operands of two steps.
  __device__ __forceinline__ void load_query(int s, float (&numbers)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 four = load_four(query_at(h), 0, s * 16 + t() * 4);
      numbers[0][h] = four.x;
      numbers[0][2 + h] = four.y;
      numbers[1][h] = four.z;
      numbers[1][2 + h] = four.w;
    }
  }

  __device__ __forceinline__ Query split_query(int s) const {
    float numbers[2][4];
    load_query(s, numbers);
    Query query;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) Operands::split(numbers[i][e], query.high[i][e], query.low[i][e]);
    }
    return query;
  }

  // Of the keys of a step, from global memory: no other warp of the row needs it.
  __device__ __forceinline__ void load_bias() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(bias + b * kBiasNumbers + i * 4);
        ahead[b][i * 4] = four.x;
        ahead[b][i * 4 + 1] = four.y;
        ahead[b][i * 4 + 2] = four.z;
        ahead[b][i * 4 + 3] = four.w;
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(Logits& logits, const unsigned char* keys) const {
#pragma unroll
    for (int s = 0; s < kInner; ++s) {
      const Query left = kKeepsQueries ? query[s] : split_query(s);
#pragma unroll
      for (int j = 0; j < 2 * kBlocks; ++j) {
        float numbers[4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        Operands::load_key(keys, j, s, g(), t(), numbers);
        std::uint32_t high[2][2], low[2][2];
#pragma unroll
        for (int c = 0; c < 4; ++c)
          Operands::split(numbers[c], high[c / 2][c % 2], low[c / 2][c % 2]);
        if (kSplit) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            sm80::mma_tf32(sum, left.low[i], high[i]);
            sm80::mma_tf32(sum, left.high[i], low[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) sm80::mma_tf32(sum, left.high[i], high[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) logits[j][e] = s == 0 ? sum[e] : logits[j][e] + sum[e];
      }
      __syncwarp();  // else the compiler reads far ahead, and spills
    }
  }

  __device__ __forceinline__ void repair_logits(Logits& logits, const unsigned char* keys) const {
    float sum[2 * kBlocks][4] = {};
#pragma unroll 1
    for (int s = 0; s < kInner; ++s) {
      float queries[2][4];
      load_query(s, queries);
#pragma unroll
      for (int j = 0; j < 2 * kBlocks; ++j) {
        float numbers[4];
        Operands::load_key(keys, j, s, g(), t(), numbers);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t right[2] = {__float_as_uint(numbers[2 * i]),
                                          __float_as_uint(numbers[2 * i + 1])};
          std::uint32_t left[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) left[e] = __float_as_uint(queries[i][e]);
          sm80::mma_tf32(sum[j], left, right);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2 * kBlocks; ++j) Operands::replace_nan(logits[j], sum[j]);
  }

  __device__ __forceinline__ void remove_absent(Logits& logits, std::uint32_t present) const {
    const std::uint32_t mine = present >> (2 * t());
#pragma unroll
    for (int j = 0; j < 2 * kBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!(mine >> (8 * j + e % 2) & 1)) logits[j][e] = kMinusInfinity;
      }
    }
  }

  // Subtracts another number from now on where logits have outgrown the one before.
  __device__ __forceinline__ void follow_largest(const Logits& logits) {
    float most[2];
    bool outgrown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(logits[0][2 * h], logits[0][2 * h + 1]);
#pragma unroll
      for (int j = 1; j < 2 * kBlocks; ++j) {
        x = fmaxf(x, fmaxf(logits[j][2 * h], logits[j][2 * h + 1]));
      }
      most[h] = x;
      outgrown |= x > limit[h];
    }
    if (__ballot_sync(0xffffffff, outgrown) == 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = most[h] * p.logit_scale;
      x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
      x = fmaxf(x, shift[h]);
      const float factor = sm80::exp2_approx(shift[h] - x);
      shift[h] = x;
      limit[h] = (x + kSlack) * p.slack_scale;
      sums[h] *= factor;
#pragma unroll
      for (int j = 0; j < kGroups * kVector; ++j) {
        total[j][2 * h] *= factor;
        total[j][2 * h + 1] *= factor;
      }
    }
  }

  // From logits to weights.
  __device__ __forceinline__ void weigh(Logits& logits) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 2 * kBlocks; ++j) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          float& x = logits[j][e];
          const float least = fmaf(x, p.logit_scale, -shift[h]);
          x = sm80::exp2_approx(kSplit ? fmaf(x, p.logit_rest, least) : least);
          sum += x;
        }
      }
      sums[h] += sum;
    }
  }

  // `offset` is that of the hash at the lane's first keys.
  __device__ __forceinline__ void drop(Logits& weights, std::uint32_t offset) const {
#pragma unroll
    for (int j = 0; j < 2 * kBlocks; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto numbers = dropout_numbers(dropout_keys[h], offset + j * 4 * kDropoutStep);
        // Times zero, for NaN stays what it is.
        if (!keeps_first(numbers, p.dropout.threshold)) weights[j][2 * h] *= 0.0f;
        if (!keeps_second(numbers, p.dropout.threshold)) weights[j][2 * h + 1] *= 0.0f;
      }
    }
  }

  // The weights times the values, 16 keys at a time.
  template <bool careful>
  __device__ __forceinline__ void add_values(const Logits& weights, const unsigned char* values) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      std::uint32_t left[2][4], left_low[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
          Operands::split(weights[2 * b + i][e % 2 * 2 + e / 2], left[i][e], left_low[i][e]);
        }
      }
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        float numbers[2][2][kVector];
        Operands::load_values(values + b * 16 * kPitch, j, g(), t(), numbers);
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          if (careful && c > 0) {  // again: there are too few registers to keep them
            __syncwarp();
            Operands::load_values(values + b * 16 * kPitch, j, g(), t(), numbers);
          }
          float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          std::uint32_t high[2][2], low[2][2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int k = 0; k < 2; ++k) Operands::split(numbers[i][k][c], high[i][k], low[i][k]);
          }
          float other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          Operands::multiply(sum, left[0], left_low[0], high[0], low[0]);
          Operands::multiply(kSplit ? other : sum, left[1], left_low[1], high[1], low[1]);
#pragma unroll
          for (int e = 0; e < 4 && kSplit; ++e) sum[e] += other[e];
          if (careful) repair_values(sum, weights[2 * b], weights[2 * b + 1], numbers, c);
#pragma unroll
          for (int e = 0; e < 4; ++e) total[j * kVector + c][e] += sum[e];
        }
        __syncwarp();
      }
    }
  }

  __device__ __forceinline__ void repair_values(float (&sum)[4], const float (&first)[4],
                                                const float (&second)[4],
                                                const float (&numbers)[2][2][kVector],
                                                int c) const {
    float plain[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float (&four)[4] = i == 0 ? first : second;
      const std::uint32_t left[4] = {__float_as_uint(four[0]), __float_as_uint(four[2]),
                                     __float_as_uint(four[1]), __float_as_uint(four[3])};
      const std::uint32_t right[2] = {__float_as_uint(numbers[i][0][c]),
                                      __float_as_uint(numbers[i][1][c])};
      sm80::mma_tf32(plain, left, right);
    }
    Operands::replace_nan(sum, plain);
  }

  // The result: weighted values over the sum of the weights, times the gate. Zeros where no key is
  // there.
  __device__ __forceinline__ void store(int h, bool any) const {
    const float inverse = (dropout ? p.dropout.factor : 1.0f) / sums[h];
    const int at = query_at(h);
    float* out = p.out + (row * p.n + at) * p.width + head * p.dim;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 2 * kVector; c += 4) {
        const int column = j * (8 * kVector) + t() * (2 * kVector) + c;
        if (at >= p.n || !is_inside(column)) continue;
        float gates[4], numbers[4];
        load_gate(at, column, gates);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = c + e;
          const float mean = total[j * kVector + i % kVector][2 * h + i / kVector] * inverse;
          numbers[e] = any ? mean * (1.0f / (1.0f + expf(-gates[e]))) : 0.0f;
        }
        *reinterpret_cast<float4*>(out + column) =
            make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
      }
    }
    if (p.log_sums && at < p.n && t() == 0) store_sum(h, any);
  }

  // The power of two of the sum of the weights goes with what was subtracted from their exponents,
  // the rest is a factor of the query's.
  __device__ __forceinline__ void store_sum(int h, bool any) const {
    // The sum is 2^power times a number of 1 to 2; NaN, infinity and zero make `factor` NaN.
    const std::uint32_t exponent = __float_as_uint(sums[h]) & 0x7f800000u;
    const float power = static_cast<float>(static_cast<int>(exponent >> 23) - 127);
    const float log_sum = shift[h] + power;
    // What log_sum lacks of the sum.
    const float taken = log_sum - shift[h];
    const float lost = (shift[h] - (log_sum - taken)) + (power - taken);
    const float factor = __uint_as_float(exponent) / sums[h] * exp2f(-lost);
    const std::int64_t query = (row * p.heads + head) * p.n + query_at(h);
    p.log_sums[query] = any ? log_sum : 0.0f;
    p.factors[query] = any ? factor : 0.0f;
  }

  // Four of the gate's logits of a position.
  __device__ __forceinline__ void load_gate(int at, int column, float (&gates)[4]) const {
    const float4 four = load_four(at, 3, column);
    gates[0] = four.x;
    gates[1] = four.y;
    gates[2] = four.z;
    gates[3] = four.w;
    if (p.projection_bias) {
      const float4 more =
          *reinterpret_cast<const float4*>(p.projection_bias + 3 * p.width + head * p.dim + column);
      gates[0] += more.x;
      gates[1] += more.y;
      gates[2] += more.z;
      gates[3] += more.w;
    }
  }
};

template <Mode mode, int width, int row_count, int query_warps, int keys_of_tile, int stage_count,
          bool dropout = false>
__global__ void __launch_bounds__(32 * query_warps * row_count, width <= 32 ? 3 : 2)
    attend_fp32_kernel(const __grid_constant__ AttendFp32Params params) {
  AttendFp32<mode, width, row_count, query_warps, keys_of_tile, stage_count, dropout>::run(params);
}

}  // namespace fused_ops::msa_row_attention
