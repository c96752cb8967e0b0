// SPDX-License-Identifier: Apache-2.0
// The sums over keys: d_queries = dS k_moments, a product of each head. A block has a tile of
// queries and walks the keys, which come with their dS through a ring in shared memory.
#pragma once

#include "invariant_point_attention/scores_pieces.cuh"

namespace fused_ops::invariant_point_attention {

// `tiles_of_columns`: of the result in registers; others are further blocks'. Warps that do not
// have queries of their own share the keys of a stage.
template <Mode mode, int tiles_of_columns, int query_warps>
struct QueriesBackward {
  static constexpr int kTiles = tiles_of_columns;
  static constexpr int kQueries = 16 * query_warps;
  static constexpr int kGroups = kScoresWarps / query_warps;
  static constexpr int kKeys = 64;  // of a stage
  static constexpr int kGroupKeys = kKeys / kGroups;
  static constexpr int kStages = 3;
  static constexpr int kPitch = scores_pitch(kKeys);  // of dS

  static __host__ __device__ constexpr int stage_bytes(const ScoresParams& p) {
    return kQueries * kPitch + kKeys * p.moment_pitch;
  }
  static int shared_bytes(const ScoresParams& p) {
    return std::max(kStages * stage_bytes(p), group_bytes(kGroups, kTiles));
  }

  const ScoresParams& p;
  unsigned char* shared;
  ScoresTile at;
  int thread, lane;
  int query_warp, group;
  int tiles;
  float sums[kTiles][4];

  static __device__ __forceinline__ void run(const ScoresParams& p) {
    const int thread = thread_index(), warp = thread / 32;
    const auto at = ScoresTile::of(p, kQueries);
    QueriesBackward self{p,
                         &shared_memory<unsigned char>(),
                         at,
                         thread,
                         thread % 32,
                         warp % query_warps,
                         warp / query_warps,
                         tiles_of_chunk(p.moment_line, at.chunk, kTiles),
                         {}};
    self.all();
  }

  __device__ __forceinline__ void copy(std::int64_t tile) const {
    const std::int64_t key = tile * kKeys, count = p.n - key;
    if (count > 0) {
      unsigned char* to = shared + tile % kStages * stage_bytes(p);
      const auto* gradients = static_cast<const unsigned char*>(p.d_logits) +
                              ((at.head * p.rows + at.first) * p.line + key) * 2;
      const std::int64_t left = p.line - key;
      copy_lines<kQueries>(to, gradients, p.line * 2, p.rows - at.first,
                           static_cast<int>(left < kKeys ? left : kKeys) * 2, kKeys * 2,
                           room_of(kKeys / 8), thread,
                           [](int i, int piece) { return i * kPitch + piece * 16; });
      const int pitch = p.moment_pitch;
      const auto* moments = static_cast<const unsigned char*>(p.moments) +
                            ((at.head * p.n + key) * p.moment_line + at.chunk * (kTiles * 8)) * 2;
      copy_lines<kKeys>(to + kQueries * kPitch, moments, p.moment_line * 2, count, tiles * 16,
                        (tiles + 1) / 2 * 32, p.moment_room, thread,
                        [pitch](int i, int piece) { return i * pitch + piece * 16; });
    }
    sm80::cp_async_commit();
  }

  __device__ __forceinline__ void all() {
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) copy(i);
    const std::int64_t count = ceil_div(p.n, kKeys);
    for (std::int64_t tile = 0; tile < count; ++tile) {
      sm80::cp_async_wait<kStages - 2>();
      __syncthreads();
      copy(tile + kStages - 1);
      const unsigned char* stage = shared + tile % kStages * stage_bytes(p);
#pragma unroll
      for (int i = 0; i < kGroupKeys; i += 16) {
        const int key = group * kGroupKeys + i;
        std::uint32_t left[4];
        sm80::ldmatrix_x4(left,
                          sm80::shared_address(stage + (query_warp * 16 + lane % 16) * kPitch +
                                               lane / 16 * 16 + key * 2));
        add_lines<mode>(sums, left,
                        sm80::shared_address(stage + kQueries * kPitch +
                                             (key + lane % 16) * p.moment_pitch + lane / 16 * 16),
                        tiles);
      }
    }
    sm80::cp_async_wait<0>();
    __syncthreads();
    add_groups<kGroups>(sums, reinterpret_cast<float4*>(shared), thread);
    if (group == 0) store();
  }

  __device__ __forceinline__ void store() const {
    const int first = at.chunk * (kTiles * 8) + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t query = at.first + query_warp * 16 + h * 8 + lane / 4;
      if (query >= p.rows) continue;
      float* to = p.d_moments + (at.head * p.n + p.first_row + query) * p.moment_line + first;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j < tiles) store_sums(to + j * 8, sums[j][2 * h], sums[j][2 * h + 1], false);
      }
    }
  }
};

template <Mode mode, int tiles_of_columns, int query_warps>
__global__ void __launch_bounds__(kScoresThreads, 4)
    queries_backward_kernel(const __grid_constant__ ScoresParams params) {
  QueriesBackward<mode, tiles_of_columns, query_warps>::run(params);
}

}  // namespace fused_ops::invariant_point_attention
