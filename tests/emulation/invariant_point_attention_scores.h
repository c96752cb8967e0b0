// SPDX-License-Identifier: Apache-2.0
// From a request to the problem of the scores' backward. Gradients that are added to come as
// inputs.
#pragma once

#include <cstring>

#include "common/launch.h"
#include "emulation/driver.h"
#include "invariant_point_attention/backward.h"

namespace {

using emulation::Request;
using namespace fused_ops::invariant_point_attention;

ScoresBackwardProblem scores_problem(const Request& request) {
  ScoresBackwardProblem p;
  Sizes& s = p.sizes;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.heads = static_cast<int>(request.integer("heads"));
  s.dim = s.head_dim = static_cast<int>(request.integer("dim"));
  s.query_points = static_cast<int>(request.integer("query_points"));
  s.value_points = static_cast<int>(request.integer("value_points"));
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.block = {request.integer("first_row"), request.integer("rows")};
  p.accumulate = request.integer("accumulate", 0) != 0;
  fused_ops::emulated_multiprocessors = static_cast<int>(request.integer("multiprocessors"));
  return p;
}

std::int64_t lines(const ScoresBackwardProblem& p) {
  return p.sizes.nodes() * p.sizes.heads;
}

std::int64_t pair_count(const ScoresBackwardProblem& p) {
  return p.sizes.batch * p.sizes.heads * p.block.rows * pair_line(p.sizes.n);
}

float* gradient(Request& request, const ScoresBackwardProblem& p, const char* name,
                std::int64_t count) {
  float* to = request.output<float>(name, count);
  if (p.accumulate) {
    std::memcpy(to, request.input<float>(name), static_cast<std::size_t>(count) * sizeof(float));
  }
  return to;
}

ScoresBackwardProblem keys_problem(Request& request) {
  ScoresBackwardProblem p = scores_problem(request);
  p.logits = request.input<float>("logits");
  p.log_sums = request.input<float>("log_sums");
  p.row_dots = request.input<float>("row_dots");
  if (request.integer("pair_values")) p.pair_dots = request.input<float>("pair_dots");
  p.values = request.input<char>("values");
  p.d_gathered = request.input<char>("d_gathered");
  p.q_moments = request.input<char>("q_moments");
  p.d_logits = request.output<char>("d_logits", pair_count(p) * bytes_of(type_of(p.mode)));
  p.d_keys = gradient(request, p, "d_keys", lines(p) * moment_line(p.sizes, p.mode));
  p.d_values = gradient(request, p, "d_values", lines(p) * d_value_line(p.sizes));
  return p;
}

ScoresBackwardProblem queries_problem(Request& request) {
  ScoresBackwardProblem p = scores_problem(request);
  p.d_logits = const_cast<char*>(request.input<char>("d_logits"));
  p.k_moments = request.input<char>("k_moments");
  p.d_queries = request.output<float>("d_queries", lines(p) * moment_line(p.sizes, p.mode));
  return p;
}

}  // namespace
