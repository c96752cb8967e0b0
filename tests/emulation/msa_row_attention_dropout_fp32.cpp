// SPDX-License-Identifier: Apache-2.0
// Dropout of msa_row_attention for fp32 tensors: attention with its backward, one launcher after
// the other.
#define FUSED_OPS_FEW_KERNELS
#include "emulation/msa_row_attention_backward.h"
#include "msa_row_attention/add_slabs_sm80.cu"
#include "msa_row_attention/attend_fp32_dropout_sm80.cu"
#include "msa_row_attention/backward_bias_fp32_dropout_sm80.cu"
#include "msa_row_attention/backward_gate_sm80.cu"
#include "msa_row_attention/backward_keys_fp32_dropout_sm80.cu"
#include "msa_row_attention/backward_queries_fp32_dropout_sm80.cu"
#include "msa_row_attention/dropout_keys_sm80.cu"

namespace {

using emulation::Request;
using namespace fused_ops::msa_row_attention;

const emulation::Kernel all("all", [](Request& request) {
  constexpr emulation::BackwardSteps kSteps{&attend_fp32_dropout_sm80,
                                            &backward_gate_sm80,
                                            &backward_keys_fp32_dropout_sm80,
                                            &backward_queries_fp32_dropout_sm80,
                                            &backward_bias_fp32_dropout_sm80,
                                            [](const Sizes& sizes) {
                                              return bias_fp32_partial_size(
                                                  sizes, fused_ops::multiprocessors(), false, true);
                                            }};
  emulation::run_backward(request, kSteps,
                          emulation::attention_dropout(request, &dropout_keys_sm80));
});

}  // namespace
