// SPDX-License-Identifier: Apache-2.0
// The sums over keys for fp32 tensors: d_queries = dS k_moments, a product of each head, as
// queries_backward_sm80.cuh.
#pragma once

#include "invariant_point_attention/scores_fp32_pieces.cuh"

namespace fused_ops::invariant_point_attention {

template <Mode mode>
struct QueriesBackwardFp32 {
  using Product = Fp32Product<mode>;
  static constexpr int kQueryWarps = 2;
  static constexpr int kQueries = 16 * kQueryWarps;
  static constexpr int kGroups = kScoresWarps / kQueryWarps;
  static constexpr int kKeys = 32;  // of a stage
  static constexpr int kGroupKeys = kKeys / kGroups;
  static constexpr int kSteps = kGroupKeys / 8;
  static constexpr int kStages = 3;
  static constexpr int kPitch = kKeys * 4 + 16;  // of dS: the numbers t of lines g in all banks

  static __host__ __device__ constexpr int stage_bytes(const ScoresParams& p) {
    return kQueries * kPitch + kKeys * p.moment_pitch;
  }
  static int shared_bytes(const ScoresParams& p) {
    return std::max(kStages * stage_bytes(p), group_bytes(kGroups, kFp32Tiles));
  }

  const ScoresParams& p;
  unsigned char* shared;
  ScoresTile at;
  int thread, lane;
  int query_warp, group;
  int columns;
  float sums[kFp32Tiles][4];

  static __device__ __forceinline__ void run(const ScoresParams& p) {
    const int thread = thread_index(), warp = thread / 32;
    const auto at = ScoresTile::of(p, kQueries);
    QueriesBackwardFp32 self{p,
                             &shared_memory<unsigned char>(),
                             at,
                             thread,
                             thread % 32,
                             warp % kQueryWarps,
                             warp / kQueryWarps,
                             tiles_of_chunk(p.moment_line, at.chunk, kFp32Tiles) * 8,
                             {}};
    self.all();
  }

  __device__ __forceinline__ void copy(std::int64_t tile) const {
    const std::int64_t key = tile * kKeys, count = p.n - key;
    if (count > 0) {
      unsigned char* to = shared + tile % kStages * stage_bytes(p);
      const auto* gradients = static_cast<const unsigned char*>(p.d_logits) +
                              ((at.head * p.rows + at.first) * p.line + key) * 4;
      const std::int64_t left = p.line - key;
      copy_lines<kQueries>(to, gradients, p.line * 4, p.rows - at.first,
                           static_cast<int>(left < kKeys ? left : kKeys) * 4, kKeys * 4,
                           room_of(kKeys / 4), thread,
                           [](int i, int piece) { return i * kPitch + piece * 16; });
      const int pitch = p.moment_pitch;
      copy_lines<kKeys>(to + kQueries * kPitch,
                        static_cast<const unsigned char*>(p.moments) +
                            ((at.head * p.n + key) * p.moment_line + at.chunk * kFp32Columns) * 4,
                        p.moment_line * 4, count, columns * 4, pitch - 32, p.moment_room, thread,
                        [pitch](int i, int piece) { return fp32_piece_at(i, piece, pitch); });
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
      const auto* gradients = reinterpret_cast<const float*>(
          stage + (query_warp * 16 + lane / 4) * kPitch + (group * kGroupKeys + lane % 4) * 4);
      typename Product::Left left[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // row g, g + 8 of key t, then of key t + 4
          left[s].set(e, gradients[e % 2 * 8 * (kPitch / 4) + s * 8 + e / 2 * 4]);
        }
      }
      Product::add(sums, left, stage + kQueries * kPitch, group * kGroupKeys, p.moment_pitch, 0,
                   (columns + 31) / 32, lane);
    }
    sm80::cp_async_wait<0>();
    __syncthreads();
    add_groups<kGroups>(sums, reinterpret_cast<float4*>(shared), thread);
    if (group == 0) store();
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t query = at.first + query_warp * 16 + h * 8 + lane / 4;
      if (query >= p.rows) continue;
      store_fp32_sums(p.d_moments + (at.head * p.n + p.first_row + query) * p.moment_line +
                          at.chunk * kFp32Columns,
                      sums, h, columns, columns, false, lane);
    }
  }
};

template <Mode mode>
__global__ void __launch_bounds__(kScoresThreads, 4)
    queries_backward_fp32_kernel(const __grid_constant__ ScoresParams params) {
  QueriesBackwardFp32<mode>::run(params);
}

}  // namespace fused_ops::invariant_point_attention
