// SPDX-License-Identifier: Apache-2.0
// The logits of invariant point attention, and what their backward owes to pair values, through
// their launchers.
#include "emulation/driver.h"
#include "invariant_point_attention/logits_fp32_sm80.cu"
#include "invariant_point_attention/logits_sm80.cu"
#include "invariant_point_attention/pair_dots_fp32_sm80.cu"
#include "invariant_point_attention/pair_dots_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using namespace fused_ops::invariant_point_attention;

Sizes sizes_of(const Request& request) {
  Sizes s;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.heads = static_cast<int>(request.integer("heads"));
  s.dim = s.head_dim = static_cast<int>(request.integer("dim"));
  s.query_points = s.value_points = static_cast<int>(request.integer("points"));
  s.pair_channels = s.value_channels = static_cast<int>(request.integer("channels"));
  return s;
}

Pairs pairs_of(const Request& request) {
  Pairs pair;
  const auto type = static_cast<DType>(request.integer("pair_type"));
  pair.data = request.input<char>("pair") + request.integer("offset") * fused_ops::bytes_of(type);
  pair.type = type;
  pair.batch_stride = request.integer("batch_stride");
  pair.i_stride = request.integer("i_stride");
  pair.j_stride = request.integer("j_stride");
  return pair;
}

const emulation::Kernel logits("logits", [](Request& request) {
  LogitsProblem p;
  p.sizes = sizes_of(request);
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.block = {request.integer("first_row"), request.integer("rows")};
  p.projected = request.input<char>("projected");
  p.q_points = request.input<float>("q_points");
  p.k_points = request.input<float>("k_points");
  if (request.integer("masked")) p.present = request.input<std::uint64_t>("present");
  p.pair = pairs_of(request);
  const auto type = static_cast<DType>(request.integer("weight_type"));
  p.bias.weight = {request.input<char>("weight"), type};
  if (request.integer("has_bias")) p.bias.bias = {request.input<char>("bias"), type};
  p.head_weights = {request.input<char>("head_weights"), type};
  const float* scales = request.input<float>("scales");
  p.scalar_scale = scales[0];
  p.point_scale = scales[1];
  p.bias_scale = scales[2];
  const std::int64_t lines = p.sizes.batch * p.sizes.heads * p.block.rows;
  p.logits = request.output<float>("logits", lines * pair_line(p.sizes.n));
  (is_fp32(p.mode) ? logits_fp32_sm80 : logits_sm80)(p, nullptr);
});

const emulation::Kernel pair_dots("pair_dots", [](Request& request) {
  PairDotsProblem p;
  p.sizes = sizes_of(request);
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.block = {request.integer("first_row"), request.integer("rows")};
  p.pair = pairs_of(request);
  p.d_features = request.input<char>("d_features");
  const std::int64_t lines = p.sizes.batch * p.sizes.heads * p.block.rows;
  p.pair_dots = request.output<float>("pair_dots", lines * pair_line(p.sizes.n));
  (is_fp32(p.mode) ? pair_dots_fp32_sm80 : pair_dots_sm80)(p, nullptr);
});

}  // namespace
