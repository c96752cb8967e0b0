// SPDX-License-Identifier: Apache-2.0
// The scores' backward of invariant point attention for fp32 tensors, through its launchers.
#include "emulation/driver.h"
#include "emulation/invariant_point_attention_scores.h"
#include "invariant_point_attention/keys_backward_fp32_sm80.cu"
#include "invariant_point_attention/queries_backward_fp32_sm80.cu"
#include "invariant_point_attention/settle_dots_sm80.cu"

namespace {

const emulation::Kernel keys("keys", [](emulation::Request& request) {
  keys_backward_fp32_sm80(keys_problem(request), nullptr);
});

const emulation::Kernel queries("queries", [](emulation::Request& request) {
  queries_backward_fp32_sm80(queries_problem(request), nullptr);
});

const emulation::Kernel settle("settle", [](emulation::Request& request) {
  const ScoresBackwardProblem scores = scores_problem(request);
  SettleDotsProblem p;
  p.sizes = scores.sizes;
  p.block = scores.block;
  p.d_logits = request.input<float>("d_logits");
  p.row_dots = request.output<float>("row_dots", lines(scores));
  std::memcpy(p.row_dots, request.input<float>("row_dots"),
              static_cast<std::size_t>(lines(scores)) * sizeof(float));
  settle_dots_sm80(p, nullptr);
});

}  // namespace
