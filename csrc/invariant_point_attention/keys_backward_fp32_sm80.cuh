// SPDX-License-Identifier: Apache-2.0
// dS, and the sums over queries, for fp32 tensors: d_keys = dS^T q_moments, d_values = P^T
// d_gathered.
//
// As keys_backward_sm80.cuh: dP comes out transposed, so that P^T and dS^T are at once the left
// operands of the next products, and a lane has keys 2g and 2g + 1. Of eight queries it has t and
// t + 4, which is the order that scores_fp32_pieces.cuh gives lines that are an inner axis.
#pragma once

#include "invariant_point_attention/scores_fp32_pieces.cuh"

namespace fused_ops::invariant_point_attention {

// Two warps with keys of their own, which two others help with half of the queries of a stage.
template <Mode mode, int queries_of_stage>
struct KeysBackwardFp32 {
  using Product = Fp32Product<mode>;
  static constexpr int kKeyWarps = 2;
  static constexpr int kKeys = 16 * kKeyWarps;
  static constexpr int kGroups = kScoresWarps / kKeyWarps;
  static constexpr int kQueries = queries_of_stage;
  static constexpr int kStep = kQueries / kGroups;  // queries that a warp takes at once
  static constexpr int kN = kStep / 8;

  static __host__ __device__ constexpr int keys_bytes(const ScoresParams& p) {
    return kKeys * p.value_pitch;
  }
  static __host__ __device__ constexpr int stage_bytes(const ScoresParams& p) {
    return kQueries * (p.value_pitch + p.moment_pitch + 8);
  }
  static int shared_bytes(const ScoresParams& p) {
    return std::max(keys_bytes(p) + 2 * stage_bytes(p), group_bytes(kGroups, kFp32Tiles));
  }

  const ScoresParams& p;
  unsigned char* shared;
  ScoresTile at;
  int thread, lane;
  int key_warp, group;
  std::int64_t key;  // the lane's first of two
  int value_columns, moment_columns;

  // Of the next step: [eight queries][query t, t + 4], two keys.
  float2 logits[kN][2], pair_dots[kN][2];
  float d_values[kFp32Tiles][4], d_keys[kFp32Tiles][4];

  static __device__ __forceinline__ void run(const ScoresParams& p) {
    const int thread = thread_index(), warp = thread / 32;
    const auto at = ScoresTile::of(p, kKeys);
    KeysBackwardFp32 self{p,
                          &shared_memory<unsigned char>(),
                          at,
                          thread,
                          thread % 32,
                          warp % kKeyWarps,
                          warp / kKeyWarps,
                          at.first + warp % kKeyWarps * 16 + thread % 32 / 4 * 2,
                          tiles_of_chunk(p.d_value_line, at.chunk, kFp32Tiles) * 8,
                          tiles_of_chunk(p.moment_line, at.chunk, kFp32Tiles) * 8,
                          {},
                          {},
                          {},
                          {}};
    self.all();
  }

  __device__ __forceinline__ unsigned char* stage(std::int64_t tile) const {
    return shared + keys_bytes(p) + tile % 2 * stage_bytes(p);
  }

  __device__ __forceinline__ void copy_values() const {
    const int pitch = p.value_pitch;
    const auto* from =
        static_cast<const unsigned char*>(p.values) + (at.head * p.n + at.first) * p.value_line * 4;
    // Keys 2g and 2g + 8 as g is even or odd, or one more: so rows g of an operand, of which eight
    // lanes read two, are lines i and i + 4.
    copy_lines<kKeys>(shared, from, p.value_line * 4, p.n - at.first, p.value_line * 4, pitch - 32,
                      p.value_room, thread, [pitch](int key, int piece) {
                        return fp32_piece_at(key / 16 * 16 + line_of_row(key % 16 / 2, key % 2),
                                             piece, pitch);
                      });
  }

  // Of row g or g + 8 of an operand.
  static __device__ __forceinline__ int line_of_row(int g, int half) {
    return half * 8 + g % 2 * 4 + g / 2;
  }

  __device__ __forceinline__ void copy(std::int64_t tile) const {
    const std::int64_t first = tile * kQueries, count = p.rows - first;
    if (count > 0) {
      unsigned char* to = stage(tile);
      const std::int64_t line = at.head * p.n + p.first_row + first;
      const int pitch = p.value_pitch, moment_pitch = p.moment_pitch;
      copy_lines<kQueries>(
          to, static_cast<const unsigned char*>(p.d_gathered) + line * p.value_line * 4,
          p.value_line * 4, count, p.value_line * 4, pitch - 32, p.value_room, thread,
          [pitch](int i, int piece) { return fp32_piece_at(i, piece, pitch); });
      to += kQueries * pitch;
      copy_lines<kQueries>(
          to,
          static_cast<const unsigned char*>(p.moments) +
              (line * p.moment_line + at.chunk * kFp32Columns) * 4,
          p.moment_line * 4, count, moment_columns * 4, moment_pitch - 32, p.moment_room, thread,
          [moment_pitch](int i, int piece) { return fp32_piece_at(i, piece, moment_pitch); });
      to += kQueries * moment_pitch;
      for (int i = thread; i < 2 * kQueries; i += kScoresThreads) {
        const int query = i % kQueries;
        const float* from = i < kQueries ? p.log_sums : p.row_dots;
        const bool here = query < count;
        sm80::cp_async_4(to + i * 4, from + line + (here ? query : 0), here ? 4 : 0);
      }
    }
    sm80::cp_async_commit();
  }

  // Of the block's queries from `first` on: what a warp adds to its results next.
  __device__ __forceinline__ void load_pairs(std::int64_t first) {
    const float infinity = __uint_as_float(0x7f800000u);
    const std::int64_t query = first + lane % 4;
    const std::int64_t from = (at.head * p.rows + query) * p.line + key;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const std::int64_t offset = from + (j * 8 + e * 4) * p.line;
        const bool here = query + j * 8 + e * 4 < p.rows && key < p.line;
        logits[j][e] = here ? *reinterpret_cast<const float2*>(p.logits + offset)
                            : make_float2(-infinity, -infinity);
        if (p.pair_dots != nullptr) {
          pair_dots[j][e] = here ? *reinterpret_cast<const float2*>(p.pair_dots + offset)
                                 : make_float2(0.0f, 0.0f);
        }
      }
    }
  }

  __device__ __forceinline__ void all() {
    copy_values();
    copy(0);
    load_pairs(group * kStep);
    const std::int64_t count = ceil_div(p.rows, kQueries);
    for (std::int64_t tile = 0; tile < count; ++tile) {
      sm80::cp_async_wait<0>();
      __syncthreads();
      copy(tile + 1);
      step(stage(tile), tile * kQueries + group * kStep);
    }
    sm80::cp_async_wait<0>();
    __syncthreads();
    auto* free = reinterpret_cast<float4*>(shared);
    add_groups<kGroups>(d_values, free, thread);
    add_groups<kGroups>(d_keys, free, thread);
    if (group == 0) store();
  }

  // The group's queries of a stage, `first` of the block.
  __device__ __forceinline__ void step(const unsigned char* lines, std::int64_t first) {
    const unsigned char* moments = lines + kQueries * p.value_pitch;
    const int query = group * kStep;
    const auto* numbers =
        reinterpret_cast<const float*>(moments + kQueries * p.moment_pitch) + query;
    float weights[kN][4], gradients[kN][4];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float log_sum = numbers[j * 8 + e * 4 + lane % 4];
        const bool pairs = p.pair_dots != nullptr;
        weights[j][e] = sm80::exp2_approx(logits[j][e].x - log_sum);
        weights[j][2 + e] = sm80::exp2_approx(logits[j][e].y - log_sum);
        gradients[j][e] = pairs ? pair_dots[j][e].x : 0.0f;
        gradients[j][2 + e] = pairs ? pair_dots[j][e].y : 0.0f;
      }
    }
    load_pairs(first + kQueries);
    multiply(gradients, lines, query);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float row_dot = numbers[kQueries + j * 8 + e % 2 * 4 + lane % 4];
        gradients[j][e] = score_gradient(weights[j][e], gradients[j][e], row_dot);
      }
    }
    if (at.chunk == 0) store_gradients(gradients, first);
    add(d_values, weights, lines, query, p.value_pitch, at.chunk * (kFp32Columns / 4),
        value_columns);
    add(d_keys, gradients, moments, query, p.moment_pitch, 0, moment_columns);
  }

  __device__ __forceinline__ void add(float (&sums)[kFp32Tiles][4], const float (&rows)[kN][4],
                                      const unsigned char* lines, int query, int pitch, int piece,
                                      int columns) const {
    typename Product::Left left[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) left[j].set(e, rows[j][e % 2 * 2 + e / 2]);
    }
    Product::add(sums, left, lines, query, pitch, piece, (columns + 31) / 32, lane);
  }

  // sums += values * lines^T, of the lines from `query` on
  __device__ __forceinline__ void multiply(float (&sums)[kN][4], const unsigned char* lines,
                                           int query) const {
    const int g = lane / 4, t = lane % 4, pitch = p.value_pitch;
    const auto read = [&](const unsigned char* from, int line, int piece, float (&numbers)[4]) {
      const float4 four =
          *reinterpret_cast<const float4*>(from + fp32_piece_at(line, piece, pitch));
      numbers[0] = four.x;
      numbers[1] = four.y;
      numbers[2] = four.z;
      numbers[3] = four.w;
    };
#pragma unroll 1
    for (int first = 0; first < p.value_line / 4; first += 4) {  // behind the line are zeros
      const int piece = first + t;
      float rows[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) read(shared, key_warp * 16 + line_of_row(g, h), piece, rows[h]);
      typename Product::Left left[2];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int e = 0; e < 4; ++e) left[s].set(e, rows[e % 2][s * 2 + e / 2]);
      }
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        // Columns 2t and 2t + 1 of the product are queries t and t + 4.
        float columns[4], sum[4] = {};
        read(lines, query + j * 8 + g % 2 * 4 + g / 2, piece, columns);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          typename Product::Right right;
          right.set(0, columns[s * 2]);
          right.set(1, columns[s * 2 + 1]);
          Product::multiply(Product::kSplit ? sum : sums[j], left[s], right);
        }
        if (Product::kSplit) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[j][e] += sum[e];
        }
      }
    }
  }

  __device__ __forceinline__ void store_gradients(const float (&gradients)[kN][4],
                                                  std::int64_t first) const {
    if (key >= p.line) return;
    const std::int64_t query = first + lane % 4;
    float* to = static_cast<float*>(p.d_logits) + (at.head * p.rows + query) * p.line + key;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (query + j * 8 + e * 4 >= p.rows) continue;
        *reinterpret_cast<float2*>(to + (j * 8 + e * 4) * p.line) =
            make_float2(gradients[j][e], gradients[j][2 + e]);
      }
    }
  }

  __device__ __forceinline__ void store() const {
    const int first = at.chunk * kFp32Columns;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (key + h >= p.n) continue;
      const std::int64_t line = at.head * p.n + key + h;
      store_fp32_sums(p.d_values + line * p.d_value_line + first, d_values, h, value_columns,
                      p.d_value_filled - first, p.accumulate, lane);
      store_fp32_sums(p.d_moments + line * p.moment_line + first, d_keys, h, moment_columns,
                      moment_columns, p.accumulate, lane);
    }
  }
};

template <Mode mode, int queries_of_stage>
__global__ void __launch_bounds__(kScoresThreads, 2)
    keys_backward_fp32_kernel(const __grid_constant__ ScoresParams params) {
  KeysBackwardFp32<mode, queries_of_stage>::run(params);
}

}  // namespace fused_ops::invariant_point_attention
