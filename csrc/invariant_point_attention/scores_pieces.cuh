// SPDX-License-Identifier: Apache-2.0
// What the kernels of the scores' backward share: their parameters, who computes what, and lines of
// a head's numbers in shared memory.
#pragma once

#include <algorithm>
#include <limits>

#include "common/check.h"
#include "common/cuda/sm80/numbers.cuh"
#include "invariant_point_attention/backward.h"

namespace fused_ops::invariant_point_attention {

constexpr int kScoresWarps = 4;
constexpr int kScoresThreads = 32 * kScoresWarps;
// So that a block runs on every device from compute capability 8.0 on.
constexpr int kMostScoresShared = 99 * 1024;

// Lines are copied by groups of `1 << room` threads, a piece of 16 bytes each at a time.
constexpr int room_of(int pieces) {
  return pieces <= 8 ? 3 : pieces <= 16 ? 4 : 5;
}

struct ScoresParams {
  const float* logits = nullptr;
  const float* log_sums = nullptr;
  const float* row_dots = nullptr;
  const float* pair_dots = nullptr;
  const void* values = nullptr;
  const void* d_gathered = nullptr;
  const void* moments = nullptr;  // of queries for keys_backward, of keys for queries_backward
  void* d_logits = nullptr;
  float* d_moments = nullptr;  // d_keys or d_queries
  float* d_values = nullptr;
  std::int64_t n = 0;
  std::int64_t line = 0;  // pair_line
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  unsigned tiles = 0;   // of keys or queries
  unsigned chunks = 0;  // of columns of the results
  int value_line = 0;
  int moment_line = 0;
  int d_value_line = 0;
  int d_value_filled = 0;
  // Of lines in shared memory, in bytes.
  int value_pitch = 0;
  int moment_pitch = 0;
  int value_room = 0;
  int moment_room = 0;
  bool accumulate = false;
};

inline ScoresParams scores_params(const ScoresBackwardProblem& problem) {
  const Sizes& sizes = problem.sizes;
  ScoresParams p;
  p.logits = problem.logits;
  p.log_sums = problem.log_sums;
  p.row_dots = problem.row_dots;
  p.pair_dots = problem.pair_dots;
  p.values = problem.values;
  p.d_gathered = problem.d_gathered;
  p.d_logits = problem.d_logits;
  p.d_values = problem.d_values;
  p.n = sizes.n;
  p.line = pair_line(sizes.n);
  p.first_row = problem.block.first_row;
  p.rows = problem.block.rows;
  p.value_line = value_line(sizes, problem.mode);
  p.moment_line = moment_line(sizes, problem.mode);
  p.d_value_line = d_value_line(sizes);
  p.d_value_filled = sizes.dim + sizes.value_numbers();
  p.accumulate = problem.accumulate;
  return p;
}

// Blocks of threads for `count` rows of results, `tile` of them each, of every head.
inline unsigned cut_scores(const char* what, const Sizes& sizes, std::int64_t count, int tile,
                           std::int64_t chunks, ScoresParams* p) {
  const std::int64_t tiles = ceil_div(count, tile);
  const std::int64_t blocks = sizes.batch * sizes.heads * tiles * chunks;
  FO_CHECK_VALUE(blocks <= std::numeric_limits<std::int32_t>::max(), what,
                 ": the problem must need at most 2^31 - 1 blocks of threads, got ", blocks);
  p->tiles = static_cast<unsigned>(tiles);
  p->chunks = static_cast<unsigned>(chunks);
  return static_cast<unsigned>(blocks);
}

struct ScoresTile {
  std::int64_t head;   // and batch element
  std::int64_t first;  // key or query; of the block of queries
  int chunk;

  static __device__ __forceinline__ ScoresTile of(const ScoresParams& p, int tile_rows) {
    const unsigned rest = blockIdx.x / p.tiles;
    return {rest / p.chunks, std::int64_t{blockIdx.x % p.tiles} * tile_rows,
            static_cast<int>(rest % p.chunks)};
  }
};

// Tiles of eight columns that a chunk has of a line.
__device__ __forceinline__ int tiles_of_chunk(int line, int chunk, int most) {
  const int left = line / 8 - chunk * most;
  return left < 0 ? 0 : left < most ? left : most;
}

// Asks for `lines` lines by all threads: the first `count`, zeros for the others. Of each,
// `line_bytes` bytes (a multiple of 16), then zeros up to `room_bytes`. `piece_at(line, piece)`:
// where a piece goes.
template <int lines, class PieceAt>
__device__ __forceinline__ void copy_lines(unsigned char* to, const unsigned char* from,
                                           std::int64_t stride, std::int64_t count, int line_bytes,
                                           int room_bytes, int room, int thread, PieceAt piece_at) {
  const int step = kScoresThreads >> room;
  const int first = (thread & ((1 << room) - 1)) * 16;
  for (int line = thread >> room; line < lines; line += step) {
    for (int at = first; at < room_bytes; at += 16 << room) {
      const bool here = line < count && at < line_bytes;
      sm80::cp_async_16(to + piece_at(line, at / 16), here ? from + line * stride + at : from,
                        here ? 16 : 0);
    }
  }
}

// Sums that several warps have of the same results, added up in the first group's registers. The
// memory is free when all threads have come here. Only that group's sums are whole afterwards.
template <int kGroups, int kTiles>
__device__ __forceinline__ void add_groups(float (&sums)[kTiles][4], float4* shared, int thread) {
  if constexpr (kGroups > 1) {
    constexpr int kGroupThreads = kScoresThreads / kGroups;
    const int group = thread / kGroupThreads, place = thread % kGroupThreads;
#pragma unroll 1
    for (int other = 1; other < kGroups; ++other) {
      __syncthreads();
      if (group == other) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          shared[j * kGroupThreads + place] =
              make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
        }
      }
      __syncthreads();
      if (group == 0) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const float4 four = shared[j * kGroupThreads + place];
          sums[j][0] += four.x;
          sums[j][1] += four.y;
          sums[j][2] += four.z;
          sums[j][3] += four.w;
        }
      }
    }
  }
}

constexpr int group_bytes(int groups, int tiles) {
  return groups > 1 ? tiles * (kScoresThreads / groups) * 16 : 0;
}

// Two numbers of a result.
__device__ __forceinline__ void store_sums(float* to, float first, float second, bool accumulate) {
  float2* two = reinterpret_cast<float2*>(to);
  const float2 before = accumulate ? *two : make_float2(0.0f, 0.0f);
  *two = make_float2(before.x + first, before.y + second);
}

// P (dP - D). Where the weight is zero, as of absent keys, dP may be anything.
__device__ __forceinline__ float score_gradient(float weight, float d_weight, float row_dot) {
  return weight == 0.0f ? 0.0f : weight * (d_weight - row_dot);
}

// 16-bit numbers: lines of an even number of pieces and one more, so that the same piece of eight
// lines lies in different banks.
constexpr int scores_pitch(int numbers) {
  return static_cast<int>(round_up(numbers, 16)) * 2 + 16;
}

template <Mode mode>
__device__ __forceinline__ void multiply_16(float (&d)[4], const std::uint32_t (&a)[4],
                                            const std::uint32_t (&b)[2]) {
  mode == Mode::kBFloat16 ? sm80::mma_bf16(d, a, b) : sm80::mma_f16(d, a, b);
}

// sums += left * lines, of 16 lines at `at`, which is the lane's address: line lane % 16, piece
// lane / 16. `tiles`: of the columns; they come in pairs.
template <Mode mode, int kTiles>
__device__ __forceinline__ void add_lines(float (&sums)[kTiles][4], const std::uint32_t (&left)[4],
                                          sm80::SharedAddress at, int tiles) {
#pragma unroll
  for (int j = 0; j < kTiles; j += 2) {
    if (j >= tiles) break;
    std::uint32_t four[4];
    sm80::ldmatrix_x4_trans(four, at + j * 16);
    const std::uint32_t first[2] = {four[0], four[1]}, second[2] = {four[2], four[3]};
    multiply_16<mode>(sums[j], left, first);
    multiply_16<mode>(sums[j + 1], left, second);
  }
}

}  // namespace fused_ops::invariant_point_attention
