// SPDX-License-Identifier: Apache-2.0
// The backward of MSA row attention between the projections and the output projection, from the
// gradient with respect to the gated attention, and what the forward's attend has stored:
//   backward_gate       gradients of the gate and of the attention
//   backward_keys       of keys and values: a block walks the queries
//   backward_queries    of queries: a block walks the keys
//   backward_bias       of the bias: a block walks the rows that share it
// The last three have the weights again from the logits and from what attend stored.
#pragma once

#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

struct BackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  // Tensors as in AttendProblem; of type_of(mode) if nothing else is said.
  const void* projected = nullptr;         // (positions(), 4 * width)
  const float* projection_bias = nullptr;  // as in AttendProblem
  const void* bias = nullptr;              // stored times sqrt(dim), zeros beyond N
  const std::uint64_t* present = nullptr;  // null: all keys are there
  const void* gated = nullptr;             // (positions(), width): attend's result
  const float* log_sums = nullptr;         // likewise
  const float* factors = nullptr;          // likewise
  const void* d_gated = nullptr;           // (positions(), width)
  // Results.
  void* d_projected = nullptr;  // (positions(), 4 * width): of query, key, value, gate
  float* d_bias = nullptr;      // (groups, heads, N, N): of the bias as it is, not as it is stored
  bool accumulate = false;      // d_bias is added to
  Dropout dropout;
  // Between the kernels.
  // (positions(), width): the attention's gradient; and, (all_rows(), heads, N), its dot product
  // with the attention. In fp32 both have the factor in them that weights lack. With dropout the
  // latter is times `dropout.kept`.
  void* d_attended = nullptr;
  float* row_dots = nullptr;
  float* partial = nullptr;  // bias_partial_size(): sums of d_bias over some of the rows
};

void backward_gate_sm80(const BackwardProblem& problem, CUstream_st* stream);  // any mode

// 16-bit modes.
void backward_keys_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_queries_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_bias_sm80(const BackwardProblem& problem, CUstream_st* stream);

// With dropout. Where a weight is kept, with f the factor of those,
//   dS = P (f da v^T - D) = f P (da v^T - D / f),
// else -P D = -f P D / f: so all is times f, which waits for the end, and D / f is what row_dots
// has.
void backward_keys_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_queries_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_bias_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_keys_fp32_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_queries_fp32_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_bias_fp32_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream);

// kTf32, kSplit.
void backward_keys_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_queries_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream);
void backward_bias_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream);

// The sum of slabs of `partial`, in order, to d_bias.
void add_slabs_sm80(const BackwardProblem& problem, std::int64_t slabs, CUstream_st* stream);

}  // namespace fused_ops::msa_row_attention
