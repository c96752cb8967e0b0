// SPDX-License-Identifier: Apache-2.0
// Problems of the values and of the gathering of pair values from a test's request.
#pragma once

#include "emulation/driver.h"
#include "invariant_point_attention/invariant_point_attention.h"

namespace fused_ops::invariant_point_attention {

template <class Problem>
Problem common_part(emulation::Request& request) {
  Problem p;
  const auto number = [&](const char* name) { return static_cast<int>(request.integer(name)); };
  Sizes& s = p.sizes;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.heads = number("heads");
  s.head_dim = number("head_dim");
  s.dim = static_cast<int>(round_up(s.head_dim, 8));
  s.value_points = number("points");
  s.value_channels = number("value_channels");
  s.norms = number("norms") != 0;
  p.mode = static_cast<Mode>(number("mode"));
  p.block = {request.integer("first_row"), request.integer("rows")};
  p.logits = request.input<float>("logits");
  p.features =
      request.output<char>("features", s.nodes() * s.features() * bytes_of(type_of(p.mode)));
  return p;
}

inline ValuesProblem values_problem(emulation::Request& request) {
  auto p = common_part<ValuesProblem>(request);
  const auto type = static_cast<DType>(request.integer("frame_type"));
  p.values = request.input<char>("values");
  p.frames.translations = {request.input<char>("translations"), type};
  p.frames.translations_stride = request.integer("shared_frames") ? 0 : p.sizes.n * 3;
  p.frames.rotations = {request.input<char>("rotations"), type};
  p.frames.rotations_stride = request.integer("shared_frames") ? 0 : p.sizes.n * 9;
  p.centres = request.input<Centre>("centres");
  p.norm_eps = 1e-3f;
  if (request.integer("stored")) {
    p.log_sums = request.output<float>("log_sums", p.sizes.nodes() * p.sizes.heads);
    p.gathered = request.output<float>("gathered",
                                       p.sizes.nodes() * p.sizes.heads * p.sizes.value_numbers());
  }
  return p;
}

inline GatherProblem gather_problem(emulation::Request& request) {
  auto p = common_part<GatherProblem>(request);
  p.log_sums = request.input<float>("log_sums");
  const auto type = static_cast<DType>(request.integer("pair_type"));
  p.pair.data = request.input<char>("pair") + request.integer("pair_offset") * bytes_of(type);
  p.pair.type = type;
  p.pair.batch_stride = request.integer("batch_stride");
  p.pair.i_stride = request.integer("i_stride");
  p.pair.j_stride = request.integer("j_stride");
  return p;
}

}  // namespace fused_ops::invariant_point_attention
