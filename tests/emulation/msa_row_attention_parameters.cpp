// SPDX-License-Identifier: Apache-2.0
// The ends of msa_row_attention's backward, through their launchers.
#include "emulation/driver.h"
#include "msa_row_attention/finish_sm80.cu"
#include "msa_row_attention/norm_backward_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using namespace fused_ops::msa_row_attention;

Sizes sizes_of(Request& request) {
  Sizes s;
  s.groups = request.integer("groups");
  s.rows = request.integer("rows");
  s.n = request.integer("n");
  s.channels = static_cast<int>(request.integer("channels"));
  return s;
}

Msa source_of(Request& request) {
  Msa m;
  m.data = request.input<char>("source") + request.integer("source_offset");
  m.type = static_cast<DType>(request.integer("source_type"));
  m.group_stride = request.integer("source_stride0");
  m.row_stride = request.integer("source_stride1");
  m.position_stride = request.integer("source_stride2");
  return m;
}

const emulation::Kernel norm_backward("norm_backward", [](Request& request) {
  NormBackwardProblem p;
  p.sizes = sizes_of(request);
  p.eps = 1e-5f;
  p.source = source_of(request);
  p.weight = {request.input<char>("weight"), static_cast<DType>(request.integer("weight_type"))};
  p.grad = request.input<char>("grad");
  p.grad_type = static_cast<DType>(request.integer("grad_type"));
  const std::int64_t positions = p.sizes.positions();
  p.out = request.output<char>("out",
                               positions * p.sizes.channels * fused_ops::bytes_of(p.source.type));
  p.statistics = request.output<float>("statistics", 4 * positions);
  p.parts = static_cast<int>(request.integer("parts"));
  p.sums = request.output<float>("sums", std::int64_t{2} * p.parts * p.sizes.channels);
  norm_backward_sm80(p, nullptr);
});

// Columns of a wider matrix.
const emulation::Kernel column_sums("column_sums", [](Request& request) {
  ColumnSumsProblem p;
  p.sizes = sizes_of(request);
  p.columns = p.sizes.channels;
  p.grad = request.input<char>("grad") + request.integer("grad_offset");
  p.grad_type = static_cast<DType>(request.integer("grad_type"));
  p.grad_stride = request.integer("grad_stride");
  p.parts = column_sum_parts(p.sizes.positions(), p.columns);
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
