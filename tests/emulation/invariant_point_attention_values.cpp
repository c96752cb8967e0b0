// SPDX-License-Identifier: Apache-2.0
// The values of invariant point attention, through their launchers.
#include "emulation/invariant_point_attention_values.h"
#include "invariant_point_attention/values_fp32_sm80.cu"
#include "invariant_point_attention/values_sm80.cu"

namespace {

using namespace fused_ops::invariant_point_attention;

const emulation::Kernel values("values", [](emulation::Request& request) {
  const ValuesProblem p = values_problem(request);
  is_fp32(p.mode) ? values_fp32_sm80(p, nullptr) : values_sm80(p, nullptr);
});

}  // namespace
