// SPDX-License-Identifier: Apache-2.0
// Gradient of queries: dq = dS k / sqrt(d), with dS = P (da v^T - D) and P the weights.
//
// The walk of the forward: a warp has 32 queries (16 of wide heads) of one row and walks its keys,
// 64 at a time through a ring in shared memory, 16 at a time through registers. Weights come from
// the sums that attend_statistics stored, so there is no largest logit to follow.
#pragma once

#include "msa_row_attention/backward_pieces.cuh"

namespace fused_ops::msa_row_attention {

// A block has `row_count` rows and of each 16 * `query_tiles` * `query_warps` queries.
template <Mode mode, int width, int row_count, int query_warps, int query_tiles, int stage_count>
struct BackwardQueries {
  static constexpr int kRowThreads = 32 * query_warps;
  static constexpr int kThreads = kRowThreads * row_count;
  static constexpr int kM = query_tiles;
  static constexpr int kWarpQueries = 16 * kM;
  static constexpr int kBlockQueries = kWarpQueries * query_warps;
  static constexpr int kStages = stage_count;  // 1: for a single tile of keys
  static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  using Product = Products<mode, width, kM>;
  using Line = Lines<width>;
  static constexpr int kTileBytes = kKeys * Line::kPitch;
  static constexpr float kMinusInfinity = -__builtin_huge_valf();

  struct alignas(1024) Stage {
    unsigned char lines[row_count][2][kTileBytes];  // keys, values
  };
  struct Shared {
    Stage stages[kStages];
  };
  static constexpr int kStageBytes = sizeof(Stage);

  const BackwardParams& p;
  // Of the row's keys in the first stage: a number, else the compiler looks for it at each use.
  sm80::SharedAddress lines;
  unsigned thread;
  Place place;
  const std::uint64_t* present;  // of the row; null: all keys are there
  // The lane's numbers of the next 16 keys, for the warp's first 16 queries and the others.
  const uint4* bias[2];

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
  static __device__ __forceinline__ int first_query(const RowTile& at, unsigned thread) {
    return at.tile * kBlockQueries + static_cast<int>(thread % kRowThreads / 32 * kWarpQueries);
  }

  static __device__ __forceinline__ void run(const BackwardParams& p) {
    const auto thread = static_cast<unsigned>(sm80::opaque(thread_index()));
    const auto at = RowTile::of<row_count>(p, slot_of(thread));
    const int query_block = first_query(at, thread) / kBiasBlock;
    const auto bias_of = [&](int m) {  // queries that do not exist have the last ones'
      const std::int64_t line = (std::int64_t{at.group} * p.heads + at.head) * p.blocks +
                                min(query_block + m, p.blocks - 1);
      return static_cast<const uint4*>(p.bias) + line * p.tiles * (kKeys / kBiasBlock * 32) +
             thread % 32;
    };
    const Stage& first = shared_memory<Shared>().stages[0];
    BackwardQueries{p,
                    number_of(first.lines[slot_of(thread)]),
                    thread,
                    at.place(p),
                    p.present ? p.present + at.row * p.tiles : nullptr,
                    {bias_of(0), bias_of(1)}}
        .all(at);
  }

  // Which keys of a tile are there.
  __device__ __forceinline__ std::uint64_t mask_word(int tile, bool exists) const {
    if (!exists || tile >= p.tiles) return 0;
    if (present) return present[tile];
    const int left = p.n - tile * kKeys;
    return left >= kKeys ? ~std::uint64_t{0} : ~std::uint64_t{0} >> (kKeys - left);
  }

  // Asks for the keys and values of a tile; zeros for those that are not there.
  __device__ __forceinline__ void copy(int tile, int stage, std::uint64_t here) const {
    if (here != 0) {
      const unsigned in_row = again() % kRowThreads;
      const auto to = lines + stage * kStageBytes;
      const auto is_here = [here](int key) { return (here >> key & 1) != 0; };
      const std::uint16_t* from = p.projected + place.projected(tile * kKeys, 1);
      copy_lines<width, kRowThreads>(to, from, 4 * p.width, p.dim, in_row, is_here);
      copy_lines<width, kRowThreads>(to + kTileBytes, from + p.width, 4 * p.width, p.dim, in_row,
                                     is_here);
    }
    sm80::cp_async_commit();
  }

  uint4 ahead[kM];  // bias
  typename Product::Fragments query, gradient;
  typename Product::Sums d_query;
  float log_sums[kM][2];
  float row_dots[kM][2];

  __device__ __forceinline__ void load_bias() {
#pragma unroll
    for (int m = 0; m < kM; ++m) ahead[m] = *bias[m];
  }

  __device__ __forceinline__ void all(const RowTile& at) {
    std::uint64_t words[kAhead + 1];  // of this tile and the next ones
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      words[i] = mask_word(i, at.exists);
      copy(i, i, words[i]);
    }
    words[kAhead] = mask_word(kAhead, at.exists);
    load_bias();
    load_queries(first_query(at, thread));
    Product::clear(d_query);
    int stage = 0;
    for (int tile = 0; tile < p.tiles; ++tile) {
      sm80::cp_async_wait<kAhead - 1>();
      __syncthreads();
      if (kStages > 1) {
        copy(tile + kAhead, stage == 0 ? kStages - 1 : stage - 1, words[kAhead]);
      }
      std::uint64_t here = words[0];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) words[i] = words[i + 1];
      words[kAhead] = mask_word(tile + kAhead + 1, at.exists);
      const unsigned lane = again() % 32;
      auto across = lines + stage * kStageBytes + Product::across(lane);
      auto down = lines + stage * kStageBytes + Product::down(lane);
#pragma unroll 1
      for (int i = 0; i < kKeys / 16; ++i) {
        // The last one again behind it.
        const int further = i + 1 < kKeys / 16 || tile + 1 < p.tiles ? 32 : 0;
        step(across, down, static_cast<std::uint32_t>(here) & 0xffff, further);
        across += 16 * Line::kPitch;
        down += 16 * Line::kPitch;
        here >>= 16;
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    sm80::cp_async_wait<0>();
    store();
  }

  __device__ __forceinline__ void load_queries(int first) {
    Product::load(query, p.projected + place.projected(first, 0), 4 * p.width, p.n - first, p.dim,
                  lane());
    Product::load(gradient, p.d_attended + place.attended(first), p.width, p.n - first, p.dim,
                  lane());
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = first + m * 16 + h * 8 + static_cast<int>(lane() / 4);
        log_sums[m][h] = at < p.n ? p.log_sums[place.statistic(at)] : 0.0f;
        row_dots[m][h] = at < p.n ? p.row_dots[place.statistic(at)] : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void store() const {
    const auto at = RowTile::of<row_count>(p, slot_of(again()));
    if (!at.exists) return;
    const int first = first_query(at, again());
    Product::store(p.d_projected + at.place(p).projected(first, 0), 4 * p.width, d_query, p.scale,
                   ~0u, p.n - first, p.dim, lane());
  }

  // 16 keys, of which those of `some` are there. The next bias is `further` pieces on.
  __device__ __forceinline__ void step(sm80::SharedAddress across, sm80::SharedAddress down,
                                       std::uint32_t some, int further) {
    typename Product::Weights weights, gradients;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const std::uint32_t four[4] = {ahead[m].x, ahead[m].y, ahead[m].z, ahead[m].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = unpack_16<mode>(four[i]);
        weights[m][i / 2][i % 2 * 2] = two.x;
        weights[m][i / 2][i % 2 * 2 + 1] = two.y;
        gradients[m][i / 2][i % 2 * 2] = gradients[m][i / 2][i % 2 * 2 + 1] = 0.0f;
      }
      bias[m] += further;
    }
    load_bias();
    if (some == 0) return;
    Product::multiply(weights, query, across, 0);
    Product::multiply(gradients, gradient, across, kTileBytes);
    if (some != 0xffff) remove_absent(weights, some);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float weight =
              sm80::exp2_approx(fmaf(weights[m][j][e], p.logit_scale, -log_sums[m][e / 2]));
          gradients[m][j][e] = weight * (gradients[m][j][e] - row_dots[m][e / 2]);
        }
      }
    }
    typename Product::Packed packed;
    Product::pack(packed, gradients);
    Product::add(d_query, packed, down, 0);
  }

  __device__ __forceinline__ void remove_absent(typename Product::Weights& weights,
                                                std::uint32_t some) const {
    const std::uint32_t mine = some >> (2 * (lane() % 4));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool there = mine >> (8 * j + e % 2) & 1;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if (!there) weights[m][j][e] = kMinusInfinity;
        }
      }
    }
  }
};

template <Mode mode, int width, int row_count, int query_warps, int query_tiles, int stage_count>
__global__ void __launch_bounds__(32 * query_warps * row_count,
                                  (width <= 32 ? 384 : 256) / (32 * query_warps * row_count))
    backward_queries_kernel(const __grid_constant__ BackwardParams params) {
  BackwardQueries<mode, width, row_count, query_warps, query_tiles, stage_count>::run(params);
}

}  // namespace fused_ops::msa_row_attention
