// SPDX-License-Identifier: Apache-2.0
// Gradient of queries: dq = dS k / sqrt(d), with dS = P (da v^T - D) and P the weights.
//
// The walk of the forward: a warp has 32 queries (16 of wide heads) of one row and walks its keys,
// 64 at a time through a ring in shared memory, 16 at a time through registers. Weights come from
// the sums that attend stored, so there is no largest logit to follow.
#pragma once

#include "msa_row_attention/backward_pieces.cuh"

namespace fused_ops::msa_row_attention {

// A block has `row_count` rows and of each 16 * `query_tiles` * `query_warps` queries.
template <Mode mode, int width, int row_count, int query_warps, int query_tiles, int stage_count,
          bool dropout = false>
struct BackwardQueries {
  static constexpr int kRowThreads = 32 * query_warps;
  static constexpr int kThreads = kRowThreads * row_count;
  static constexpr int kM = query_tiles;
  static constexpr int kWarpQueries = 16 * kM;
  static constexpr int kBlockQueries = kWarpQueries * query_warps;
  static constexpr int kStages = stage_count;  // 1: for a single tile of keys
  static_assert(kStages <= 2);
  using Product = Products<mode, width, kM>;
  using Line = Lines<width>;
  static constexpr int kTileBytes = kKeys * Line::kPitch;
  static constexpr int kSteps = kKeys / 16;  // of a tile

  struct alignas(1024) Stage {
    unsigned char lines[row_count][2][kTileBytes];  // keys, values
  };
  struct Shared {
    Stage stages[kStages];
    // What a thread asks for tiles with: here it occupies no registers.
    const std::uint16_t* keys[kThreads];   // its piece of the next tile's keys
    const std::uint64_t* masks[kThreads];  // words of its row
  };
  static constexpr int kStageBytes = sizeof(Stage);

  const BackwardParams& p;
  // Of the row's keys in the first stage: a number, else the compiler looks for it at each use.
  sm80::SharedAddress lines;
  unsigned thread;
  bool exists;  // whether there is such a row
  // The lane's numbers of the first keys of a tile, for the warp's first 16 queries and the others.
  const uint4* bias[2];

  __device__ __forceinline__ unsigned lane() const { return thread % 32; }
  __device__ __forceinline__ unsigned in_row() const {
    return row_count == 1 ? thread : thread % kRowThreads;
  }

  // Of a single row all is the same for all threads.
  static __device__ __forceinline__ unsigned slot_of(unsigned thread) {
    return row_count == 1 ? 0 : thread / kRowThreads;
  }
  // The warp's first one.
  static __device__ __forceinline__ int first_query(const RowTile& at, unsigned thread) {
    return at.tile * kBlockQueries + static_cast<int>(thread % kRowThreads / 32 * kWarpQueries);
  }

  static __device__ __forceinline__ void run(const BackwardParams& p) {
    const unsigned index = thread_index();  // by a detour, else it is read again and again
    const unsigned thread = __shfl_sync(0xffffffff, index, index % 32);
    const auto at = RowTile::of<row_count>(p, slot_of(thread));
    const int query_block = first_query(at, thread) / kBiasBlock;
    const auto bias_of = [&](int m) {  // queries that do not exist have the last ones'
      const std::int64_t line = (std::int64_t{at.group} * p.heads + at.head) * p.blocks +
                                min(query_block + m, p.blocks - 1);
      return static_cast<const uint4*>(p.bias) + line * p.tiles * (kSteps * 32) + thread % 32;
    };
    const unsigned in_row = thread % kRowThreads;
    const Stage& first = shared_memory<Shared>().stages[0];
    BackwardQueries{p,
                    number_of(first.lines[slot_of(thread)]),
                    thread,
                    at.exists,
                    {bias_of(0), bias_of(kM - 1)}}
        .all(at, p.projected + at.place(p).projected(in_row / Line::kPieceRoom, 1) +
                     in_row % Line::kPieceRoom * 8);
  }

  // Which keys of a tile are there; none of a row that is not.
  __device__ __forceinline__ std::uint64_t mask_word(int tile) const {
    if (!exists || tile >= p.tiles) return 0;
    if (p.present) return shared_memory<Shared>().masks[thread][tile];
    return tile + 1 < p.tiles ? ~std::uint64_t{0} : ~std::uint64_t{0} >> (-p.n & (kKeys - 1));
  }

  // Asks for the keys and values of the next tile; zeros for those that are not there.
  __device__ __forceinline__ void copy(int tile, std::uint64_t here) {
    const std::uint16_t*& at = shared_memory<Shared>().keys[thread];
    const std::uint16_t* key = at;
    if (here != 0) {
      const auto to = lines + tile % kStages * kStageBytes;
      copy_two_lines<width, kRowThreads>(to, to + kTileBytes, key, key + p.width, 4 * p.width,
                                         4 * p.width, p.dim, in_row(), here);
    }
    sm80::cp_async_commit();
    at = key + std::uint64_t{4 * kKeys} * p.width;
  }

  uint4 ahead[2][kM];  // bias of a step and of the next one
  typename Product::Fragments query, gradient;
  typename Product::Sums d_query;
  float log_sums[kM][2];
  float row_dots[kM][4];  // as sums of products begin with them
  uint2 dropout_keys[dropout ? kM : 1][2];

  // Of 16 keys of the tile that `bias` points to.
  __device__ __forceinline__ void load_bias(int step) {
#pragma unroll
    for (int m = 0; m < kM; ++m) ahead[step % 2][m] = bias[m][step % kSteps * 32];
  }

  // The bias of a step further: of the next tile; of the last one again behind it.
  __device__ __forceinline__ void load_next_bias(int step, int tile) {
    if (step == kSteps && tile + 1 < p.tiles) {
#pragma unroll
      for (int m = 0; m < kM; ++m) bias[m] += kSteps * 32;
    }
    load_bias(step);
  }

  __device__ __forceinline__ void all(const RowTile& at, const std::uint16_t* key) {
    shared_memory<Shared>().keys[thread] = key;
    if (p.present) shared_memory<Shared>().masks[thread] = p.present + at.row * p.tiles;

    copy(0, mask_word(0));
    load_bias(0);
    const bool whole = width == p.dim && first_query(at, thread) + kWarpQueries <= p.n;
    whole ? load_queries<true>(at) : load_queries<false>(at);
    Product::clear(d_query);
    for (int tile = 0; tile < p.tiles; ++tile) {
      const std::uint64_t here = mask_word(tile), next = kStages > 1 ? mask_word(tile + 1) : 0;
      sm80::cp_async_wait<0>();
      __syncthreads();
      if (kStages > 1) copy(tile + 1, next);
      if (here == 0) {
        load_next_bias(kSteps, tile);
        continue;
      }
      const auto keys = lines + tile % kStages * kStageBytes;
      const auto across = keys + Product::across(lane());
      typename Product::Down down;
      Product::start(down, keys + Product::down(lane()));
      const bool all = here == ~std::uint64_t{0};
#pragma unroll 2
      for (int i = 0; i < kSteps; ++i) {
        typename Product::Packed packed;
        step(
            packed, across, i, [&] { load_next_bias(i + 1, tile); },
            (tile * (kKeys / 2) + lane() % 4 + i * 8) * kDropoutStep);
        if (!all)
          Product::remove_absent(packed, static_cast<std::uint32_t>(here >> (i * 16)), lane());
        Product::add(d_query, packed, down, i * 16 * Line::kPitch);
      }
    }
    sm80::cp_async_wait<0>();
    if (!exists) return;
    whole ? store<true>() : store<false>();
  }

  template <bool whole>
  __device__ __forceinline__ void load_queries(const RowTile& at) {
    const Place place = at.place(p);
    const int first = first_query(at, thread);
    Product::template load<whole>(query, p.projected + place.projected(first, 0), 4 * p.width,
                                  p.n - first, p.dim, lane());
    Product::template load<whole>(gradient, p.d_attended + place.attended(first), p.width,
                                  p.n - first, p.dim, lane());
    // Products of the negative begin with D, and give D - da v^T.
    Product::negate(gradient);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = first + m * 16 + h * 8 + static_cast<int>(lane() / 4);
        const bool here = whole || query < p.n;
        log_sums[m][h] = here ? p.log_sums[place.statistic(query)] : 0.0f;
        const float dot = here ? p.row_dots[place.statistic(query)] : 0.0f;
        row_dots[m][2 * h] = opaque(dot);
        row_dots[m][2 * h + 1] = opaque(dot);
        if (dropout) {
          const auto* keys = reinterpret_cast<const uint2*>(p.dropout.keys);
          dropout_keys[dropout ? m : 0][h] = here ? keys[place.statistic(query)] : make_uint2(0, 0);
        }
      }
    }
  }

  template <bool whole>
  __device__ __forceinline__ void store() const {
    const auto at = RowTile::of<row_count>(p, slot_of(thread));
    const int first = first_query(at, thread);
    Product::template store<whole>(p.d_projected + at.place(p).projected(first, 0), 4 * p.width,
                                   d_query, -p.scale, ~0u, p.n - first, p.dim, lane());
  }

  // -dS of 16 keys, 8 at a time. `offset` is that of dropout's hash at the thread's first keys.
  template <class LoadNext>
  __device__ __forceinline__ void step(typename Product::Packed& packed, sm80::SharedAddress across,
                                       int i, LoadNext load_next, std::uint32_t offset) {
    typename Product::Columns key_columns, value_columns;
    load_next();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      typename Product::Weights weights, gradients;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const uint4& piece = ahead[i % 2][m];
        const std::uint32_t words[2] = {j == 0 ? piece.x : piece.z, j == 0 ? piece.y : piece.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 two = unpack_16<mode>(words[e / 2]);
          weights[m][e] = e % 2 == 0 ? two.x : two.y;
          gradients[m][e] = row_dots[m][e];
        }
      }
      Product::load(key_columns, across, i * 16 * Line::kPitch, j);
      Product::multiply(weights, query, key_columns[j]);
      Product::load(value_columns, across, kTileBytes + i * 16 * Line::kPitch, j);
      Product::multiply(gradients, gradient, value_columns[j]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; dropout && h < 2; ++h) {
          const auto numbers =
              dropout_numbers(dropout_keys[dropout ? m : 0][h], offset + j * 4 * kDropoutStep);
          float (&four)[4] = gradients[m];
          if (!keeps_first(numbers, p.dropout.threshold)) four[2 * h] = row_dots[m][2 * h];
          if (!keeps_second(numbers, p.dropout.threshold)) four[2 * h + 1] = row_dots[m][2 * h];
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          gradients[m][e] *=
              sm80::exp2_approx(fmaf(weights[m][e], p.logit_scale, -log_sums[m][e / 2]));
        }
        Product::pack(packed[m], gradients[m], j);
      }
    }
  }
};

template <Mode mode, int width, int row_count, int query_warps, int query_tiles, int stage_count,
          bool dropout = false>
__global__ void __launch_bounds__(32 * query_warps * row_count,
                                  (width > 32                                    ? 256
                                   : !dropout && (width <= 16 || row_count == 1) ? 512
                                                                                 : 384) /
                                      (32 * query_warps * row_count))
    backward_queries_kernel(const __grid_constant__ BackwardParams params) {
  BackwardQueries<mode, width, row_count, query_warps, query_tiles, stage_count, dropout>::run(
      params);
}

}  // namespace fused_ops::msa_row_attention
