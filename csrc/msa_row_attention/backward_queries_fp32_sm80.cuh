// SPDX-License-Identifier: Apache-2.0
// Gradient of queries for fp32 tensors: dq = dS k / sqrt(d), with dS = P (da v^T - D) and P the
// weights.
//
// The walk of the forward: a warp has 16 queries of one row and walks its keys. Weights come from
// the sums that attend stored, so there is no largest logit to follow.
#pragma once

#include "msa_row_attention/backward_fp32_pieces.cuh"

namespace fused_ops::msa_row_attention {

// A block has `row_count` rows and of each 16 * `query_warps` queries; keys come `lines_of_tile` at
// a time.
template <Mode mode, int width, int row_count, int query_warps, int lines_of_tile, int stage_count,
          bool dropout = false>
struct BackwardQueriesFp32 {
  static constexpr int kRowThreads = 32 * query_warps;
  static constexpr int kThreads = kRowThreads * row_count;
  static constexpr int kBlockQueries = 16 * query_warps;
  static constexpr int kLines = lines_of_tile;
  static constexpr int kStages = stage_count;  // 1: for a single tile of keys
  static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  using Product = Fp32Products<mode, width>;
  using Held = typename Product::Held;
  static constexpr int kPitch = Product::kPitch;
  static constexpr int kTileBytes = kLines * kPitch;
  static constexpr float kMinusInfinity = -__builtin_huge_valf();

  struct alignas(1024) Stage {
    unsigned char lines[row_count][2][kTileBytes];  // keys, values
  };
  struct Shared {
    Stage stages[kStages];
  };
  static constexpr int kStageBytes = sizeof(Stage);

  const BackwardFp32Params& p;
  unsigned char* lines;  // of the row's keys in the first stage
  unsigned thread;
  Place place;
  std::int64_t row;
  bool exists;
  int tiles;        // of keys
  int first_query;  // of the warp
  // The lane's numbers of the next 16 keys.
  const float* bias;

  __device__ __forceinline__ int g() const { return static_cast<int>(thread / 4 % 8); }
  __device__ __forceinline__ int t() const { return static_cast<int>(thread % 4); }
  __device__ __forceinline__ unsigned in_row() const { return thread % kRowThreads; }

  static __device__ __forceinline__ unsigned slot_of(unsigned thread) {
    return row_count == 1 ? 0 : thread / kRowThreads;
  }

  static __device__ __forceinline__ void run(const BackwardFp32Params& p) {
    const auto thread = static_cast<unsigned>(sm80::opaque(thread_index()));
    const auto at = RowTile::of<row_count>(p, slot_of(thread));
    const int first = at.tile * kBlockQueries + static_cast<int>(thread % kRowThreads / 32 * 16);
    // Queries that do not exist have the last ones'.
    const std::int64_t line = (std::int64_t{at.group} * p.heads + at.head) * p.blocks +
                              min(first / kBiasBlock, p.blocks - 1);
    BackwardQueriesFp32{
        p,
        shared_memory<Shared>().stages[0].lines[slot_of(thread)][0],
        thread,
        at.place(p),
        at.row,
        at.exists,
        static_cast<int>(ceil_div(p.n, kLines)),
        first,
        p.bias + line * p.tiles * (kKeys / kBiasBlock * kBiasNumbers) + thread % 32 * 8}
        .all();
  }

  // Which keys of a tile are there.
  __device__ __forceinline__ std::uint64_t mask_word(int tile) const {
    if (!exists || tile >= tiles) return 0;
    constexpr int kOfWord = kKeys / kLines;
    constexpr std::uint64_t kAll = ~std::uint64_t{0} >> (64 - kLines);
    return p.mask_word(row, tile / kOfWord) >> (tile % kOfWord * kLines) & kAll;
  }

  // Asks for the keys and values of a tile; zeros for those that are not there.
  __device__ __forceinline__ void copy(int tile, int stage, std::uint64_t here) const {
    if (here != 0) {
      unsigned char* to = lines + stage * kStageBytes;
      const float* from = p.projected + place.projected(tile * kLines, 1);
      Product::template copy<kRowThreads, kLines>(to, from, 4 * p.width, p.dim, in_row(), here);
      Product::template copy<kRowThreads, kLines>(to + kTileBytes, from + p.width, 4 * p.width,
                                                  p.dim, in_row(), here);
    }
    sm80::cp_async_commit();
  }

  float ahead[2][4];  // bias
  Held query, gradient;
  typename Product::Sums d_query;
  float log_sums[2];
  float row_dots[2];
  uint2 dropout_keys[2];

  __device__ __forceinline__ void load_bias() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 four = *reinterpret_cast<const float4*>(bias + j * 4);
      ahead[j][0] = four.x;
      ahead[j][1] = four.y;
      ahead[j][2] = four.z;
      ahead[j][3] = four.w;
    }
  }

  __device__ __forceinline__ Fp32Rows queries() const {
    return {p.projected + place.projected(first_query, 0), 4 * p.width, p.n - first_query, p.dim};
  }
  __device__ __forceinline__ Fp32Rows gradients() const {
    return {p.d_attended + place.attended(first_query), p.width, p.n - first_query, p.dim};
  }

  __device__ __forceinline__ void all() {
    std::uint64_t words[kAhead + 1];  // of this tile and the next ones
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      words[i] = mask_word(i);
      copy(i, i, words[i]);
    }
    words[kAhead] = mask_word(kAhead);
    load_bias();
    const int operand_row[2] = {g(), g() + 8};
    query.load(queries(), operand_row, t());
    gradient.load(gradients(), operand_row, t());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = first_query + h * 8 + g();
      log_sums[h] = at < p.n ? p.log_sums[place.statistic(at)] : 0.0f;
      row_dots[h] = at < p.n ? p.row_dots[place.statistic(at)] : 0.0f;
      if (dropout) {
        const auto* keys = reinterpret_cast<const uint2*>(p.dropout.keys);
        dropout_keys[h] = at < p.n ? keys[place.statistic(at)] : make_uint2(0, 0);
      }
    }
    Product::clear(d_query);
    int stage = 0;
    for (int tile = 0; tile < tiles; ++tile) {
      sm80::cp_async_wait<kAhead - 1>();
      __syncthreads();
      if (kStages > 1) {
        copy(tile + kAhead, stage == 0 ? kStages - 1 : stage - 1, words[kAhead]);
      }
      std::uint64_t here = words[0];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) words[i] = words[i + 1];
      words[kAhead] = mask_word(tile + kAhead + 1);
      const unsigned char* keys = lines + stage * kStageBytes;
#pragma unroll 1
      for (int i = 0; i < kLines / 16; ++i) {
        // The last one again behind it.
        bias += i + 1 < kLines / 16 || tile + 1 < tiles ? kBiasNumbers : 0;
        const std::uint32_t some = static_cast<std::uint32_t>(here) & 0xffff;
        if (some != 0) {
          step(keys, some, static_cast<unsigned>(tile * (kLines / 2) + i * 8));
        } else {
          load_bias();
        }
        keys += 16 * kPitch;
        here >>= 16;
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    sm80::cp_async_wait<0>();
    if (exists) store();
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = first_query + h * 8 + g();
      if (at >= p.n) continue;
      Product::store(p.d_projected + place.projected(at, 0), d_query, h, p.scale, true, p.dim, t());
    }
  }

  // 16 keys, of which those of `some` are there.
  __device__ __forceinline__ void step(const unsigned char* keys, std::uint32_t some,
                                       unsigned pair) {
    typename Product::Weights weights, gradients_;
    const int row[2] = {g(), g() + 8};
    Product::template multiply<false>(
        weights, [&](int s) { return query.at(s, queries(), row, t()); }, keys, g(), t());
    Product::template multiply<false>(
        gradients_, [&](int s) { return gradient.at(s, gradients(), row, t()); }, keys + kTileBytes,
        g(), t());
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[j][e] += ahead[j][e];
    }
    load_bias();
    if (some != 0xffff) remove_absent(weights, some);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int h = 0; dropout && h < 2; ++h) {
        const auto numbers = dropout_numbers(dropout_keys[h], (pair + j * 4 + t()) * kDropoutStep);
        if (!keeps_first(numbers, p.dropout.threshold)) gradients_[j][2 * h] = 0.0f;
        if (!keeps_second(numbers, p.dropout.threshold)) gradients_[j][2 * h + 1] = 0.0f;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = p.weight<mode>(weights[j][e], log_sums[e / 2]);
        gradients_[j][e] = weight * (gradients_[j][e] - row_dots[e / 2]);
      }
    }
    Product::template add<false>(d_query, gradients_, keys, g(), t());
  }

  __device__ __forceinline__ void remove_absent(typename Product::Weights& weights,
                                                std::uint32_t some) const {
    const std::uint32_t mine = some >> (2 * t());
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!(mine >> (8 * j + e % 2) & 1)) weights[j][e] = kMinusInfinity;
      }
    }
  }
};

template <Mode mode, int width, int row_count, int query_warps, int lines_of_tile, int stage_count,
          bool dropout = false>
__global__ void __launch_bounds__(32 * query_warps * row_count, width <= 32 ? 3 : 2)
    backward_queries_fp32_kernel(const __grid_constant__ BackwardFp32Params params) {
  BackwardQueriesFp32<mode, width, row_count, query_warps, lines_of_tile, stage_count,
                      dropout>::run(params);
}

}  // namespace fused_ops::msa_row_attention
