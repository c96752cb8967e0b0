// SPDX-License-Identifier: Apache-2.0
// Softmax over stored logits, times the values; gathered points back to the frame of the query. A
// block has 16 queries of a head.
#pragma once

#include "common/check.h"
#include "common/launch.h"
#include "invariant_point_attention/weighted_sums.cuh"

namespace fused_ops::invariant_point_attention {

struct ValuesParams {
  ValuesProblem problem;
  unsigned tiles = 0;  // of queries
};

template <class Product, int columns, int all_columns>
struct ValuesKernel {
  using Sum = WeightedSums<Product, columns, all_columns, true>;
  static constexpr DType kType = Product::kType;

  const ValuesProblem& problem;
  typename Sum::Shared& shared;
  int thread;
  int head;
  std::int64_t batch, first_query;  // the latter counts from the block's first row on

  // (batch, head), then the tiles: neighbours share values.
  static __device__ __forceinline__ void run(const ValuesParams& params) {
    const unsigned tile = blockIdx.x % params.tiles;
    const unsigned line = blockIdx.x / params.tiles;
    const auto heads = static_cast<unsigned>(params.problem.sizes.heads);
    ValuesKernel{params.problem, shared_memory<typename Sum::Shared>(),
                 thread_index(), static_cast<int>(line % heads),
                 line / heads,   std::int64_t{tile} * kRows}
        .all();
  }

  __device__ __forceinline__ bool exists(int row) const {
    return first_query + row < problem.block.rows;
  }
  __device__ __forceinline__ std::int64_t residue(int row) const {
    return problem.block.first_row + first_query + row;
  }
  __device__ __forceinline__ std::int64_t feature_line(int row) const {
    return (batch * problem.sizes.n + residue(row)) * problem.sizes.features();
  }
  __device__ __forceinline__ const float* logits(int row) const {
    if (!exists(row)) return nullptr;
    const std::int64_t line =
        (batch * problem.sizes.heads + head) * problem.block.rows + first_query + row;
    return problem.logits + line * pair_line(problem.sizes.n);
  }

  __device__ __forceinline__ void all() {
    const Sizes& sizes = problem.sizes;
    const Centre centre = problem.centres[batch];
    const bool dead = centre.present == 0.0f;
    if (!dead) {
      find_largest();
      const int width =
          value_line(sizes, kType == DType::kFloat32 ? Mode::kSplit : Mode::kBFloat16);
      const std::int64_t first = (batch * sizes.heads + head) * sizes.n * width;
      const Lines lines = {static_cast<const typename Product::Number*>(problem.values) + first,
                           kType, width, static_cast<int>(sizes.n), width};
      const float* const rows[2] = {logits(thread % 32 / 4), logits(thread % 32 / 4 + 8)};
      Sum sum{shared, lines, thread};
      for (int column = 0; column < width; column += columns) {
        sum.add_up(rows, column, column, sizes.dim);
      }
    }
    store_scalars(dead);
    store_points(dead, centre);
    if (head == 0) {
      const int filled = sizes.features() - sizes.features_filled();
      for (int i = thread; i < kRows * filled; i += kThreads) {
        const int row = i / filled;
        if (!exists(row)) continue;
        const std::int64_t at = feature_line(row) + sizes.features_filled() + i % filled;
        store_number(problem.features, kType, at, 0.0f);
      }
    }
    if (problem.log_sums && thread < kRows && exists(thread)) {
      problem.log_sums[(batch * sizes.heads + head) * sizes.n + residue(thread)] =
          dead ? __builtin_huge_valf() : shared.shifts[thread] + __log2f(shared.sums[thread].exact);
    }
  }

  // A warp has every fourth row. NaN wins; where all are -inf, -inf less itself makes the NaN that
  // softmax gives.
  __device__ __forceinline__ void find_largest() const {
    for (int row = thread / 32; row < kRows; row += kWarps) {
      const float* line = logits(row);
      float largest = -__builtin_huge_valf();
      if (line) {
        const int n = static_cast<int>(pair_line(problem.sizes.n));
        for (int key = thread % 32 * 4; key < n; key += 128) {
          const float4 four = *reinterpret_cast<const float4*>(line + key);
          largest = sm80::max_nan(
              largest, sm80::max_nan(sm80::max_nan(four.x, four.y), sm80::max_nan(four.z, four.w)));
        }
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        largest = sm80::max_nan(largest, __shfl_xor_sync(0xffffffff, largest, distance));
      }
      if (thread % 32 == 0) shared.shifts[row] = line ? largest - Product::kShift : 0.0f;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void store_scalars(bool dead) const {
    const int dim = problem.sizes.head_dim;
    for (int i = thread; i < kRows * dim; i += kThreads) {
      const int row = i / dim, column = i % dim;
      if (!exists(row)) continue;
      const float x = dead ? 0.0f : shared.totals[row][column] / shared.sums[row].rounded;
      store_number(problem.features, kType, feature_line(row) + head * dim + column, x);
    }
  }

  __device__ __forceinline__ void store_points(bool dead, const Centre& centre) const {
    const Sizes& sizes = problem.sizes;
    const int points = sizes.value_points;
    for (int i = thread; i < kRows * points; i += kThreads) {
      const int row = i / points, point = i % points;
      if (!exists(row)) continue;
      const std::int64_t r = residue(row);
      float global[3] = {}, local[3] = {};
      if (!dead) {
        const Frames& frames = problem.frames;
        const float sum = Product::kExactPoints ? shared.sums[row].exact : shared.sums[row].rounded;
#pragma unroll
        for (int d = 0; d < 3; ++d) {
          const int column = sizes.dim + point * 3 + d;
          float x = shared.totals[row][column];
          if (kType != DType::kFloat32) x += shared.totals[row][column + sizes.value_numbers()];
          const float t = load_number(frames.translations.data, frames.translations.type,
                                      batch * frames.translations_stride + r * 3 + d);
          global[d] = fmaf(-sum, t - centre.at[d], x) / sum;
        }
#pragma unroll
        for (int d = 0; d < 3; ++d) {
#pragma unroll
          for (int c = 0; c < 3; ++c) {
            local[c] +=
                global[d] * load_number(frames.rotations.data, frames.rotations.type,
                                        batch * frames.rotations_stride + r * 9 + c * 3 + d);
          }
        }
      }
      const int in_head = head * points + point;
      const std::int64_t line = feature_line(row);
      float square = problem.norm_eps;
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        square += local[d] * local[d];
        store_number(problem.features, kType, line + sizes.points_at() + in_head * 3 + d, local[d]);
        if (problem.gathered) {
          const std::int64_t node = batch * sizes.n + r;
          problem.gathered[(node * sizes.heads * points + in_head) * 3 + d] = global[d];
        }
      }
      if (sizes.norms) {
        store_number(problem.features, kType, line + sizes.norms_at() + in_head,
                     dead ? 0.0f : sqrtf(square));
      }
    }
  }
};

// Four blocks of fp32 products on a multiprocessor would spill.
template <class Product, int columns, int all_columns>
__global__ void __launch_bounds__(kThreads,
                                  Product::kType == DType::kFloat32 || all_columns > columns ? 3
                                                                                             : 4)
    values_kernel(const __grid_constant__ ValuesParams params) {
  ValuesKernel<Product, columns, all_columns>::run(params);
}

template <class Product, int columns, int all_columns>
void launch_values(const char* what, const ValuesProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  ValuesParams params;
  params.problem = problem;
  const std::int64_t tiles = ceil_div(problem.block.rows, kRows);
  const std::int64_t blocks = sizes.batch * sizes.heads * tiles;
  FO_CHECK_VALUE(blocks < std::int64_t{1} << 31, what, ": too many queries for one launch, got ",
                 blocks, " blocks");
  params.tiles = static_cast<unsigned>(tiles);
  launch(what, values_kernel<Product, columns, all_columns>, static_cast<unsigned>(blocks),
         kThreads, sizeof(WeightedSumsShared<Product, columns, all_columns>), stream, params);
}

}  // namespace fused_ops::invariant_point_attention
