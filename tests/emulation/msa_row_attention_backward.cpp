// SPDX-License-Identifier: Apache-2.0
// The backward of msa_row_attention's attention: its launchers one after the other. That of
// the forward is linked: build.py.
#define FUSED_OPS_FEW_KERNELS
#include "emulation/msa_row_attention_backward.h"
#include "msa_row_attention/add_slabs_sm80.cu"
#include "msa_row_attention/backward_bias_sm80.cu"
#include "msa_row_attention/backward_gate_sm80.cu"
#include "msa_row_attention/backward_keys_sm80.cu"
#include "msa_row_attention/backward_queries_sm80.cu"

namespace {

using emulation::Request;
using namespace fused_ops::msa_row_attention;

const emulation::Kernel backward("backward", [](Request& request) {
  constexpr emulation::BackwardSteps kSteps{
      &attend_sm80,
      &backward_gate_sm80,
      &backward_keys_sm80,
      &backward_queries_sm80,
      &backward_bias_sm80,
      [](const Sizes& sizes) { return bias_partial_size(sizes, fused_ops::multiprocessors()); }};
  emulation::run_backward(request, kSteps);
});

}  // namespace
