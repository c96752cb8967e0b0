// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/values_fp32_sm80.cuh"

namespace fused_ops::invariant_point_attention {

void values_fp32_sm80(const ValuesProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "invariant_point_attention: launching values_fp32_sm80";
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0 || problem.block.rows == 0 || sizes.heads == 0) return;
  const int width = value_line(sizes, problem.mode);
  FO_CHECK_VALUE(is_fp32(problem.mode), kWhat, ": mode must be an fp32 one");
  FO_CHECK_VALUE(width <= kMostFp32ValueColumns, kWhat, ": a head must have at most ",
                 kMostFp32ValueColumns, " columns of values, got ", width);
  const bool narrow = width <= kFp32ValueColumns;
  if (problem.mode == Mode::kTf32) {
    using Product = Product32<false>;
    narrow
        ? launch_values<Product, kFp32ValueColumns, kFp32ValueColumns>(kWhat, problem, stream)
        : launch_values<Product, kFp32ValueColumns, kMostFp32ValueColumns>(kWhat, problem, stream);
  } else {
    using Product = Product32<true>;
    narrow
        ? launch_values<Product, kFp32ValueColumns, kFp32ValueColumns>(kWhat, problem, stream)
        : launch_values<Product, kFp32ValueColumns, kMostFp32ValueColumns>(kWhat, problem, stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
