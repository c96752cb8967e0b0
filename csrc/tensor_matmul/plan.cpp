// SPDX-License-Identifier: Apache-2.0
#include "tensor_matmul/plan.h"

#include "common/check.h"
#include "tensor_matmul/config.h"
#include "tensor_matmul/tensor_matmul.h"

namespace fused_ops::tensor_matmul {

int merge_axes(const std::int64_t* sizes, const std::int64_t* strides, std::size_t dims,
               RowAxes* axes) {
  int count = 0;
  std::int64_t size = 1;  // of the axis that is being grown
  std::int64_t stride = 0;
  const auto close = [&] {
    if (count < RowAxes::kMax) {
      axes->size[count] = size;
      axes->stride[count] = stride;
    }
    ++count;
  };
  bool open = false;
  for (std::size_t i = 0; i < dims; ++i) {
    if (sizes[i] == 1) continue;
    if (open && stride == sizes[i] * strides[i]) {
      size *= sizes[i];
    } else {
      if (open) close();
      open = true;
      size = sizes[i];
    }
    stride = strides[i];
  }
  close();  // all axes of size 1, or none: one axis of size 1
  axes->count = count < RowAxes::kMax ? count : RowAxes::kMax;
  return count;
}

Plan plan(const Problem& problem) {
  Plan plan;
  // cuBLAS is near the hardware's limit for the tensor cores' own dtypes (a parameter stored in
  // another costs it one cast), and the backward pass is two plain products with transposed
  // operands.
  const bool fp32 = problem.a == DType::kFloat32 && problem.b == DType::kFloat32 &&
                    problem.output == DType::kFloat32;
  if (!fp32 || problem.precision == Precision::kTf32 || problem.backward) {
    plan.path = Path::kCublas;
    return plan;
  }
  const int tile = choose_tile(problem.rows, problem.columns);
  const bool fits_grid = blocks(kTiles[tile], problem.rows, problem.columns) <= kMaxBlocks;
  const bool fits_axes = problem.row_axes <= RowAxes::kMax;
  if (build_runs_on(problem.device) && fits_grid && fits_axes) {
    plan.kernel = "forward_sm80";
    plan.tile = kTiles[tile].size();
    plan.launches = problem.rows > 0 && problem.columns > 0 ? 1 : 0;
    return plan;
  }

  plan.path = Path::kComposition;
  if (!build_runs_on(problem.device)) plan.reasons.push_back(build_reason(problem.device));
  if (!fits_grid) {
    plan.reasons.push_back(concat("the kernel takes at most ", kMaxBlocks, " tiles of ",
                                  kTiles[tile].rows, "x", kTiles[tile].columns, ", the result has ",
                                  blocks(kTiles[tile], problem.rows, problem.columns)));
  }
  if (!fits_axes) {
    plan.reasons.push_back(concat("the kernel walks at most ", RowAxes::kMax,
                                  " leading axes of a that no common stride joins, a has ",
                                  problem.row_axes));
  }
  return plan;
}

namespace {

Plan answer(const Query& query) {
  const auto& a = query.shape("a", 1);
  const auto& b = query.shape("b", 2);
  FO_CHECK_VALUE(b.size() == 2 && b[0] == a.back(), "tensor_matmul: b must have shape (", a.back(),
                 ", K), got ", shape_text(b));
  if (!query.device) return composition("CPU tensors");

  Problem problem;
  problem.rows = 1;
  for (std::size_t i = 0; i + 1 < a.size(); ++i) problem.rows *= a[i];
  problem.inner = b[0];
  problem.columns = b[1];
  RowAxes axes;
  problem.row_axes = merge_axes(a.data(), query.strides_of("a").data(), a.size() - 1, &axes);
  problem.a = problem.b = problem.output = query.dtype;
  problem.precision = query.precision;
  problem.device = *query.device;
  problem.backward = query.backward;
  return plan(problem);
}

const Registration registration("tensor_matmul", &answer);

}  // namespace
}  // namespace fused_ops::tensor_matmul
