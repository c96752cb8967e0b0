// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of fused_ops::tensor_matmul_forward, whose schema Python has defined:
// check, plan, then launch or hand over to the PyTorch composition.
#include <algorithm>

#include "common/launch.h"
#include "common/stable.h"
#include "tensor_matmul/config.h"
#include "tensor_matmul/plan.h"
#include "tensor_matmul/split.h"
#include "tensor_matmul/tensor_matmul.h"

namespace fused_ops::tensor_matmul {
namespace {

void check(const Tensor& a, const Tensor& b, std::optional<ScalarType> dtype) {
  FO_CHECK_VALUE(a.dim() >= 1, "tensor_matmul: a must have shape (..., L), got ()");
  FO_CHECK_VALUE(b.dim() == 2 && b.size(0) == a.size(-1), "tensor_matmul: b must have shape (",
                 a.size(-1), ", K), got ", shape_text(b.sizes()));
  FO_CHECK_RUNTIME(same_device(a, b), "tensor_matmul: b must be on the device of a, expected ",
                   device_text(a), ", got ", device_text(b));

  const DType a_type = dtype_of(a.scalar_type());
  const DType b_type = dtype_of(b.scalar_type());
  FO_CHECK_VALUE(a_type != DType::kOther,
                 "tensor_matmul: a must be float32, bfloat16, float16 or float64, got ",
                 dtype_text(a.scalar_type()));
  // A parameter may be stored wider or narrower than the activations; float64 goes with itself
  // only.
  const bool is_double = a_type == DType::kFloat64;
  FO_CHECK_VALUE(b_type != DType::kOther && (b_type == DType::kFloat64) == is_double,
                 "tensor_matmul: b must be ",
                 is_double ? "float64" : "float32, bfloat16 or float16", " when a is ",
                 dtype_text(a.scalar_type()), ", got ", dtype_text(b.scalar_type()));
  if (!dtype) return;
  const DType output = dtype_of(*dtype);
  FO_CHECK_VALUE(output != DType::kOther && (output == DType::kFloat64 || !is_double),
                 "tensor_matmul: dtype must be a floating dtype, and float64 for float64 tensors, "
                 "got ",
                 dtype_text(*dtype));
}

std::int64_t count_rows(const Tensor& tensor) {
  std::int64_t rows = 1;
  for (std::int64_t i = 0; i + 1 < tensor.dim(); ++i) rows *= tensor.size(i);
  return rows;
}

int merge_rows(const Tensor& tensor, RowAxes* axes) {
  return merge_axes(tensor.sizes().data(), tensor.strides().data(),
                    static_cast<std::size_t>(tensor.dim() - 1), axes);
}

// Empty where PyTorch runs by choice: Python warns of other reasons once.
std::string reason_of(const Plan& plan) {
  std::string reason;
  for (const std::string& one : plan.reasons) reason += (reason.empty() ? "" : "; ") + one;
  return reason;
}

// a (..., L), b (L, K) -> (..., K)
Tensor forward(const Tensor& a, const Tensor& b, std::string_view precision,
               std::optional<ScalarType> dtype) {
  check(a, b, dtype);
  ForwardParams params;
  params.rows = count_rows(a);
  params.inner = b.size(0);
  params.columns = b.size(1);
  Problem problem;
  problem.precision = precision_from("tensor_matmul", precision);
  problem.rows = params.rows;
  problem.inner = params.inner;
  problem.columns = params.columns;
  problem.row_axes = merge_rows(a, &params.a_rows);
  problem.a = dtype_of(a.scalar_type());
  problem.b = dtype_of(b.scalar_type());
  problem.output = dtype_of(dtype.value_or(a.scalar_type()));
  problem.device = device_capability(a.get_device_index());

  const Choice chosen = choose_forward(problem);
  if (chosen.kernel == Kernel::kNone) {
    return call_operator("fused_ops::tensor_matmul_composition", a, b, std::string(precision),
                         dtype, reason_of(chosen.plan));
  }

  const DeviceGuard guard(a.get_device_index());
  const auto a_sizes = a.sizes();
  std::vector<std::int64_t> sizes(a_sizes.begin(), a_sizes.end());
  sizes.back() = problem.columns;
  Tensor c = empty(a, sizes, ScalarType::Float);
  if (chosen.plan.launches == 0) return c;

  params.a = a.const_data_ptr<float>();
  params.b = b.const_data_ptr<float>();
  params.c = c.mutable_data_ptr<float>();
  params.a_inner_stride = a.stride(-1);
  params.b_inner_stride = b.stride(0);
  params.b_column_stride = b.stride(1);
  CUstream_st* stream = current_stream(a);
  if (chosen.kernel == Kernel::kForwardSm80) {
    forward_sm80(params, chosen.tile, stream);
    return c;
  }
  const Tensor workspace = empty(a, {chosen.plan.workspace_bytes}, ScalarType::Byte);
  void* prepared = workspace.mutable_data_ptr();
  prepare_b_sm80(params, prepared, stream);
#if FUSED_OPS_HAS_SM90A
  if (chosen.kernel == Kernel::kSplitForwardSm90a) {
    split_forward_sm90a(params, chosen.tile, prepared, stream);
    return c;
  }
#endif
  split_forward_sm80(params, chosen.tile, prepared, stream);
  return c;
}

void check_reduce(const Tensor& a, const Tensor& g) {
  bool fits = a.dim() >= 1 && g.dim() == a.dim();
  for (std::int64_t i = 0; fits && i + 1 < a.dim(); ++i) fits = a.size(i) == g.size(i);
  FO_CHECK_VALUE(fits, "tensor_matmul: the gradient must have the leading axes of a, expected ",
                 shape_text(a.sizes()), " up to the last axis, got ", shape_text(g.sizes()));
  FO_CHECK_RUNTIME(same_device(a, g), "tensor_matmul: the gradient must be on the device of a, ",
                   "expected ", device_text(a), ", got ", device_text(g));
}

// a (..., L), g (..., K) -> (L, K), the sum over all leading axes: the gradient of b.
Tensor reduce(const Tensor& a, const Tensor& g, std::string_view precision,
              std::optional<ScalarType> dtype) {
  check_reduce(a, g);
  ReduceProblem params;
  params.rows = count_rows(a);
  params.lines = a.size(-1);
  params.columns = g.size(-1);
  Problem problem;
  problem.precision = precision_from("tensor_matmul", precision);
  problem.rows = params.rows;
  problem.inner = params.lines;
  problem.columns = params.columns;
  problem.row_axes = std::max(merge_rows(a, &params.a_rows), merge_rows(g, &params.g_rows));
  problem.a = dtype_of(a.scalar_type());
  problem.b = dtype_of(g.scalar_type());
  problem.output = dtype_of(dtype.value_or(a.scalar_type()));
  problem.device = device_capability(a.get_device_index());

  const Choice chosen = choose_reduce(problem);
  if (chosen.kernel == Kernel::kNone) {
    return call_operator("fused_ops::tensor_matmul_reduce_composition", a, g,
                         std::string(precision), dtype);
  }

  const DeviceGuard guard(a.get_device_index());
  Tensor c = empty(a, {params.lines, params.columns}, ScalarType::Float);
  params.a = a.const_data_ptr<float>();
  params.g = g.const_data_ptr<float>();
  params.c = c.mutable_data_ptr<float>();
  params.a_line_stride = a.stride(-1);
  params.g_column_stride = g.stride(-1);
  CUstream_st* stream = current_stream(a);
  Tensor workspace = c;
  if (chosen.slabs > 1) {
    workspace = empty(a, {chosen.slabs, params.lines, params.columns}, ScalarType::Float);
  }
  float* partial = workspace.mutable_data_ptr<float>();
#if FUSED_OPS_HAS_SM90A
  if (chosen.kernel == Kernel::kSplitReduceSm90a) {
    split_reduce_sm90a(params, chosen.tile, chosen.slabs, partial, stream);
  }
#endif
  if (chosen.kernel == Kernel::kSplitReduceSm80) {
    split_reduce_sm80(params, chosen.slabs, partial, stream);
  }
  if (chosen.slabs > 1) add_slabs_sm80(params, chosen.slabs, partial, stream);
  return c;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("tensor_matmul_forward", TORCH_BOX(&forward));
  m.impl("tensor_matmul_reduce", TORCH_BOX(&reduce));
}

}  // namespace fused_ops::tensor_matmul
