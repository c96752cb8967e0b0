// SPDX-License-Identifier: Apache-2.0
// The ends of backwards, through their launchers, as msa_row_attention has rows.
#include "common/finish_sm80.cu"
#include "common/norm_backward_sm80.cu"
#include "emulation/driver.h"

namespace {

using emulation::Request;
using namespace fused_ops;

int channels_of(Request& request) {
  return static_cast<int>(request.integer("channels"));
}

RowAxis axis_of(Request& request, const char* count, const char* stride) {
  return {request.integer(count), request.integer(stride, 0)};
}

Rows rows_of(Request& request) {
  Rows rows;
  rows.axes[0] = axis_of(request, "n", "source_stride2");
  rows.axes[1] = axis_of(request, "rows", "source_stride1");
  rows.axes[2] = axis_of(request, "groups", "source_stride0");
  return rows;
}

const emulation::Kernel norm_backward("norm_backward", [](Request& request) {
  NormBackwardProblem p;
  p.channels = channels_of(request);
  p.eps = 1e-5f;
  p.source = rows_of(request);
  p.source.data = request.input<char>("source") + request.integer("source_offset");
  p.source.type = static_cast<DType>(request.integer("source_type"));
  p.weight = {request.input<char>("weight"), static_cast<DType>(request.integer("weight_type"))};
  p.grad = request.input<char>("grad");
  p.grad_type = static_cast<DType>(request.integer("grad_type"));
  const std::int64_t rows = p.source.count();
  p.out = request.output<char>("out", rows * p.channels * bytes_of(p.source.type));
  p.statistics = request.output<float>("statistics", 4 * rows);
  p.parts = static_cast<int>(request.integer("parts"));
  p.sums = request.output<float>("sums", std::int64_t{2} * p.parts * p.channels);
  norm_backward_sm80(p, nullptr);
});

// Columns of a wider matrix.
const emulation::Kernel column_sums("column_sums", [](Request& request) {
  ColumnSumsProblem p;
  p.rows = rows_of(request).count();
  p.columns = channels_of(request);
  p.grad = request.input<char>("grad") + request.integer("grad_offset");
  p.grad_type = static_cast<DType>(request.integer("grad_type"));
  p.grad_stride = request.integer("grad_stride");
  p.parts = column_sum_parts(p.rows, p.columns);
  p.sums = request.output<float>("sums", std::int64_t{p.parts} * p.columns);
  column_sums_sm80(p, nullptr);
});

// Slabs (slabs, heads, dim, inner) of which (heads, filled, inner) are wanted; and the same again
// as one chunk, to another type.
const emulation::Kernel finish("finish", [](Request& request) {
  const std::int64_t slabs = request.integer("slabs"), heads = request.integer("heads");
  const std::int64_t dim = request.integer("dim"), filled = request.integer("filled");
  const std::int64_t inner = request.integer("inner");
  FinishProblem p;
  p.count = 2;
  Summand& s = p.summands[0];
  s.from = request.input<float>("from");
  s.slabs = slabs;
  s.slab_stride = heads * dim * inner;
  s.count = heads * filled * inner;
  s.chunk = dim * inner;
  s.filled = filled * inner;
  s.result = {request.output<float>("weight", s.count), DType::kFloat32};
  p.summands[1] = s;
  p.summands[1].count = s.slab_stride;
  p.summands[1].chunk = p.summands[1].filled = 1;
  p.summands[1].result = {request.output<char>("all", s.slab_stride * 2), DType::kBFloat16};
  finish_sm80(p, nullptr);
});

}  // namespace
