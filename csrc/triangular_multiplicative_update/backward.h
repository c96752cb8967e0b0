// SPDX-License-Identifier: Apache-2.0
// The steps of the backward as functions of tensors, and what they share. For the room's host ops.
#pragma once

#include "triangular_multiplicative_update/chunks.h"
#include "triangular_multiplicative_update/finish.h"

namespace fused_ops::triangular_multiplicative_update {

// The differentiable arguments in the order of the schema.
enum Input : int {
  kPair,
  kNormInWeight,
  kNormInBias,
  kProjAWeight,
  kProjABias,
  kGateAWeight,
  kGateABias,
  kProjBWeight,
  kProjBBias,
  kGateBWeight,
  kGateBBias,
  kNormOutWeight,
  kNormOutBias,
  kOutProjWeight,
  kOutProjBias,
  kOutGateWeight,
  kOutGateBias,
  kInputs,
};

// One for each of these, or none.
using Inputs = std::array<MaybeTensor, kInputs>;

// One backward: its arguments, checked and resolved once.
struct Call {
  Call(const Tensor& out_grad, const Tensor& input, const MaybeTensor& factors,
       const Parameters& parameters, bool is_outgoing, bool gate_normalized, double eps,
       std::string_view precision_text, std::optional<ScalarType> dtype);

  const Sizes& sizes() const { return problem.sizes; }
  Mode mode() const { return chosen.mode; }
  bool brain() const { return chosen.mode == Mode::kBFloat16; }
  // Of the result, and of the backward's matrices.
  ScalarType type() const { return scalar_type_of(type_of(chosen.mode)); }
  // Of the planes a and b; of o and all planes of gradients.
  ScalarType half() const { return brain() ? ScalarType::BFloat16 : ScalarType::Half; }
  ScalarType wide() const { return brain() ? ScalarType::BFloat16 : ScalarType::Float; }
  // The way back of the scaled planes a, b that were projected: (hidden).
  const float* undo_a() const;
  const float* undo_b() const;

  // What the plain structs below point into.
  Tensor pair;
  Tensor grad;
  std::vector<Tensor> kept;
  std::string precision;
  bool outgoing = false;
  std::vector<std::int64_t> lead;
  Problem problem;
  Choice chosen;
  Pairs pairs;
  Pairs grads;
  Mask mask;
  Weights weights;
  // 0, or how many blocks of the two backward kernels stay on the multiprocessors: each writes one
  // row of sums a chunk, and project_backward the transposed gradient.
  int resident_blocks = 0;
  Packed layout;
  Tensor packed;
  CUstream_st* stream = nullptr;
};

// Weights to multiply gradients with, where gradients must come so far (finish.h), and room for the
// largest magnitudes of the gradient of o.
struct Folded {
  MaybeTensor input;
  MaybeTensor out_proj;
  MaybeTensor out_gate;
  MaybeTensor largest;
};

// Packs, projects into a and b (parts, hidden, pairs) and contracts into o (hidden, pairs). For the
// way back, also folds weights and zeroes `largest`.
void form_planes(const Call& call, const Folded& folded, const Tensor& a, const Tensor& b,
                 const Tensor& o);

// Of a chunk, as OutputBackwardProblem has them.
struct OutputGradients {
  void* out_proj = nullptr;
  void* gate = nullptr;
  void* normalised = nullptr;
  void* gate_input = nullptr;
  float* sums = nullptr;
};

void output_backward(const Call& call, const Tensor& o, Chunk chunk, const OutputGradients& to);

// The gradient with respect to o takes the place of o.
void norm_out_backward(const Call& call, const Tensor& grad, Chunk chunk, const Tensor& o,
                       const MaybeTensor& largest);

// A plane of fp32 numbers as scaled fp16 ones (parts, hidden, pairs), and the way back (hidden).
void split_plane(const Call& call, const Tensor& plane, const Tensor& largest, const Tensor& to,
                 const Tensor& undo);

// da = do * b or, `transposed`, db = do^T * a, from split planes (2, hidden, pairs).
void contract_backward(const Call& call, const Tensor& grad, const Tensor& grad_undo,
                       const Tensor& plane, bool transposed, const Tensor& out);

// To `grad` (count, 4 * hidden), or transposed where blocks stay, `normalised` (count, channels)
// and rows of sums.
void project_backward(const Call& call, const Tensor& da, const Tensor& db,
                      const MaybeTensor& grad_undo, Chunk chunk, const Tensor& grad,
                      const Tensor& normalised, float* sums);

void norm_in_backward(const Call& call, const Tensor& grad, const Tensor& gate_grad, Chunk chunk,
                      const Tensor& out);

// What is summed over pairs (finish.h), in fp32: matrices of products and rows of line sums of
// whatever number.
struct Sums {
  MaybeTensor input;
  MaybeTensor out_proj;
  MaybeTensor out_gate;
  MaybeTensor input_lines;
  MaybeTensor output_lines;
};

// The parameters' gradients, where `grads` has tensors for them.
void finish(const Call& call, const Sums& sums, const Inputs& grads);

}  // namespace fused_ops::triangular_multiplicative_update
