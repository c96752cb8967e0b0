// SPDX-License-Identifier: Apache-2.0
// From the gradient of the features back to that of the gathered numbers, in the global frame, and
// the sums over keys of P dP, which the gathered numbers give. A warp takes a head of a residue.
#pragma once

#include "invariant_point_attention/frames_pieces.cuh"

namespace fused_ops::invariant_point_attention {

struct OutputBackwardParams {
  OutputBackwardProblem problem;
  unsigned tasks = 0;  // residues times heads
};

struct OutputBackwardShared {
  float lines[kFrameWarps][kMostDim + 2 * 3 * kMostPoints];
};

template <DType type>
__device__ __forceinline__ void output_backward_body(const OutputBackwardParams& params) {
  const OutputBackwardProblem& problem = params.problem;
  const Sizes& sizes = problem.sizes;
  Place place;
  if (!find_place(sizes, params.tasks, place)) return;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  float* line = shared_memory<OutputBackwardShared>().lines[warp];
  const int numbers = sizes.value_numbers(), count = value_line(sizes, problem.mode);
  const std::int64_t row = place.node * sizes.features();
  const Centre& centre = problem.centres[place.batch];
  float dot = 0.0f;  // a lane's share

  if (centre.present == 0.0f) {
    for (int at = lane; at < count; at += 32) line[at] = 0.0f;
  } else {
    const std::int64_t scalars = row + place.head * sizes.head_dim;
    for (int at = lane; at < sizes.dim; at += 32) {
      float grad = 0.0f;
      if (at < sizes.head_dim) {
        grad = load_number(problem.d_features, type, scalars + at);
        dot = fmaf(grad, load_number(problem.features, type, scalars + at), dot);
      }
      line[at] = grad;
    }
    const std::int64_t pair_values =
        row + sizes.pair_values_at() + std::int64_t{place.head} * sizes.value_channels;
#pragma unroll 4
    for (int at = lane; at < sizes.value_channels; at += 32) {
      dot = fmaf(load_number(problem.d_features, type, pair_values + at),
                 load_number(problem.features, type, pair_values + at), dot);
    }
    if (lane < sizes.value_points) {
      const Frame frame = load_frame(problem.frames, centre, place);
      Point gathered;
      const Point grad =
          frame.turned(gathered_gradient<type>(sizes, frame, place, lane, problem.norm_eps,
                                               problem.d_features, problem.gathered, gathered));
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        const float nearest = rounded_to<type>(grad.at[d]);
        dot = fmaf(nearest, gathered.at[d] + frame.shift[d], dot);
        float* to = line + sizes.dim + 3 * lane + d;
        *to = nearest;
        if constexpr (type != DType::kFloat32) to[numbers] = nearest;
      }
    }
    const int filled = sizes.dim + point_copies(problem.mode) * numbers;
    if (lane < count - filled) line[filled + lane] = 0.0f;
  }
  __syncwarp();
  store_line<type>(line, count, problem.d_gathered, place.line * count, lane);
  dot = warp_sum(dot);
  if (lane == 0) problem.row_dots[place.line] = dot;
}

template <DType type>
__global__ void __launch_bounds__(32 * kFrameWarps)
    output_backward_kernel(const __grid_constant__ OutputBackwardParams params) {
  output_backward_body<type>(params);
}

}  // namespace fused_ops::invariant_point_attention
