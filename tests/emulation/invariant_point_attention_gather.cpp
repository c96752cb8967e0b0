// SPDX-License-Identifier: Apache-2.0
// The gathered pair values of invariant point attention, through their launchers.
#include "emulation/invariant_point_attention_values.h"
#include "invariant_point_attention/gather_fp32_sm80.cu"
#include "invariant_point_attention/gather_sm80.cu"

namespace {

using namespace fused_ops::invariant_point_attention;

const emulation::Kernel gather("gather", [](emulation::Request& request) {
  const GatherProblem p = gather_problem(request);
  is_fp32(p.mode) ? gather_fp32_sm80(p, nullptr) : gather_sm80(p, nullptr);
});

}  // namespace
