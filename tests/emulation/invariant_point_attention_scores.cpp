// SPDX-License-Identifier: Apache-2.0
// The scores' backward of invariant point attention for 16-bit types, through its launchers.
#include "emulation/invariant_point_attention_scores.h"
#include "emulation/driver.h"
#include "invariant_point_attention/keys_backward_sm80.cu"
#include "invariant_point_attention/queries_backward_sm80.cu"

namespace {

const emulation::Kernel keys("keys", [](emulation::Request& request) {
  keys_backward_sm80(keys_problem(request), nullptr);
});

const emulation::Kernel queries("queries", [](emulation::Request& request) {
  queries_backward_sm80(queries_problem(request), nullptr);
});

}  // namespace
