// SPDX-License-Identifier: Apache-2.0
// The six linears as lines one behind the other, for kernels in which a warp takes a line.
#pragma once

#include "triangular_multiplicative_update/access.cuh"
#include "triangular_multiplicative_update/finish.h"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kInputLinears = 4;
constexpr int kLinears = 6;
constexpr int kOutProj = 4;
constexpr int kOutGate = 5;

// Linears that read the same and whose products lie together: the inputs', out_proj, out_gate.
constexpr int kGroups = 3;

struct Line {
  int linear = 0;
  int group = 0;
  int in_linear = 0;  // which of its linear's lines
  int in_group = 0;
};

__host__ __device__ constexpr int first_line(const Sizes& sizes, int group) {
  return group == 0 ? 0 : kInputLinears * sizes.hidden + (group - 1) * sizes.channels;
}

__host__ __device__ constexpr int lines_of(const Sizes& sizes, int group) {
  return group == 0 ? kInputLinears * sizes.hidden : sizes.channels;
}

// Of a line, how long it is.
__host__ __device__ constexpr int inner_of(const Sizes& sizes, int group) {
  return group == 1 ? sizes.hidden : sizes.channels;
}

__device__ __forceinline__ Line line_of(const Sizes& sizes, int group, int in_group) {
  Line line;
  line.group = group;
  line.in_group = in_group;
  line.linear = group == 0 ? in_group / sizes.hidden : kInputLinears + group - 1;
  line.in_linear = group == 0 ? in_group % sizes.hidden : in_group;
  return line;
}

inline void list_linears(const Weights& weights, Linear (&linears)[kLinears]) {
  const Linear all[kLinears] = {weights.proj_a, weights.gate_a,   weights.proj_b,
                                weights.gate_b, weights.out_proj, weights.out_gate};
  for (int i = 0; i < kLinears; ++i) linears[i] = all[i];
}

}  // namespace fused_ops::triangular_multiplicative_update
