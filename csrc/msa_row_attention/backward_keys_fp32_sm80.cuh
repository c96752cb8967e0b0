// SPDX-License-Identifier: Apache-2.0
// Gradients of keys and values for fp32 tensors: dv = P^T da, dk = dS^T q / sqrt(d), with P the
// weights and dS = P (da v^T - D).
//
// As in backward_keys_sm80.cuh, a warp has keys of one row, 16 of them, and walks the queries;
// logits come out as S^T = k q^T, and P^T and dS^T are at once the left operands of the next
// products. The bias needs no transposition: which key is which row of an operand is free, and with
// keys 2g and 2g + 1 as rows g and g + 8 a lane's 16 bytes of the bias, of two queries 8 apart, are
// what it adds to its results.
#pragma once

#include "msa_row_attention/backward_fp32_pieces.cuh"

namespace fused_ops::msa_row_attention {

// A block has `row_count` rows and of each 16 * `key_warps` keys; queries come `lines_of_tile` at a
// time.
template <Mode mode, int width, int row_count, int key_warps, int lines_of_tile, int stage_count,
          bool dropout = false>
struct BackwardKeysFp32 {
  static constexpr int kRowThreads = 32 * key_warps;
  static constexpr int kThreads = kRowThreads * row_count;
  static constexpr int kBlockKeys = 16 * key_warps;
  static constexpr int kLines = lines_of_tile;
  static constexpr int kStages = stage_count;  // 1: for a single tile of queries
  static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  using Product = Fp32Products<mode, width>;
  using Held = typename Product::Held;
  static constexpr int kPitch = Product::kPitch;
  static constexpr int kTileBytes = kLines * kPitch;
  static_assert(kBlockKeys <= kKeys && kKeys % kBlockKeys == 0);

  struct alignas(1024) PlainStage {
    unsigned char lines[row_count][2][kTileBytes];  // queries, gradients
    float statistics[row_count][kLines / 2][4];     // of two queries: log_sums, row_dots
  };
  struct DropoutStage : PlainStage {
    uint2 dropout_keys[row_count][kLines];
  };
  using Stage = std::conditional_t<dropout, DropoutStage, PlainStage>;
  struct Shared {
    Stage stages[kStages];
  };
  static constexpr int kStageBytes = sizeof(Stage);

  const BackwardFp32Params& p;
  unsigned char* lines;  // of the row's queries in the first stage
  unsigned char* statistics;
  unsigned thread;
  Place place;
  bool wanted;  // whether any of the row's keys in this block is there
  int tiles;    // of queries
  // The lane's numbers of the next 16 queries.
  const float* bias;

  __device__ __forceinline__ int g() const { return static_cast<int>(thread / 4 % 8); }
  __device__ __forceinline__ int t() const { return static_cast<int>(thread % 4); }
  __device__ __forceinline__ unsigned in_row() const { return thread % kRowThreads; }

  static __device__ __forceinline__ unsigned slot_of(unsigned thread) {
    return row_count == 1 ? 0 : thread / kRowThreads;
  }
  // The warp's first one.
  static __device__ __forceinline__ int first_key(const RowTile& at, unsigned thread) {
    return at.tile * kBlockKeys + static_cast<int>(thread % kRowThreads / 32 * 16);
  }
  // Which of the warp's keys are there.
  static __device__ __forceinline__ std::uint32_t present(const BackwardParams& p,
                                                          const RowTile& at, int first) {
    if (!at.exists) return 0;
    const std::uint64_t word = p.mask_word(at.row, first / kKeys) >> (first % kKeys);
    return static_cast<std::uint32_t>(word) & 0xffff;
  }

  static __device__ __forceinline__ void run(const BackwardFp32Params& p) {
    const auto thread = static_cast<unsigned>(sm80::opaque(thread_index()));
    const auto at = RowTile::of<row_count>(p, slot_of(thread));
    const int block_key = at.tile * kBlockKeys;
    const std::uint64_t any = p.mask_word(at.row, block_key / kKeys) >> (block_key % kKeys) &
                              ~std::uint64_t{0} >> (64 - kBlockKeys);
    const std::int64_t head = std::int64_t{at.group} * p.heads + at.head;
    const unsigned lane = thread % 32, pair = lane / 4;
    // Queries 2t and 2t + 8, keys 2g and 2g + 1.
    const int piece = first_key(at, thread) / kBiasBlock * kBiasNumbers +
                      static_cast<int>(lane % 4 * 64 + pair % 4 * 8 + pair / 4 * 4);
    Stage& first = shared_memory<Shared>().stages[0];
    BackwardKeysFp32{p,
                     first.lines[slot_of(thread)][0],
                     reinterpret_cast<unsigned char*>(first.statistics[slot_of(thread)]),
                     thread,
                     at.place(p),
                     at.exists && any != 0,
                     static_cast<int>(ceil_div(p.n, kLines)),
                     p.bias + head * p.blocks * line_of_bias(p) + piece}
        .all(at);
  }

  // Of 16 queries and all keys.
  static __device__ __forceinline__ std::int64_t line_of_bias(const BackwardParams& p) {
    return std::int64_t{p.tiles} * (kKeys / kBiasBlock * kBiasNumbers);
  }

  // Asks for a tile of queries and what belongs to them; zeros for those that do not exist. With
  // these and a bias of zero their weights are one, times zero.
  __device__ __forceinline__ void copy(int tile, int stage) const {
    if (wanted && tile < tiles) {
      const int first = tile * kLines, left = p.n - first;
      unsigned char* to = lines + stage * kStageBytes;
      const std::uint64_t here = Product::first_lines(left);
      Product::template copy<kRowThreads, kLines>(to, p.projected + place.projected(first, 0),
                                                  4 * p.width, p.dim, in_row(), here);
      Product::template copy<kRowThreads, kLines>(
          to + kTileBytes, p.d_attended + place.attended(first), p.width, p.dim, in_row(), here);
#pragma unroll
      for (int i = 0; i < 2 * kLines; i += kRowThreads) {
        const unsigned number = in_row() + i, which = number / kLines, query = number % kLines;
        if (2 * kLines % kRowThreads != 0 && which > 1) break;
        sm80::cp_async_4(
            statistics + stage * kStageBytes + query / 2 * 16 + query % 2 * 4 + which * 8,
            (which == 0 ? p.log_sums : p.row_dots) + place.statistic(first) + query,
            static_cast<int>(query) < left ? 4 : 0);
        if (dropout) {  // as many words
          const auto* words =
              reinterpret_cast<const std::uint32_t*>(p.dropout.keys + place.statistic(first));
          sm80::cp_async_4(dropout_keys(stage) + number * 4, words + number,
                           static_cast<int>(number / 2) < left ? 4 : 0);
        }
      }
    }
    sm80::cp_async_commit();
  }

  // Of the row's queries in a stage.
  __device__ __forceinline__ unsigned char* dropout_keys(int stage) const {
    return lines + stage * kStageBytes - slot_of(thread) * (2 * kTileBytes) + sizeof(PlainStage) +
           slot_of(thread) * (kLines * 8);
  }

  float ahead[2][4];  // bias
  Held key, value;
  typename Product::Sums d_key, d_value;

  __device__ __forceinline__ void load_bias() {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float4 four = *reinterpret_cast<const float4*>(bias + e * 32);
      ahead[e][0] = four.x;
      ahead[e][1] = four.y;
      ahead[e][2] = four.z;
      ahead[e][3] = four.w;
    }
  }

  // Of keys, or of values.
  __device__ __forceinline__ Fp32Rows rows(int first, unsigned which) const {
    return {p.projected + place.projected(first, which), 4 * p.width, p.n - first, p.dim};
  }

  __device__ __forceinline__ void all(const RowTile& at) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy(i, i);
    const int first = first_key(at, thread);
    const bool any = present(p, at, first) != 0;
    if (any) {
      load_bias();
      const int row[2] = {2 * g(), 2 * g() + 1};
      key.load(rows(first, 1), row, t());
      value.load(rows(first, 2), row, t());
    }
    Product::clear(d_key);
    Product::clear(d_value);
    int stage = 0;
    for (int tile = 0; tile < tiles; ++tile) {
      sm80::cp_async_wait<kAhead - 1>();
      __syncthreads();
      if (kStages > 1) copy(tile + kAhead, stage == 0 ? kStages - 1 : stage - 1);
      if (any) {
        const unsigned char* queries = lines + stage * kStageBytes;
        const unsigned char* numbers = statistics + stage * kStageBytes + t() * 16;
#pragma unroll 1
        for (int i = tile * (kLines / 16); i < (tile + 1) * (kLines / 16) && i < p.blocks; ++i) {
          if (i + 1 < p.blocks) bias += line_of_bias(p);
          step(queries, numbers, first,
               dropout_keys(stage) + (i - tile * (kLines / 16)) * 128 + t() * 16);
          queries += 16 * kPitch;
          numbers += 16 * 8;
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    sm80::cp_async_wait<0>();
    store();
  }

  __device__ __forceinline__ void store() const {
    const auto at = RowTile::of<row_count>(p, slot_of(thread));
    if (!at.exists) return;
    const int first = first_key(at, thread);
    const std::uint32_t here = present(p, at, first);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 2 * g() + h;
      if (first + row >= p.n) continue;
      const bool there = here >> row & 1;
      float* to = p.d_projected + at.place(p).projected(first + row, 1);
      Product::store(to, d_key, h, p.scale, there, p.dim, t());
      Product::store(to + p.width, d_value, h, dropout ? p.dropout.factor : 1.0f, there, p.dim,
                     t());
    }
  }

  // 16 queries.
  __device__ __forceinline__ void step(const unsigned char* queries, const unsigned char* numbers,
                                       int first, const unsigned char* hashed) {
    typename Product::Weights weights, gradients;
    const int row[2] = {2 * g(), 2 * g() + 1};
    const auto operand = [&](const Held& held, unsigned which) {
      return [&, which](int s) { return held.at(s, rows(first, which), row, t()); };
    };
    Product::template multiply<true>(weights, operand(key, 1), queries, g(), t());
    Product::template multiply<true>(gradients, operand(value, 2), queries + kTileBytes, g(), t());
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 four = *reinterpret_cast<const float4*>(numbers + j * 64);
      const float log_sum[2] = {four.x, four.y}, row_dot[2] = {four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // First and last 8 queries, of these the first key and the second.
        const float logit = weights[j][e] + ahead[e % 2][j * 2 + e / 2];
        const float weight = p.weight<mode>(logit, log_sum[e % 2]);
        weights[j][e] = weight;
        if (!dropout) gradients[j][e] = weight * (gradients[j][e] - row_dot[e % 2]);
      }
      if (dropout) {
        const uint4 two = *reinterpret_cast<const uint4*>(hashed + j * 64);
        const std::uint32_t offset = static_cast<unsigned>(first / 2 + g()) * kDropoutStep;
#pragma unroll
        for (int q = 0; q < 2; ++q) {  // a query and its two keys
          const auto numbers =
              dropout_numbers(q == 0 ? make_uint2(two.x, two.y) : make_uint2(two.z, two.w), offset);
          const bool keeps[2] = {keeps_first(numbers, p.dropout.threshold),
                                 keeps_second(numbers, p.dropout.threshold)};
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            float &weight = weights[j][2 * k + q], &gradient = gradients[j][2 * k + q];
            gradient = weight * ((keeps[k] ? gradient : 0.0f) - row_dot[q]);
            if (!keeps[k]) weight = 0.0f;
          }
        }
      }
    }
    load_bias();
    Product::template add<true>(d_value, weights, queries + kTileBytes, g(), t());
    Product::template add<false>(d_key, gradients, queries, g(), t());
  }
};

template <Mode mode, int width, int row_count, int key_warps, int lines_of_tile, int stage_count,
          bool dropout = false>
__global__ void __launch_bounds__(32 * key_warps * row_count, 2)
    backward_keys_fp32_kernel(const __grid_constant__ BackwardFp32Params params) {
  BackwardKeysFp32<mode, width, row_count, key_warps, lines_of_tile, stage_count, dropout>::run(
      params);
}

}  // namespace fused_ops::msa_row_attention
