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
    // Of two queries: log_sums, row_dots.
    float statistics[row_count][kKeys / 2][4];
  };
  struct Shared {
    Stage stages[kStages];
  };
  static constexpr int kStageBytes = sizeof(Stage);

  const BackwardParams& p;
  // Of the row's queries and statistics in the first stage: numbers, else the compiler looks for
  // them at each use.
  sm80::SharedAddress lines;
  sm80::SharedAddress statistics;
  unsigned thread;
  Place place;
  bool wanted;  // whether any of the row's keys in this block is there
  // The lane's numbers of the next 16 queries.
  const uint4* bias;

  // What follows from the thread's number is computed again where it is asked for, and occupies no
  // registers.
  __device__ __forceinline__ unsigned again() const {
    return static_cast<unsigned>(sm80::opaque(static_cast<int>(thread)));
  }
  __device__ __forceinline__ unsigned lane() const { return thread % 32; }

  // Of a single row all is the same for all threads.
  static __device__ __forceinline__ unsigned slot_of(unsigned thread) {
    return row_count == 1 ? 0 : thread / kRowThreads;
  }
  // The warp's first one.
  static __device__ __forceinline__ int first_key(const RowTile& at, unsigned thread) {
    return at.tile * kBlockKeys + static_cast<int>(thread % kRowThreads / 32 * kWarpKeys);
  }
  // Which of the warp's keys are there.
  static __device__ __forceinline__ std::uint32_t present(const BackwardParams& p,
                                                          const RowTile& at, int first) {
    if (!at.exists) return 0;
    const std::uint64_t word = p.mask_word(at.row, first / kKeys) >> (first % kKeys);
    return static_cast<std::uint32_t>(word) & (0xffffffffu >> (32 - kWarpKeys));
  }

  static __device__ __forceinline__ void run(const BackwardParams& p) {
    const auto thread = static_cast<unsigned>(sm80::opaque(thread_index()));
    const auto at = RowTile::of<row_count>(p, slot_of(thread));
    std::uint64_t any = 0;
#pragma unroll
    for (int i = 0; i < kBlockKeys; i += kKeys) {
      any |= p.mask_word(at.row, (at.tile * kBlockKeys + i) / kKeys);
    }
    const std::int64_t head = std::int64_t{at.group} * p.heads + at.head;
    const int piece = first_key(at, thread) / kBiasBlock * 32 + static_cast<int>(thread % 32);
    const Stage& first = shared_memory<Shared>().stages[0];
    BackwardKeys{p,
                 number_of(first.lines[slot_of(thread)]),
                 number_of(first.statistics[slot_of(thread)]),
                 thread,
                 at.place(p),
                 at.exists && any != 0,
                 static_cast<const uint4*>(p.bias) + head * p.blocks * line_of_bias(p) + piece}
        .all(at);
  }

  // Of 16 queries and all keys, in pieces of 16 bytes.
  static __device__ __forceinline__ std::int64_t line_of_bias(const BackwardParams& p) {
    return std::int64_t{p.tiles} * (kKeys / kBiasBlock * 32);
  }

  // Asks for a tile of queries and what belongs to them; zeros for those that do not exist. With
  // these and a bias of zero their weights are one, times zero.
  __device__ __forceinline__ void copy(int tile, int stage) const {
    if (wanted && tile < p.tiles) {
      const int first = tile * kKeys, left = p.n - first;
      const unsigned in_row = again() % kRowThreads;
      const auto to = lines + stage * kStageBytes;
      const auto is_here = [left](int query) { return query < left; };
      copy_lines<width, kRowThreads>(to, p.projected + place.projected(first, 0), 4 * p.width,
                                     p.dim, in_row, is_here);
      copy_lines<width, kRowThreads>(to + kTileBytes, p.d_attended + place.attended(first), p.width,
                                     p.dim, in_row, is_here);
#pragma unroll
      for (int i = 0; i < 2 * kKeys; i += kRowThreads) {
        const unsigned which = (in_row + i) / kKeys, query = (in_row + i) % kKeys;
        sm80::cp_async_4(
            statistics + stage * kStageBytes + query / 2 * 16 + query % 2 * 4 + which * 8,
            (which == 0 ? p.log_sums : p.row_dots) + place.statistic(first) + query,
            is_here(static_cast<int>(query)) ? 4 : 0);
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

  __device__ __forceinline__ void all(const RowTile& at) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy(i, i);
    const int first = first_key(at, thread);
    const bool any = present(p, at, first) != 0;
    if (any) {
      load_bias();
      const std::uint16_t* from = p.projected + place.projected(first, 1);
      Product::load(key, from, 4 * p.width, p.n - first, p.dim, lane());
      Product::load(value, from + p.width, 4 * p.width, p.n - first, p.dim, lane());
    }
    Product::clear(d_key);
    Product::clear(d_value);
    int stage = 0;
    for (int tile = 0; tile < p.tiles; ++tile) {
      sm80::cp_async_wait<kAhead - 1>();
      __syncthreads();
      if (kStages > 1) copy(tile + kAhead, stage == 0 ? kStages - 1 : stage - 1);
      if (any) {
        const unsigned lane = again() % 32;
        auto across = lines + stage * kStageBytes + Product::across(lane);
        auto down = lines + stage * kStageBytes + Product::down(lane);
        auto numbers = statistics + stage * kStageBytes + lane % 4 * 16;
#pragma unroll 1
        for (int i = tile * (kKeys / 16); i < (tile + 1) * (kKeys / 16) && i < p.blocks; ++i) {
          if (i + 1 < p.blocks) bias += line_of_bias(p);
          step(across, down, numbers);
          across += 16 * Line::kPitch;
          down += 16 * Line::kPitch;
          numbers += 16 * 8;
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    sm80::cp_async_wait<0>();
    store();
  }

  __device__ __forceinline__ void store() const {
    const auto at = RowTile::of<row_count>(p, slot_of(again()));
    if (!at.exists) return;
    const int first = first_key(at, again());
    const std::uint32_t here = present(p, at, first);
    std::uint16_t* to = p.d_projected + at.place(p).projected(first, 1);
    Product::store(to, 4 * p.width, d_key, p.scale, here, p.n - first, p.dim, lane());
    Product::store(to + p.width, 4 * p.width, d_value, 1.0f, here, p.n - first, p.dim, lane());
  }

  // 16 queries.
  __device__ __forceinline__ void step(sm80::SharedAddress across, sm80::SharedAddress down,
                                       sm80::SharedAddress numbers) {
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
    Product::multiply(weights, key, across, 0);
    Product::multiply(gradients, value, across, kTileBytes);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 four = sm80::load_shared_16(numbers + j * 64);
      const float log_sum[2] = {__uint_as_float(four.x), __uint_as_float(four.y)};
      const float row_dot[2] = {__uint_as_float(four.z), __uint_as_float(four.w)};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& weight = weights[m][j][e];
          weight = sm80::exp2_approx(fmaf(weight, p.logit_scale, -log_sum[e % 2]));
          gradients[m][j][e] = weight * (gradients[m][j][e] - row_dot[e % 2]);
        }
      }
    }
    typename Product::Packed packed;
    Product::pack(packed, weights);
    Product::add(d_value, packed, down, kTileBytes);
    Product::pack(packed, gradients);
    Product::add(d_key, packed, down, 0);
  }
};

template <Mode mode, int width, int row_count, int key_warps, int key_tiles, int stage_count>
__global__ void __launch_bounds__(32 * key_warps * row_count,
                                  (width <= 32 ? 384 : 256) / (32 * key_warps * row_count))
    backward_keys_kernel(const __grid_constant__ BackwardParams params) {
  BackwardKeys<mode, width, row_count, key_warps, key_tiles, stage_count>::run(params);
}

}  // namespace fused_ops::msa_row_attention
