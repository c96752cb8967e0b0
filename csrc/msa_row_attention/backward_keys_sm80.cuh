// SPDX-License-Identifier: Apache-2.0
// Gradients of keys and values: dv = P^T da, dk = dS^T q / sqrt(d), with P the weights and
// dS = P (da v^T - D).
//
// The forward with queries and keys in each other's place: a warp has 32 keys (16 of wide heads) of
// one row and walks the queries, 64 at a time through a ring in shared memory, 16 at a time through
// registers. So logits come out as S^T = k q^T, with keys along M, and P^T and dS^T are at once the
// left operands of the next products. Only the bias has queries along M; its matrices of 8 by 8 are
// transposed as words between lanes (movmatrix), half as many as P and dS would have, and nothing
// goes through shared memory. Besides, an absent key is a row of results and nothing else: it is
// left out when the results are stored.
#pragma once

#include "msa_row_attention/backward_pieces.cuh"

namespace fused_ops::msa_row_attention {

// A block has `row_count` rows and of each 16 * `key_tiles` * `key_warps` keys.
template <Mode mode, int width, int row_count, int key_warps, int key_tiles, int stage_count>
struct BackwardKeys {
  static constexpr int kRowThreads = 32 * key_warps;
  static constexpr int kThreads = kRowThreads * row_count;
  static constexpr int kM = key_tiles;
  static constexpr int kWarpKeys = 16 * kM;
  static constexpr int kBlockKeys = kWarpKeys * key_warps;
  static constexpr int kStages = stage_count;  // 1: for a single tile of queries
  static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  using Product = Products<mode, width, kM>;
  using Line = Lines<width>;
  static constexpr int kTileBytes = kKeys * Line::kPitch;

  struct alignas(1024) Stage {
    unsigned char lines[row_count][2][kTileBytes];  // queries, gradients
    float log_sums[row_count][kKeys];
    float row_dots[row_count][kKeys];
  };
  struct Shared {
    Stage stages[kStages];
  };

  const BackwardParams& p;
  int thread;
  int slot;
  Place place;
  int first_key;       // of the warp
  std::uint32_t here;  // which of the warp's keys are there
  bool wanted;         // whether any of the row's keys in this block is there
  // The lane's numbers of the next 16 queries.
  const uint4* bias;

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int in_row() const { return thread % kRowThreads; }

  // The tiles of a row and head follow each other, then the heads: they share queries.
  static __device__ __forceinline__ void run(const BackwardParams& p) {
    const int thread = sm80::opaque(thread_index());
    const int slot = thread / kRowThreads;
    unsigned block = blockIdx.x;
    const int tile = static_cast<int>(block % p.block_tiles);
    block /= p.block_tiles;
    const unsigned head = block % p.heads;
    block /= p.heads;
    const unsigned group = block / p.row_blocks;
    const unsigned in_group = block % p.row_blocks * row_count + slot;
    const bool exists = in_group < p.rows;
    const std::int64_t row = std::int64_t{group} * p.rows + (exists ? in_group : 0);
    const int first_key = tile * kBlockKeys + thread % kRowThreads / 32 * kWarpKeys;
    std::uint64_t all = 0;
    std::uint32_t here = 0;
    if (exists) {
#pragma unroll
      for (int i = 0; i < kBlockKeys; i += kKeys) {
        all |= p.mask_word(row, (tile * kBlockKeys + i) / kKeys);
      }
      const std::uint64_t mine = p.mask_word(row, first_key / kKeys) >> (first_key % kKeys);
      here = static_cast<std::uint32_t>(mine) & (0xffffffffu >> (32 - kWarpKeys));
    }
    const uint4* bias = static_cast<const uint4*>(p.bias) +
                        (std::int64_t{group} * p.heads + head) * p.blocks * line_of_bias(p) +
                        first_key / kBiasBlock * 32 + thread % 32;
    BackwardKeys{p,         thread, slot,     Place{p, row, static_cast<int>(head)},
                 first_key, here,   all != 0, bias}
        .all(exists);
  }

  // Of 16 queries and all keys, in pieces of 16 bytes.
  static __device__ __forceinline__ std::int64_t line_of_bias(const BackwardParams& p) {
    return std::int64_t{p.tiles} * (kKeys / kBiasBlock * 32);
  }

  // Asks for a tile of queries and what belongs to them; zeros for those that do not exist. With
  // these and a bias of zero their weights are one, times zero.
  __device__ __forceinline__ void copy(int tile, int stage) const {
    if (wanted && tile < p.tiles) {
      Stage& to = shared_memory<Shared>().stages[stage];
      const std::uint64_t existing = p.existing(tile);
      const int first = tile * kKeys;
      copy_lines<width, kRowThreads>(sm80::shared_address(to.lines[slot][0]),
                                     p.projected + place.projected(first, 0),
                                     std::int64_t{4} * p.width, existing, p.dim, in_row());
      copy_lines<width, kRowThreads>(sm80::shared_address(to.lines[slot][1]),
                                     p.d_attended + place.attended(first), p.width, existing, p.dim,
                                     in_row());
      constexpr int kStep = kRowThreads < kKeys ? kRowThreads : kKeys;
      const int query = in_row() % kStep;
#pragma unroll
      for (int i = 0; i < kKeys; i += kStep) {
        const std::int64_t at = place.statistic(first + query + i);
        const int bytes = existing >> (query + i) & 1 ? 4 : 0;
        if (kRowThreads <= kKeys || in_row() < kKeys) {
          sm80::cp_async_4(&to.log_sums[slot][query + i], p.log_sums + at, bytes);
        }
        if (kRowThreads <= kKeys || in_row() >= kKeys) {
          sm80::cp_async_4(&to.row_dots[slot][query + i], p.row_dots + at, bytes);
        }
      }
    }
    sm80::cp_async_commit();
  }

  uint4 ahead[kM];  // bias
  typename Product::Fragments key, value;
  typename Product::Sums d_key, d_value;

  __device__ __forceinline__ void load_bias() {
#pragma unroll
    for (int m = 0; m < kM; ++m) ahead[m] = bias[m * 32];
  }

  __device__ __forceinline__ void all(bool exists) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy(i, i);
    const int count = p.n - first_key;
    if (here != 0) {
      load_bias();
      Product::load(key, p.projected + place.projected(first_key, 1), std::int64_t{4} * p.width,
                    count, p.dim, lane());
      Product::load(value, p.projected + place.projected(first_key, 2), std::int64_t{4} * p.width,
                    count, p.dim, lane());
    }
    Product::clear(d_key);
    Product::clear(d_value);
    int stage = 0;
    int steps = p.blocks;  // of 16 queries, from this tile on
    for (int tile = 0; tile < p.tiles; ++tile) {
      sm80::cp_async_wait<kAhead - 1>();
      __syncthreads();
      if (kStages > 1) copy(tile + kAhead, stage == 0 ? kStages - 1 : stage - 1);
      if (here != 0) {
        const Stage& now = shared_memory<Shared>().stages[stage];
        const auto lines = sm80::shared_address(now.lines[slot][0]);
        const int most = steps < kKeys / 16 ? steps : kKeys / 16;
#pragma unroll 1
        for (int i = 0; i < most; ++i) {
          if (i + 1 < steps) bias += line_of_bias(p);
          step(lines + i * 16 * Line::kPitch, now.log_sums[slot] + i * 16,
               now.row_dots[slot] + i * 16);
        }
      }
      steps -= kKeys / 16;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    sm80::cp_async_wait<0>();
    if (!exists) return;
    std::uint16_t* to = p.d_projected + place.projected(first_key, 1);
    Product::store(to, std::int64_t{4} * p.width, d_key, p.scale, here, count, p.dim, lane());
    Product::store(to + p.width, std::int64_t{4} * p.width, d_value, 1.0f, here, count, p.dim,
                   lane());
  }

  // 16 queries, whose lines and gradients are at `lines`.
  __device__ __forceinline__ void step(sm80::SharedAddress lines, const float* log_sums,
                                       const float* row_dots) {
    typename Product::Weights weights, gradients;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      // First and last 8 queries of the first 8 keys, then of the next.
      const std::uint32_t words[4] = {ahead[m].x, ahead[m].z, ahead[m].y, ahead[m].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = unpack_16<mode>(sm80::transpose_8x8(words[i]));
        weights[m][i / 2][i % 2 * 2] = two.x;
        weights[m][i / 2][i % 2 * 2 + 1] = two.y;
        gradients[m][i / 2][i % 2 * 2] = gradients[m][i / 2][i % 2 * 2 + 1] = 0.0f;
      }
    }
    load_bias();
    Product::multiply(weights, key, lines, lane());
    Product::multiply(gradients, value, lines + kTileBytes, lane());
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int query = j * 8 + lane() % 4 * 2;
      const float2 log_sum = *reinterpret_cast<const float2*>(log_sums + query);
      const float2 row_dot = *reinterpret_cast<const float2*>(row_dots + query);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& weight = weights[m][j][e];
          weight =
              sm80::exp2_approx(fmaf(weight, p.logit_scale, -(e % 2 == 0 ? log_sum.x : log_sum.y)));
          gradients[m][j][e] = weight * (gradients[m][j][e] - (e % 2 == 0 ? row_dot.x : row_dot.y));
        }
      }
    }
    typename Product::Packed packed;
    Product::pack(packed, weights);
    Product::add(d_value, packed, lines + kTileBytes, lane());
    Product::pack(packed, gradients);
    Product::add(d_key, packed, lines, lane());
  }
};

template <Mode mode, int width, int row_count, int key_warps, int key_tiles, int stage_count>
__global__ void __launch_bounds__(32 * key_warps * row_count,
                                  (width <= 32 ? 384 : 256) / (32 * key_warps * row_count))
    backward_keys_kernel(const __grid_constant__ BackwardParams params) {
  BackwardKeys<mode, width, row_count, key_warps, key_tiles, stage_count>::run(params);
}

}  // namespace fused_ops::msa_row_attention
