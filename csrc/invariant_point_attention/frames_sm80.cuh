// SPDX-License-Identifier: Apache-2.0
// From the projections' product to what the pair kernels read: points in the global frame, less the
// centre, and lines of values and moments. A warp takes a head of a residue. Its scalars go from
// line to line in accesses of 16 bytes; its points, whose lines begin anywhere, through shared
// memory.
#pragma once

#include "invariant_point_attention/frames_pieces.cuh"

namespace fused_ops::invariant_point_attention {

struct FramesParams {
  FramesProblem problem;
  unsigned tasks = 0;  // residues times heads
};

constexpr int kMostTail = 104;  // 2 * 3 * kMostPoints + 1, up to a multiple of 8

struct FramesShared {
  float tails[kFrameWarps][3][kMostTail];  // of q_moments, k_moments, values
};

// A point of `projected`, with the bias, which is added there.
template <DType type>
__device__ __forceinline__ Point load_projected(const FramesProblem& problem, std::int64_t row,
                                                int column) {
  Point point = load_point(problem.projected, type, row + column);
  if (type == DType::kFloat32 && problem.projection_bias != nullptr) {
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      point.at[c] += problem.projection_bias[column + c];
      static_cast<float*>(problem.projected)[row + column + c] = point.at[c];
    }
  }
  return point;
}

__device__ __forceinline__ Point global_point(const Frame& frame, const Point& local) {
  Point global = frame.turned(local);
#pragma unroll
  for (int d = 0; d < 3; ++d) global.at[d] += frame.shift[d];
  return global;
}

// q, k and v of the head, 8 numbers a lane.
template <DType type>
__device__ __forceinline__ void move_scalars(const FramesProblem& problem, const Place& place,
                                             std::int64_t row, int lane) {
  const Sizes& sizes = problem.sizes;
  const bool biased = type == DType::kFloat32 && problem.projection_bias != nullptr;
  const std::int64_t moments = place.line * moment_line(sizes, problem.mode);
  const std::int64_t values = place.line * value_line(sizes, problem.mode);
  const int dim = sizes.dim, width = sizes.width();
  for (int at = 8 * lane; at < 3 * dim; at += 8 * 32) {
    const int kind = at < dim ? 0 : at < 2 * dim ? 1 : 2;
    const int in_head = at - kind * dim;
    const int column = kind * width + place.head * dim + in_head;
    void* to = kind == 0 ? problem.q_moments : kind == 1 ? problem.k_moments : problem.values;
    if (to == nullptr && !biased) continue;
    float numbers[8];
    load_numbers_as<type>(problem.projected, row + column, numbers);
    if (biased) {
      float bias[8];
      load_numbers_as<DType::kFloat32>(problem.projection_bias, column, bias);
#pragma unroll
      for (int i = 0; i < 8; ++i) numbers[i] += bias[i];
      store_numbers_as<type>(problem.projected, row + column, numbers);
    }
    if (to != nullptr) {
      store_numbers_as<type>(to, (kind == 2 ? values : moments) + in_head, numbers);
    }
  }
}

template <DType type>
__device__ __forceinline__ void frames_body(const FramesParams& params) {
  const FramesProblem& problem = params.problem;
  const Sizes& sizes = problem.sizes;
  Place place;
  if (!find_place(sizes, params.tasks, place)) return;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  auto& tails = shared_memory<FramesShared>().tails[warp];
  const std::int64_t row = place.node * sizes.projected();
  const int q_numbers = sizes.query_numbers(), v_numbers = sizes.value_numbers();
  const bool has_query = lane < sizes.query_points, has_value = lane < sizes.value_points;

  Point q = {}, k = {}, v = {};
  if (has_query) {
    const int column = place.head * q_numbers + 3 * lane;
    q = load_projected<type>(problem, row, sizes.query_points_at() + column);
    k = load_projected<type>(problem, row, sizes.key_points_at() + column);
  }
  if (has_value) {
    v = load_projected<type>(problem, row,
                             sizes.value_points_at() + place.head * v_numbers + 3 * lane);
  }
  const Frame frame = load_frame(problem.frames, problem.centres[place.batch], place);
  move_scalars<type>(problem, place, row, lane);

  const std::int64_t points = place.line * point_line(sizes);
  if (has_query) {
    q = global_point(frame, q);
    k = global_point(frame, k);
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      problem.q_points[points + 3 * lane + d] = q.at[d];
      problem.k_points[points + 3 * lane + d] = k.at[d];
    }
    split_point<type>(q, lane, q_numbers, tails[0]);
    split_point<type>(k, lane, q_numbers, tails[1]);
  }
  if (lane < point_line(sizes) - q_numbers) {
    problem.q_points[points + q_numbers + lane] = 0.0f;
    problem.k_points[points + q_numbers + lane] = 0.0f;
  }
  if (has_value) split_point<type>(global_point(frame, v), lane, v_numbers, tails[2]);

  // What is after the points.
  const int one = moment_one(sizes, problem.mode) - sizes.dim;
  const int moments = moment_line(sizes, problem.mode), values = value_line(sizes, problem.mode);
  if (lane < moments - sizes.dim - one) {
    tails[0][one + lane] = tails[1][one + lane] = lane == 0 ? 1.0f : 0.0f;
  }
  const int filled = point_copies(problem.mode) * v_numbers;
  if (lane < values - sizes.dim - filled) tails[2][filled + lane] = 0.0f;
  __syncwarp();
  const std::int64_t moment_tail = place.line * moments + sizes.dim;
  if (problem.q_moments != nullptr) {
    store_line<type>(tails[0], moments - sizes.dim, problem.q_moments, moment_tail, lane);
  }
  if (problem.k_moments != nullptr) {
    store_line<type>(tails[1], moments - sizes.dim, problem.k_moments, moment_tail, lane);
  }
  store_line<type>(tails[2], values - sizes.dim, problem.values, place.line * values + sizes.dim,
                   lane);
}

template <DType type>
__global__ void __launch_bounds__(32 * kFrameWarps)
    frames_kernel(const __grid_constant__ FramesParams params) {
  frames_body<type>(params);
}

}  // namespace fused_ops::invariant_point_attention
