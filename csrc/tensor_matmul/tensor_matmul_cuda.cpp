// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of fused_ops::tensor_matmul_forward, whose schema Python has defined:
// check, plan, then launch or hand over to the PyTorch composition.
#include "common/launch.h"
#include "common/stable.h"
#include "tensor_matmul/config.h"
#include "tensor_matmul/plan.h"
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

// a (..., L), b (L, K) -> (..., K)
Tensor forward(const Tensor& a, const Tensor& b, std::string_view precision,
               std::optional<ScalarType> dtype) {
  check(a, b, dtype);
  const auto a_sizes = a.sizes();
  const std::size_t leading = a_sizes.size() - 1;

  Problem problem;
  problem.precision = precision_from("tensor_matmul", precision);
  problem.rows = 1;
  for (std::size_t i = 0; i < leading; ++i) problem.rows *= a_sizes[i];
  problem.inner = b.size(0);
  problem.columns = b.size(1);
  ForwardParams params;
  problem.row_axes = merge_axes(a_sizes.data(), a.strides().data(), leading, &params.a_rows);
  problem.a = dtype_of(a.scalar_type());
  problem.b = dtype_of(b.scalar_type());
  problem.output = dtype_of(dtype.value_or(a.scalar_type()));
  problem.device = device_capability(a.get_device_index());

  const Plan chosen = plan(problem);
  if (chosen.path != Path::kKernel) {
    std::string reason;  // stays empty where PyTorch runs by choice: Python warns of others once
    for (const std::string& one : chosen.reasons) reason += (reason.empty() ? "" : "; ") + one;
    return call_operator("fused_ops::tensor_matmul_composition", a, b, std::string(precision),
                         dtype, reason);
  }

  const DeviceGuard guard(a.get_device_index());
  std::vector<std::int64_t> sizes(a_sizes.begin(), a_sizes.end());
  sizes.back() = problem.columns;
  Tensor c = empty(a, sizes, ScalarType::Float);
  if (chosen.launches == 0) return c;

  params.a = a.const_data_ptr<float>();
  params.b = b.const_data_ptr<float>();
  params.c = c.mutable_data_ptr<float>();
  params.rows = problem.rows;
  params.inner = problem.inner;
  params.columns = problem.columns;
  params.a_inner_stride = a.stride(-1);
  params.b_inner_stride = b.stride(0);
  params.b_column_stride = b.stride(1);
  forward_sm80(params, choose_tile(problem.rows, problem.columns), current_stream(a));
  return c;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("tensor_matmul_forward", TORCH_BOX(&forward));
}

}  // namespace fused_ops::tensor_matmul
