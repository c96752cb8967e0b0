// SPDX-License-Identifier: Apache-2.0
// What the drivers of msa_row_attention's backward share: a problem as the tests ask it, and its
// launchers one after the other.
#pragma once

#include "emulation/driver.h"
#include "msa_row_attention/backward.h"
#include "msa_row_attention/dropout.h"

namespace emulation {

using fused_ops::msa_row_attention::AttendProblem;
using fused_ops::msa_row_attention::BackwardProblem;
using fused_ops::msa_row_attention::Dropout;
using fused_ops::msa_row_attention::DropoutKeysProblem;
using fused_ops::msa_row_attention::Mode;
using fused_ops::msa_row_attention::Sizes;

struct BackwardSteps {
  void (*attend)(const AttendProblem&, CUstream_st*);
  void (*gate)(const BackwardProblem&, CUstream_st*);
  void (*keys)(const BackwardProblem&, CUstream_st*);
  void (*queries)(const BackwardProblem&, CUstream_st*);
  void (*bias)(const BackwardProblem&, CUstream_st*);
  std::int64_t (*partial_size)(const Sizes&);
};

inline Sizes attention_sizes(Request& request) {
  Sizes s;
  s.groups = request.integer("groups");
  s.rows = request.integer("rows");
  s.n = request.integer("n");
  s.heads = static_cast<int>(request.integer("heads"));
  s.dim = static_cast<int>(request.integer("dim"));
  s.head_dim = s.dim;
  return s;
}

// `dropped`: of 65536 numbers.
inline Dropout attention_dropout(Request& request,
                                 void (*make_keys)(const DropoutKeysProblem&, CUstream_st*)) {
  const Sizes s = attention_sizes(request);
  DropoutKeysProblem p;
  p.seed = request.input<std::int64_t>("seed");
  p.first_row = request.integer("first_row");
  p.rows = s.all_rows();
  p.n = s.n;
  p.heads = s.heads;
  p.keys = request.output<std::uint64_t>("keys", p.rows * p.heads * p.n);
  make_keys(p, nullptr);
  Dropout dropout = fused_ops::msa_row_attention::dropout_of(
      static_cast<double>(request.integer("dropped")) / 65536);
  dropout.keys = p.keys;
  return dropout;
}

inline void run_backward(Request& request, const BackwardSteps& steps,
                         const Dropout& dropout = {}) {
  BackwardProblem p;
  const Sizes& s = p.sizes = attention_sizes(request);
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.projected = request.input<char>("projected");
  if (request.integer("biased", 0)) p.projection_bias = request.input<float>("projection_bias");
  p.bias = request.input<char>("bias");
  if (request.integer("masked")) p.present = request.input<std::uint64_t>("present");
  p.d_gated = request.input<char>("d_gated");
  p.dropout = dropout;
  const fused_ops::DType type = type_of(p.mode);
  const std::int64_t bytes = s.positions() * s.width() * fused_ops::bytes_of(type);
  const std::int64_t queries = s.all_rows() * s.heads * s.n;
  AttendProblem attend;
  attend.sizes = s;
  attend.mode = p.mode;
  attend.projected = p.projected;
  attend.projection_bias = p.projection_bias;
  attend.bias = p.bias;
  attend.present = p.present;
  attend.dropout = dropout;
  attend.out = request.output<char>("gated", bytes);
  attend.log_sums = request.output<float>("log_sums", queries);
  if (type == fused_ops::DType::kFloat32) {
    attend.factors = request.output<float>("factors", queries);
  }
  steps.attend(attend, nullptr);
  p.gated = attend.out;
  p.log_sums = attend.log_sums;
  p.factors = attend.factors;
  p.d_attended = request.output<char>("d_attended", bytes);
  p.d_projected = request.output<char>("d_projected", 4 * bytes);
  p.row_dots = request.output<float>("row_dots", queries);
  steps.gate(p, nullptr);
  steps.keys(p, nullptr);
  steps.queries(p, nullptr);
  p.d_bias = request.output<float>("d_bias", s.groups * s.heads * s.n * s.n);
  const std::int64_t partial = steps.partial_size(s);
  if (partial > 0) p.partial = request.output<float>("partial", partial);
  steps.bias(p, nullptr);
}

}  // namespace emulation
