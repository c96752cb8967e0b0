// SPDX-License-Identifier: Apache-2.0
// The kernels of tensor_matmul, through their launchers.
#include "emulation/driver.h"
#include "tensor_matmul/forward_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::tensor_matmul::ForwardParams;

// A (a_size0, ..., inner) with a_stride0, ... and b's strides, in elements; both begin so many
// elements behind an address that is aligned.
ForwardParams problem(Request& request) {
  ForwardParams p;
  p.a = request.input<float>("a") + request.integer("a_offset", 0);
  p.b = request.input<float>("b") + request.integer("b_offset", 0);
  p.a_rows.count = static_cast<int>(request.integer("a_axes"));
  p.rows = 1;
  for (int i = 0; i < p.a_rows.count; ++i) {
    p.a_rows.size[i] = request.integer("a_size" + std::to_string(i));
    p.a_rows.stride[i] = request.integer("a_stride" + std::to_string(i));
    p.rows *= p.a_rows.size[i];
  }
  p.inner = request.integer("inner");
  p.columns = request.integer("columns");
  p.a_inner_stride = request.integer("a_inner_stride");
  p.b_inner_stride = request.integer("b_inner_stride");
  p.b_column_stride = request.integer("b_column_stride");
  p.c = request.output<float>("c", p.rows * p.columns);
  return p;
}

const emulation::Kernel forward("forward", [](Request& request) {
  fused_ops::tensor_matmul::forward_sm80(problem(request),
                                         static_cast<int>(request.integer("tile")), nullptr);
});

}  // namespace
