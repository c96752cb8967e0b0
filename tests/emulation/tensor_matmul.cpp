// SPDX-License-Identifier: Apache-2.0
// The kernels of tensor_matmul, through their launchers.
#include "emulation/driver.h"
#include "tensor_matmul/forward_sm80.cu"
#include "tensor_matmul/split_sm80.cu"
#include "tensor_matmul/split_sm90a.cu"

namespace {

using emulation::Request;
using namespace fused_ops::tensor_matmul;

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

// Tiles from 2 on are those of the kernel for Hopper.
const emulation::Kernel split("split", [](Request& request) {
  const ForwardParams p = problem(request);
  const emulation::Buffer workspace(
      static_cast<std::size_t>(PreparedB::of(p.inner, p.columns).bytes()));
  emulation::poison(workspace.data(), workspace.bytes());
  prepare_b_sm80(p, workspace.data(), nullptr);
  const int tile = static_cast<int>(request.integer("tile"));
  if (tile >= 2) {
    split_forward_sm90a(p, tile - 2, workspace.data(), nullptr);
  } else {
    split_forward_sm80(p, tile, workspace.data(), nullptr);
  }
});

// Contiguous a (rows, lines) and g (rows, columns), beginning so many elements behind an address
// that is aligned.
const emulation::Kernel reduce("reduce", [](Request& request) {
  ReduceProblem p;
  p.a = request.input<float>("a") + request.integer("a_offset", 0);
  p.g = request.input<float>("g") + request.integer("g_offset", 0);
  p.rows = request.integer("rows");
  p.lines = request.integer("lines");
  p.columns = request.integer("columns");
  const auto rows = [&](std::int64_t stride) {
    RowAxes axes;
    if (request.integer("axes", 1) == 1) {
      axes.count = 1;
      axes.size[0] = p.rows;
      axes.stride[0] = stride;
    } else {  // the same rows, told as two axes
      axes.count = 2;
      axes.size[0] = p.rows / 2;
      axes.stride[0] = 2 * stride;
      axes.size[1] = 2;
      axes.stride[1] = stride;
    }
    return axes;
  };
  p.a_rows = rows(request.integer("a_stride"));
  p.g_rows = rows(request.integer("g_stride"));
  p.a_line_stride = request.integer("a_line_stride", 1);
  p.g_column_stride = request.integer("g_column_stride", 1);
  p.c = request.output<float>("c", p.lines * p.columns);
  const int slabs = static_cast<int>(request.integer("slabs"));
  const emulation::Buffer workspace(static_cast<std::size_t>(slabs * p.lines * p.columns * 4));
  emulation::poison(workspace.data(), workspace.bytes());
  float* partial = slabs > 1 ? reinterpret_cast<float*>(workspace.data()) : p.c;
  const int tile = static_cast<int>(request.integer("tile"));  // that of sm_80, then Hopper's
  if (tile >= 1) {
    split_reduce_sm90a(p, tile - 1, slabs, partial, nullptr);
  } else {
    split_reduce_sm80(p, slabs, partial, nullptr);
  }
  if (slabs > 1) add_slabs_sm80(p, slabs, partial, nullptr);
});

}  // namespace
