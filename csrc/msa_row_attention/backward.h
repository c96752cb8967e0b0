// SPDX-License-Identifier: Apache-2.0
// The backward of MSA row attention between the projections and the output projection, from the
// gradient with respect to the gated attention. Nothing but the inputs is saved by the forward.
//   attend_statistics   the forward once more: its result, sums of weights, the gate's gradient
//   backward_keys       gradients of keys and values: a block walks the queries
//   backward_queries    of queries: a block walks the keys
//   backward_bias       of the bias: a block walks the rows that share it
// All but the first take weights from the logits and from what the first stored.
#pragma once

#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

struct BackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  // Tensors as in AttendProblem; of type_of(mode) if nothing else is said.
  const void* projected = nullptr;  // (positions(), 4 * width)
  // (4 * width), of fp32: added to the gate, as in AttendProblem. Only attend_statistics_fp32_sm80
  // reads it.
  const float* projection_bias = nullptr;
  const void* bias = nullptr;              // stored times sqrt(dim), zeros beyond N
  const std::uint64_t* present = nullptr;  // null: all keys are there
  const void* d_gated = nullptr;           // (positions(), width): of the attention times its gate
  // Results.
  void* gated = nullptr;        // (positions(), width)
  void* d_projected = nullptr;  // (positions(), 4 * width): of query, key, value, gate
  float* d_bias = nullptr;      // (groups, heads, N, N): of the bias as it is, not as it is stored
  // Between the kernels. In fp32 log_sums is rounded to what leaves fp32's accuracy, and d_attended
  // and row_dots are multiplied by what a query's weights lack for it (1/2 to 1).
  void* d_attended = nullptr;  // (positions(), width): of the attention
  float* log_sums = nullptr;   // (all_rows(), heads, N): a weight is 2^(logit * log2(e) - this)
  float* row_dots = nullptr;   // likewise: of the attention and its gradient
  float* partial = nullptr;    // bias_(fp32_)partial_size(): sums of d_bias over some of the rows
};

// 16-bit modes.
void attend_statistics_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_keys_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_queries_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_bias_sm80(const BackwardProblem& problem, CUstream_st* stream);

// kTf32, kSplit.
void attend_statistics_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_keys_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_queries_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_bias_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::msa_row_attention
