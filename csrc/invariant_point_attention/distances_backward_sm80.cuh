// SPDX-License-Identifier: Apache-2.0
// Sums over pairs of dS times the squared distance of points, for the gradient of the head weights.
// A block takes every parts-th tile of a head: queries by keys, a thread two neighbouring keys with
// their points in registers, the queries' points in shared memory.
#pragma once

#include <type_traits>

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "invariant_point_attention/backward.h"

namespace fused_ops::invariant_point_attention {

constexpr int kDistanceThreads = 128;
constexpr int kDistanceRows = 16;                    // queries of a tile
constexpr int kDistanceKeys = 2 * kDistanceThreads;  // keys of a tile
constexpr int kMostDistanceParts = 64;
constexpr int kDistanceLine = 48;   // numbers of the points of a residue
constexpr int kDistanceChunk = 12;  // of those that a thread has in registers at a time

struct DistancesBackwardParams {
  DistancesBackwardProblem problem;
  std::int64_t row_tiles = 0, key_tiles = 0;  // of a batch element
};

struct DistancesBackwardShared {
  alignas(16) float queries[kDistanceRows][kDistanceLine];
  float sums[kDistanceThreads / 32];
};

// dS of two neighbouring keys as it is stored: packed in 16-bit types. The second may lie beyond
// the last and is zero then.
template <DType type>
struct TwoGradients {
  using Stored = std::conditional_t<type == DType::kFloat32, float2, std::uint32_t>;
  Stored stored;

  __device__ __forceinline__ void load(const void* data, std::int64_t index) {
    stored = *reinterpret_cast<const Stored*>(static_cast<const unsigned char*>(data) +
                                              index * bytes_of(type));
  }
  __device__ __forceinline__ float2 get() const {
    if constexpr (type == DType::kFloat32) {
      return stored;
    } else {
      return unpack_two<type>(stored);
    }
  }
};

// Zeros beyond the line.
__device__ __forceinline__ void load_chunk(const float* line, int first, int numbers,
                                           float (&chunk)[kDistanceChunk]) {
#pragma unroll
  for (int i = 0; i < kDistanceChunk; i += 4) {
    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (first + i < numbers) four = *reinterpret_cast<const float4*>(line + first + i);
    chunk[i] = four.x;
    chunk[i + 1] = four.y;
    chunk[i + 2] = four.z;
    chunk[i + 3] = four.w;
  }
}

__device__ __forceinline__ float squared_distance(const float (&a)[kDistanceChunk],
                                                  const float (&b)[kDistanceChunk]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kDistanceChunk; ++i) {
    const float difference = a[i] - b[i];
    sum = fmaf(difference, difference, sum);
  }
  return sum;
}

template <DType type>
__device__ __forceinline__ float distance_tile(const DistancesBackwardProblem& problem,
                                               std::int64_t batch_head, std::int64_t first_row,
                                               std::int64_t first_key,
                                               DistancesBackwardShared& shared) {
  const Sizes& sizes = problem.sizes;
  const int thread = thread_index();
  const int numbers = point_line(sizes);
  const std::int64_t left = problem.block.rows - first_row;
  const int rows = static_cast<int>(left < kDistanceRows ? left : kDistanceRows);
  const std::int64_t key = first_key + 2 * thread;
  const bool inside = key < sizes.n;

  TwoGradients<type> grads[kDistanceRows];
  const std::int64_t stride = pair_line(sizes.n);
  const std::int64_t first = (batch_head * problem.block.rows + first_row) * stride + key;
#pragma unroll
  for (int i = 0; i < kDistanceRows; ++i) {
    grads[i].stored = {};
    if (inside && i < rows) grads[i].load(problem.d_logits, first + i * stride);
  }
  // The tile's queries lie one after the other.
  const float* queries =
      problem.q_points + (batch_head * sizes.n + problem.block.first_row + first_row) * numbers;
  for (int at = thread; at < rows * numbers; at += kDistanceThreads) {
    const int i = at / numbers;
    shared.queries[i][at - i * numbers] = queries[at];
  }
  __syncthreads();

  float sum = 0.0f;
  if (inside) {
    const float* keys = problem.k_points + (batch_head * sizes.n + key) * numbers;
    for (int chunk = 0; chunk < numbers; chunk += kDistanceChunk) {
      float here[kDistanceChunk], next[kDistanceChunk], query[kDistanceChunk];
      load_chunk(keys, chunk, numbers, here);
      load_chunk(keys + (key + 1 < sizes.n ? numbers : 0), chunk, numbers, next);
#pragma unroll
      for (int i = 0; i < kDistanceRows; ++i) {
        if (i >= rows) break;
        load_chunk(shared.queries[i], chunk, numbers, query);
        // A residue that is not there may be anywhere, or nowhere: its dS is zero.
        const float2 grad = grads[i].get();
        if (grad.x != 0.0f) sum = fmaf(grad.x, squared_distance(query, here), sum);
        if (grad.y != 0.0f) sum = fmaf(grad.y, squared_distance(query, next), sum);
      }
    }
  }
  __syncthreads();  // the next tile writes the queries
  return sum;
}

template <DType type>
__device__ __forceinline__ void distances_backward_body(const DistancesBackwardParams& params) {
  const DistancesBackwardProblem& problem = params.problem;
  const Sizes& sizes = problem.sizes;
  auto& shared = shared_memory<DistancesBackwardShared>();
  const int thread = thread_index();
  const int part = static_cast<int>(blockIdx.x) / sizes.heads;
  const int head = static_cast<int>(blockIdx.x) - part * sizes.heads;
  const std::int64_t of_batch = params.row_tiles * params.key_tiles;
  const std::int64_t tiles = sizes.batch * of_batch;
  float sum = 0.0f;
  for (std::int64_t tile = part; tile < tiles; tile += problem.parts) {
    const std::int64_t batch = tile / of_batch, rest = tile - batch * of_batch;
    const std::int64_t row_tile = rest / params.key_tiles;
    const std::int64_t key_tile = rest - row_tile * params.key_tiles;
    sum += distance_tile<type>(problem, batch * sizes.heads + head, row_tile * kDistanceRows,
                               key_tile * kDistanceKeys, shared);
  }
  sum = warp_sum(sum);
  if (thread % 32 == 0) shared.sums[thread / 32] = sum;
  __syncthreads();
  if (thread != 0) return;
  float* to = problem.sums + std::int64_t{part} * sizes.heads + head;
  float all = 0.0f;
#pragma unroll
  for (const float of_warp : shared.sums) all += of_warp;
  const float weight = load_or(problem.head_weights, head, 0.0f);
  all *= -0.5f * problem.point_scale / (1.0f + expf(-weight));
  *to = problem.add_sums ? *to + all : all;
}

template <DType type>
__global__ void __launch_bounds__(kDistanceThreads)
    distances_backward_kernel(const __grid_constant__ DistancesBackwardParams params) {
  distances_backward_body<type>(params);
}

}  // namespace fused_ops::invariant_point_attention
