// SPDX-License-Identifier: Apache-2.0
// Dropout of msa_row_attention: its keys, and attention with its backward, one launcher after the
// other.
#define FUSED_OPS_FEW_KERNELS
#include "emulation/msa_row_attention_backward.h"
#include "msa_row_attention/add_slabs_sm80.cu"
#include "msa_row_attention/attend_dropout_sm80.cu"
#include "msa_row_attention/backward_bias_dropout_sm80.cu"
#include "msa_row_attention/backward_gate_sm80.cu"
#include "msa_row_attention/backward_keys_dropout_sm80.cu"
#include "msa_row_attention/backward_queries_dropout_sm80.cu"
#include "msa_row_attention/dropout_keys_sm80.cu"

namespace {

using emulation::Request;
using namespace fused_ops::msa_row_attention;

const emulation::Kernel keys("keys", [](Request& request) {
  DropoutKeysProblem p;
  p.seed = request.input<std::int64_t>("seed");
  p.first_row = request.integer("first_row");
  p.rows = request.integer("rows");
  p.n = request.integer("n");
  p.heads = static_cast<int>(request.integer("heads"));
  p.keys = request.output<std::uint64_t>("keys", p.rows * p.heads * p.n);
  dropout_keys_sm80(p, nullptr);
});

const emulation::Kernel all("all", [](Request& request) {
  constexpr emulation::BackwardSteps kSteps{&attend_dropout_sm80,
                                            &backward_gate_sm80,
                                            &backward_keys_dropout_sm80,
                                            &backward_queries_dropout_sm80,
                                            &backward_bias_dropout_sm80,
                                            [](const Sizes& sizes) {
                                              return bias_partial_size(
                                                  sizes, fused_ops::multiprocessors(), false, true);
                                            }};
  emulation::run_backward(request, kSteps,
                          emulation::attention_dropout(request, &dropout_keys_sm80));
});

}  // namespace
