// SPDX-License-Identifier: Apache-2.0
// dS, and the sums over queries: d_keys = dS^T q_moments, d_values = P^T d_gathered.
//
// A block has a tile of keys of one head and walks the queries, which come through a ring of two
// stages. dP comes out transposed, values d_gathered^T with keys along M, so that P^T and dS^T are
// at once the left operands of the next products. Which key is which row of an operand is free:
// with keys 2g and 2g + 1 as rows g and g + 8, a lane reads two neighbouring logits of a query and
// writes two neighbouring dS, eight lanes a whole sector, and nothing of this goes through shared
// memory. Columns of the results that do not fit the registers are further blocks'.
#pragma once

#include "invariant_point_attention/scores_pieces.cuh"

namespace fused_ops::invariant_point_attention {

// `tiles_of_columns`: of each result in registers. Warps that do not have keys of their own share
// the queries of a stage.
template <Mode mode, int tiles_of_columns, int key_warps, int queries_of_stage>
struct KeysBackward {
  static constexpr DType kType = type_of(mode);
  static constexpr int kTiles = tiles_of_columns;
  static constexpr int kKeys = 16 * key_warps;
  static constexpr int kGroups = kScoresWarps / key_warps;
  static constexpr int kQueries = queries_of_stage;
  static constexpr int kGroupQueries = kQueries / kGroups;
  static constexpr int kStep = kGroupQueries < 32 ? 16 : 32;  // queries that a warp takes at once
  static constexpr int kN = kStep / 8;

  // Stages begin behind the keys' values.
  static __host__ __device__ constexpr int keys_bytes(const ScoresParams& p) {
    return kKeys * p.value_pitch;
  }
  static __host__ __device__ constexpr int stage_bytes(const ScoresParams& p) {
    return kQueries * (p.value_pitch + p.moment_pitch + 8);
  }
  static int shared_bytes(const ScoresParams& p) {
    return std::max(keys_bytes(p) + 2 * stage_bytes(p), group_bytes(kGroups, kTiles));
  }

  const ScoresParams& p;
  unsigned char* shared;
  ScoresTile at;
  int thread, lane;
  int key_warp, group;
  std::int64_t key;  // the lane's first of two
  int value_tiles, moment_tiles;

  // Of the step, then of the next one: [eight queries][query 2t, 2t + 1], two keys.
  float2 logits[kN][2], pair_dots[kN][2];
  float d_values[kTiles][4], d_keys[kTiles][4];

  static __device__ __forceinline__ void run(const ScoresParams& p) {
    const int thread = thread_index(), warp = thread / 32;
    const auto at = ScoresTile::of(p, kKeys);
    KeysBackward self{p,
                      &shared_memory<unsigned char>(),
                      at,
                      thread,
                      thread % 32,
                      warp % key_warps,
                      warp / key_warps,
                      at.first + warp % key_warps * 16 + thread % 32 / 4 * 2,
                      tiles_of_chunk(p.d_value_line, at.chunk, kTiles),
                      tiles_of_chunk(p.moment_line, at.chunk, kTiles),
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
        static_cast<const unsigned char*>(p.values) + (at.head * p.n + at.first) * p.value_line * 2;
    copy_lines<kKeys>(shared, from, p.value_line * 2, p.n - at.first, p.value_line * 2, pitch - 16,
                      p.value_room, thread, [pitch](int line, int piece) {
                        const int row = line / 16 * 16 + line % 2 * 8 + line % 16 / 2;
                        return row * pitch + piece * 16;
                      });
  }

  __device__ __forceinline__ void copy(std::int64_t tile) const {
    const std::int64_t first = tile * kQueries, count = p.rows - first;
    if (count > 0) {
      unsigned char* to = stage(tile);
      const std::int64_t line = at.head * p.n + p.first_row + first;
      const int pitch = p.value_pitch, moment_pitch = p.moment_pitch;
      copy_lines<kQueries>(
          to, static_cast<const unsigned char*>(p.d_gathered) + line * p.value_line * 2,
          p.value_line * 2, count, p.value_line * 2, pitch - 16, p.value_room, thread,
          [pitch](int i, int piece) { return i * pitch + piece * 16; });
      to += kQueries * pitch;
      copy_lines<kQueries>(
          to,
          static_cast<const unsigned char*>(p.moments) +
              (line * p.moment_line + at.chunk * (kTiles * 8)) * 2,
          p.moment_line * 2, count, moment_tiles * 16, (moment_tiles + 1) / 2 * 32, p.moment_room,
          thread, [moment_pitch](int i, int piece) { return i * moment_pitch + piece * 16; });
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
    const std::int64_t query = first + lane % 4 * 2;
    const std::int64_t from = (at.head * p.rows + query) * p.line + key;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const std::int64_t offset = from + (j * 8 + e) * p.line;
        const bool here = query + j * 8 + e < p.rows && key < p.line;
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
    load_pairs(group * kGroupQueries);
    const std::int64_t count = ceil_div(p.rows, kQueries);
    for (std::int64_t tile = 0; tile < count; ++tile) {
      sm80::cp_async_wait<0>();
      __syncthreads();
      copy(tile + 1);
#pragma unroll 1
      for (int i = 0; i < kGroupQueries; i += kStep) {
        const int query = group * kGroupQueries + i;
        const std::int64_t next = i + kStep < kGroupQueries
                                      ? tile * kQueries + query + kStep
                                      : (tile + 1) * kQueries + group * kGroupQueries;
        step(stage(tile), query, tile * kQueries + query, next);
      }
    }
    sm80::cp_async_wait<0>();
    __syncthreads();
    auto* free = reinterpret_cast<float4*>(shared);
    add_groups<kGroups>(d_values, free, thread);
    add_groups<kGroups>(d_keys, free, thread);
    if (group == 0) store();
  }

  // kStep queries: from number `query` of the stage on, `first` of the block.
  __device__ __forceinline__ void step(unsigned char* stage, int query, std::int64_t first,
                                       std::int64_t next) {
    const unsigned char* lines = stage + query * p.value_pitch;
    const unsigned char* moments = stage + kQueries * p.value_pitch + query * p.moment_pitch;
    const auto* numbers =
        reinterpret_cast<const float*>(stage + kQueries * (p.value_pitch + p.moment_pitch)) + query;
    float weights[kN][4], gradients[kN][4];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float log_sum = numbers[j * 8 + lane % 4 * 2 + e];
        const bool pairs = p.pair_dots != nullptr;
        weights[j][e] = sm80::exp2_approx(logits[j][e].x - log_sum);
        weights[j][2 + e] = sm80::exp2_approx(logits[j][e].y - log_sum);
        gradients[j][e] = pairs ? pair_dots[j][e].x : 0.0f;
        gradients[j][2 + e] = pairs ? pair_dots[j][e].y : 0.0f;
      }
    }
    load_pairs(next);
    multiply(gradients, lines);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float row_dot = numbers[kQueries + j * 8 + lane % 4 * 2 + e % 2];
        gradients[j][e] = score_gradient(weights[j][e], gradients[j][e], row_dot);
      }
    }
    if (at.chunk == 0) store_gradients(gradients, first);
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      std::uint32_t left[4], d_left[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // eight queries of both rows, then the next eight
        const int j = i + e / 2, h = e % 2 * 2;
        left[e] = pack_two<kType>(weights[j][h], weights[j][h + 1]);
        d_left[e] = pack_two<kType>(gradients[j][h], gradients[j][h + 1]);
      }
      const auto place = [&](const unsigned char* of, int pitch, int column) {
        return sm80::shared_address(of + (i * 8 + lane % 16) * pitch + lane / 16 * 16 + column * 2);
      };
      if (value_tiles > 0) {
        add_lines<mode>(d_values, left, place(lines, p.value_pitch, at.chunk * (kTiles * 8)),
                        value_tiles);
      }
      if (moment_tiles > 0) {
        add_lines<mode>(d_keys, d_left, place(moments, p.moment_pitch, 0), moment_tiles);
      }
    }
  }

  // sums += values * lines^T
  __device__ __forceinline__ void multiply(float (&sums)[kN][4], const unsigned char* lines) const {
    const int pitch = p.value_pitch;
    const auto left =
        sm80::shared_address(shared + (key_warp * 16 + lane % 16) * pitch + lane / 16 * 16);
    const auto right =
        sm80::shared_address(lines + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 16);
#pragma unroll 2
    for (int column = 0; column < p.value_line; column += 16) {
      std::uint32_t rows[4];
      sm80::ldmatrix_x4(rows, left + column * 2);
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        std::uint32_t four[4];
        sm80::ldmatrix_x4(four, right + column * 2 + j * 8 * pitch);
        const std::uint32_t first[2] = {four[0], four[1]}, second[2] = {four[2], four[3]};
        multiply_16<mode>(sums[j], rows, first);
        multiply_16<mode>(sums[j + 1], rows, second);
      }
    }
  }

  __device__ __forceinline__ void store_gradients(const float (&gradients)[kN][4],
                                                  std::int64_t first) const {
    if (key >= p.line) return;
    const std::int64_t query = first + lane % 4 * 2;
    auto* to = static_cast<std::uint16_t*>(p.d_logits) + (at.head * p.rows + query) * p.line + key;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (query + j * 8 + e >= p.rows) continue;
        *reinterpret_cast<std::uint32_t*>(to + (j * 8 + e) * p.line) =
            pack_two<kType>(gradients[j][e], gradients[j][2 + e]);
      }
    }
  }

  __device__ __forceinline__ void store() const {
    const int first = at.chunk * (kTiles * 8) + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (key + h >= p.n) continue;
      const std::int64_t line = at.head * p.n + key + h;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int column = first + j * 8;
        // Behind the gradients of the points there are more copies of them.
        const float x = column < p.d_value_filled ? d_values[j][2 * h] : 0.0f;
        const float y = column + 1 < p.d_value_filled ? d_values[j][2 * h + 1] : 0.0f;
        if (j < value_tiles) {
          store_sums(p.d_values + line * p.d_value_line + column, x, y, p.accumulate);
        }
        if (j < moment_tiles) {
          store_sums(p.d_moments + line * p.moment_line + column, d_keys[j][2 * h],
                     d_keys[j][2 * h + 1], p.accumulate);
        }
      }
    }
  }
};

template <Mode mode, int tiles_of_columns, int key_warps, int queries_of_stage>
__global__ void __launch_bounds__(kScoresThreads, tiles_of_columns <= 8 ? 3 : 2)
    keys_backward_kernel(const __grid_constant__ ScoresParams params) {
  KeysBackward<mode, tiles_of_columns, key_warps, queries_of_stage>::run(params);
}

}  // namespace fused_ops::invariant_point_attention
