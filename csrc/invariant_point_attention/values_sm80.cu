// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/values_sm80.cuh"

namespace fused_ops::invariant_point_attention {

void values_sm80(const ValuesProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "invariant_point_attention: launching values_sm80";
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0 || problem.block.rows == 0 || sizes.heads == 0) return;
  const int width = value_line(sizes, problem.mode);
  FO_CHECK_VALUE(!is_fp32(problem.mode), kWhat, ": mode must be a 16-bit one");
  FO_CHECK_VALUE(width <= kMostValueColumns, kWhat, ": a head must have at most ",
                 kMostValueColumns, " columns of values, got ", width);
  const bool narrow = width <= kValueColumns;
  if (problem.mode == Mode::kBFloat16) {
    using Product = Product16<DType::kBFloat16>;
    narrow ? launch_values<Product, kValueColumns, kValueColumns>(kWhat, problem, stream)
           : launch_values<Product, kValueColumns, kMostValueColumns>(kWhat, problem, stream);
  } else {
    using Product = Product16<DType::kFloat16>;
    narrow ? launch_values<Product, kValueColumns, kValueColumns>(kWhat, problem, stream)
           : launch_values<Product, kValueColumns, kMostValueColumns>(kWhat, problem, stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
