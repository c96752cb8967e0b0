// SPDX-License-Identifier: Apache-2.0
// Weights times those of the LayerNorms before them: a warp takes a line.
#pragma once

#include "triangular_multiplicative_update/lines.cuh"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kFoldThreads = 256;
constexpr int kFoldWarps = kFoldThreads / 32;

struct FoldParams {
  Sizes sizes;
  Linear linears[kLinears];
  Stored norms[kGroups];  // null: none
  DType type = DType::kFloat32;
  void* out[kGroups] = {};
  unsigned* largest = nullptr;
};

__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(const __grid_constant__ FoldParams params) {
  const Sizes& sizes = params.sizes;
  const int lane = thread_index() % 32;
  const int at = static_cast<int>(blockIdx.x) * kFoldWarps + thread_index() / 32;
  const int group = at < first_line(sizes, 1) ? 0 : at < first_line(sizes, 2) ? 1 : 2;
  const int in_group = at - first_line(sizes, group);
  if (in_group >= lines_of(sizes, group)) return;
  const Line line = line_of(sizes, group, in_group);
  // There are as many lines of the first linear.
  if (params.largest && lane == 0 && at < sizes.hidden) params.largest[at] = 0;
  void* out = params.out[group];
  if (!out) return;
  const int inner = inner_of(sizes, group);
  const Stored weight = params.linears[line.linear].weight;
  const Stored norm = params.norms[group];
#pragma unroll 4
  for (int k = lane; k < inner; k += 32) {
    float number = load_number(weight.data, weight.type, std::int64_t{line.in_linear} * inner + k);
    if (norm.data) number *= load_number(norm.data, norm.type, k);
    store_number(out, params.type, std::int64_t{in_group} * inner + k, number);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
