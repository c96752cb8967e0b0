// SPDX-License-Identifier: Apache-2.0
// From the sums over pairs to the gradients of the projected numbers and of the frames. A block
// takes a residue, a warp one of its heads, so that the frame's gradient is a sum over the block.
#pragma once

#include "invariant_point_attention/frames_pieces.cuh"
#include "invariant_point_attention/softplus.cuh"

namespace fused_ops::invariant_point_attention {

struct FramesBackwardParams {
  FramesBackwardProblem problem;
};

constexpr int kFrameNumbers = 12;  // of a rotation, then of a translation

struct FramesBackwardShared {
  float sums[kMostHeads][kFrameNumbers];
};

// What a lane adds to the gradient of the residue's frame.
struct FrameGradient {
  float rotation[3][3] = {};
  float shift[3] = {};

  __device__ __forceinline__ void add(const Point& local, const Point& global) {
#pragma unroll
    for (int c = 0; c < 3; ++c) {
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        rotation[c][d] = fmaf(local.at[c], global.at[d], rotation[c][d]);
      }
    }
  }

  __device__ __forceinline__ void shift_by(const Point& global, float sign) {
#pragma unroll
    for (int d = 0; d < 3; ++d) shift[d] = fmaf(sign, global.at[d], shift[d]);
  }

  __device__ __forceinline__ float number(int i) const {
    return i < 9 ? rotation[i / 3][i % 3] : shift[i - 9];
  }
};

// weight * (sum of dS times the other's points - the own point * sum of dS), the other's points in
// high and low parts.
template <DType type>
__device__ __forceinline__ Point distance_gradient(const float* sums, const float* own, int dim,
                                                   int numbers, int index, float weight) {
  const float total = sums[dim + (type == DType::kFloat32 ? 1 : 2) * numbers];
  Point grad;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    const float* at = sums + dim + 3 * index + d;
    float others = at[0];
    if constexpr (type != DType::kFloat32) others += at[numbers];
    grad.at[d] = weight * fmaf(-own[3 * index + d], total, others);
  }
  return grad;
}

template <DType type>
struct FramesBackward {
  const FramesBackwardProblem& problem;
  const Sizes& sizes;
  const Frame& frame;
  const Place& place;
  std::int64_t row;  // of `projected`
  int lane;
  FrameGradient sums;

  // Scalars of a head: the first numbers of a line of sums.
  __device__ __forceinline__ void scalars(const float* line, int first, float scale) const {
    for (int at = lane; at < sizes.dim; at += 32) {
      store_number(problem.d_projected, type, row + first + place.head * sizes.dim + at,
                   scale * line[at]);
    }
  }

  // A point whose global coordinates have this gradient.
  __device__ __forceinline__ void point(const Point& grad, int column) {
    const Point local = load_point(problem.projected, type, row + column);
    sums.add(local, grad);
    sums.shift_by(grad, 1.0f);
    const Point back = frame.turned_back(grad);
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      store_number(problem.d_projected, type, row + column + c, back.at[c]);
    }
  }

  __device__ __forceinline__ void head() {
    const int q_numbers = sizes.query_numbers(), v_numbers = sizes.value_numbers();
    const std::int64_t moments = place.line * moment_line(sizes, problem.mode);
    const std::int64_t points = place.line * point_line(sizes);
    const float* d_values = problem.d_values + place.line * d_value_line(sizes);
    const float weight =
        problem.point_scale *
        softplus(load_number(problem.head_weights.data, problem.head_weights.type, place.head));
    scalars(problem.d_queries + moments, 0, problem.scalar_scale);
    scalars(problem.d_keys + moments, sizes.width(), problem.scalar_scale);
    scalars(d_values, 2 * sizes.width(), 1.0f);
    if (lane < sizes.query_points) {
      const int column = place.head * q_numbers + 3 * lane;
      point(distance_gradient<type>(problem.d_queries + moments, problem.q_points + points,
                                    sizes.dim, q_numbers, lane, weight),
            sizes.query_points_at() + column);
      point(distance_gradient<type>(problem.d_keys + moments, problem.k_points + points, sizes.dim,
                                    q_numbers, lane, weight),
            sizes.key_points_at() + column);
    }
    if (lane < sizes.value_points) {
      point(load_point(d_values, DType::kFloat32, sizes.dim + 3 * lane),
            sizes.value_points_at() + place.head * v_numbers + 3 * lane);
      // The residue as a query: its frame brings back what it has gathered.
      Point gathered;
      const Point grad = gathered_gradient<type>(sizes, frame, place, lane, problem.norm_eps,
                                                 problem.d_features, problem.gathered, gathered);
      sums.add(grad, gathered);
      sums.shift_by(frame.turned(grad), -1.0f);
    }
  }
};

template <DType type>
__device__ __forceinline__ void frames_backward_body(const FramesBackwardParams& params) {
  const FramesBackwardProblem& problem = params.problem;
  const Sizes& sizes = problem.sizes;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  auto& shared = shared_memory<FramesBackwardShared>();
  const Place place = place_of(sizes, blockIdx.x, warp);
  const std::int64_t row = place.node * sizes.projected();
  const Centre& centre = problem.centres[place.batch];
  const bool present = centre.present != 0.0f;  // the same for the block

  if (present) {
    const Frame frame = load_frame(problem.frames, centre, place);
    FramesBackward<type> work{problem, sizes, frame, place, row, lane, {}};
    work.head();
#pragma unroll
    for (int i = 0; i < kFrameNumbers; ++i) {
      const float sum = warp_sum(work.sums.number(i));
      if (lane == 0) shared.sums[warp][i] = sum;
    }
    const int filling = sizes.projected() - sizes.projected_filled();
    if (warp == 0 && lane < filling) {
      store_number(problem.d_projected, type, row + sizes.projected_filled() + lane, 0.0f);
    }
  } else {
    for (int at = thread_index(); at < sizes.projected(); at += 32 * sizes.heads) {
      store_number(problem.d_projected, type, row + at, 0.0f);
    }
  }
  __syncthreads();
  const int i = thread_index();
  if (i >= kFrameNumbers) return;
  float sum = 0.0f;
  if (present) {
    for (int head = 0; head < sizes.heads; ++head) sum += shared.sums[head][i];
  }
  if (i < 9) {
    if (problem.d_rotations != nullptr) problem.d_rotations[9 * place.node + i] = sum;
  } else if (problem.d_translations != nullptr) {
    problem.d_translations[3 * place.node + i - 9] = sum;
  }
}

template <DType type>
__global__ void __launch_bounds__(32 * kMostHeads)
    frames_backward_kernel(const __grid_constant__ FramesBackwardParams params) {
  frames_backward_body<type>(params);
}

}  // namespace fused_ops::invariant_point_attention
