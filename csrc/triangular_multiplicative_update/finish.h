// SPDX-License-Identifier: Apache-2.0
// The two ends of the backward at the parameters: the weights that gradients are multiplied with,
// and the parameters' gradients. Plain data.
//
// Lines are those of the linears in the order in which gradients lie side by side:
// proj_a, gate_a, proj_b, gate_b (hidden lines each), out_proj, out_gate (channels lines each).
#pragma once

#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

// A weight times that of the LayerNorm before it, rounded to `type`; the raw weight of an output
// gate that reads the raw pair. Null: not wanted.
struct FoldProblem {
  Sizes sizes;
  Weights weights;
  DType type = DType::kFloat32;
  void* input = nullptr;        // (4 * hidden, channels)
  void* out_proj = nullptr;     // (channels, hidden)
  void* out_gate = nullptr;     // (channels, channels)
  unsigned* largest = nullptr;  // (hidden), or null: zeros are written here
};

void fold_sm80(const FoldProblem& problem, CUstream_st* stream);

// Where a gradient goes, in its parameter's type and shape. Null: not wanted.
struct Result {
  void* data = nullptr;
  DType type = DType::kFloat32;
};

struct LinearResult {
  Result weight;
  Result bias;
};

// Sums over pairs of gradient times input of a linear, (slabs, lines, inner): to be added. Inputs
// are normalised, before weight and bias of the LayerNorm; that of the output gate is what it reads
// if that is the raw pair.
struct Products {
  const float* data = nullptr;
  std::int64_t slabs = 0;
};

// Sums over pairs of the gradient, (rows, lines): to be added.
struct LineSums {
  const float* data = nullptr;
  std::int64_t rows = 0;
};

// The gradients of what is wanted must follow from what is there: weights need the products, those
// of linears that read normalised numbers and all biases also the sums; the weight of a LayerNorm
// needs the products, its bias the sums, of all linears that read it.
struct FinishProblem {
  Sizes sizes;
  Weights weights;
  Products input;        // (slabs, 4 * hidden, channels)
  Products out_proj;     // (slabs, channels, hidden)
  Products out_gate;     // (slabs, channels, channels)
  LineSums input_sums;   // (rows, 4 * hidden)
  LineSums output_sums;  // (rows, 2 * channels)
  LinearResult proj_a, gate_a, proj_b, gate_b, out_proj_result, out_gate_result;
  Result norm_in_weight, norm_in_bias;    // (channels)
  Result norm_out_weight, norm_out_bias;  // (hidden)
  float* workspace = nullptr;             // finish_workspace() floats, contents arbitrary
};

std::int64_t finish_workspace(const FinishProblem& problem);
void finish_sm80(const FinishProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::triangular_multiplicative_update
