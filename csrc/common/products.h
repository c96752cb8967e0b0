// SPDX-License-Identifier: Apache-2.0
// Products of a host op that a library takes.
#pragma once

#include <string>

#include "common/arguments.h"
#include "common/sanitizers.h"

namespace fused_ops {

// out = a * b^T, and a bias of as many columns.
inline void multiply(const Tensor& a, const Tensor& b, const MaybeTensor& bias, const Tensor& out) {
  if (fills_products()) call_operator("aten::zero_", out);
  call_overload("aten::linear", "out", a, b, bias, out);
}

// a * b of fp32 numbers, to the precision of the op: ATen's product would be one of FFMAs.
inline Tensor multiply_fp32(const Tensor& a, const Tensor& b, const std::string& precision) {
  return call_operator("fused_ops::tensor_matmul_forward", a, b, precision,
                       std::optional<ScalarType>());
}

}  // namespace fused_ops
