// SPDX-License-Identifier: Apache-2.0
// The backward of invariant point attention between the projections and the output projection, from
// the gradient with respect to the features and what the forward has stored:
//   output_backward      back to the gathered numbers, in the global frame; and the row dots
// then for a block of queries at a time, whose logits and dS stay in the L2 cache,
//   (logits)             as in the forward
//   pair_dots            (pair values) what dP owes to them, from the pair-value tensor
//   keys_backward        dS; sums over queries: gradients of keys and values
//   settle_dots          (fp32) row dots that make sums of dS over keys zero; keys_backward again
//   queries_backward     sums over keys: gradients of queries
//   pair_backward        gradients of the pair tensor and of the bias projection
//   distances_backward   (head weights) sums of dS times squared distances
// and at the end
//   frames_backward      from these sums to the projected numbers and the frames
// Weights are formed again from logits and log_sums, P = 2^(logit - log_sum), and
//   dS = P (dP - row_dot),   dP = d_gathered . values + pair_dot.
#pragma once

#include "invariant_point_attention/invariant_point_attention.h"

namespace fused_ops::invariant_point_attention {

// Numbers of a line of `q_moments` and `k_moments`: q or k (dim), the high parts of its points
// (global, less the centre), the low parts (16-bit modes), one 1, zeros up to a multiple of 8. So
// that sums of dS times such lines are all that gradients of scalars and points need.
constexpr int moment_one(const Sizes& sizes, Mode mode) {
  return sizes.dim + point_copies(mode) * sizes.query_numbers();
}

constexpr int moment_line(const Sizes& sizes, Mode mode) {
  return static_cast<int>(round_up(moment_one(sizes, mode) + 1, 8));
}

// Of `d_values`: dv (dim), the value points' gradient, zeros up to a multiple of 8.
constexpr int d_value_line(const Sizes& sizes) {
  return static_cast<int>(round_up(sizes.dim + sizes.value_numbers(), 8));
}

struct OutputBackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Frames frames;
  const Centre* centres = nullptr;
  float norm_eps = 0.0f;
  const void* features = nullptr;    // (nodes(), features()) of type_of(mode), of the forward
  const void* d_features = nullptr;  // likewise
  const float* gathered = nullptr;   // of the forward
  // Results. Zeros where no key of the batch element is there.
  // (batch, heads, n, value_line) of type_of(mode): the gradient of v (dim), then that of the
  // points in the global frame as often as `values` has them, zeros: its dot product with a line of
  // `values` is dP without pair values.
  void* d_gathered = nullptr;
  // (batch, heads, n): sum over keys of P dP, from the gathered numbers: d_gathered, as it has been
  // rounded, times features' scalars and (gathered + translation - centre), plus d_features times
  // features over the pair values.
  float* row_dots = nullptr;
};

void output_backward_sm80(const OutputBackwardProblem& problem, CUstream_st* stream);  // any mode

struct ScoresBackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Block block;
  const float* logits = nullptr;     // (batch, heads, block.rows, pair_line)
  const float* log_sums = nullptr;   // (batch, heads, n)
  const float* row_dots = nullptr;   // (batch, heads, n)
  const float* pair_dots = nullptr;  // as the logits; or null: no pair values
  const void* values = nullptr;      // (batch, heads, n, value_line) of type_of(mode)
  const void* d_gathered = nullptr;  // likewise
  const void* q_moments = nullptr;   // (batch, heads, n, moment_line) of type_of(mode)
  const void* k_moments = nullptr;
  bool accumulate = false;  // d_keys and d_values are added to: those of an earlier block
  // Results.
  void* d_logits = nullptr;    // (batch, heads, block.rows, pair_line) of type_of(mode): dS, of the
                               // logits without log2(e). By keys_backward, for the others.
  float* d_keys = nullptr;     // (batch, heads, n, moment_line): sum over queries of dS q_moments
  float* d_values = nullptr;   // (batch, heads, n, d_value_line): sum over queries of P d_gathered
  float* d_queries = nullptr;  // (batch, heads, n, moment_line), of the block's queries: sum over
                               // keys of dS k_moments
};

void keys_backward_sm80(const ScoresBackwardProblem& problem, CUstream_st* stream);  // 16-bit modes
void keys_backward_fp32_sm80(const ScoresBackwardProblem& problem, CUstream_st* stream);
void queries_backward_sm80(const ScoresBackwardProblem& problem, CUstream_st* stream);
void queries_backward_fp32_sm80(const ScoresBackwardProblem& problem, CUstream_st* stream);

// Row dots of the block's queries, again: plus the sum over keys of dS, which they would make zero
// if they were exact. Those of output_backward are off by roundings of the forward, which at a
// hundred Angstrom cost fp32 a digit. For fp32 modes, whose keys_backward then runs once more.
struct SettleDotsProblem {
  Sizes sizes;
  Block block;
  const float* d_logits = nullptr;  // (batch, heads, block.rows, pair_line)
  float* row_dots = nullptr;        // (batch, heads, n)
};

void settle_dots_sm80(const SettleDotsProblem& problem, CUstream_st* stream);

struct PairDotsProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Block block;
  Pairs pair;                        // with value_channels
  const void* d_features = nullptr;  // (nodes(), features()): its pair values are read
  float* pair_dots = nullptr;        // (batch, heads, block.rows, pair_line)
};

void pair_dots_sm80(const PairDotsProblem& problem, CUstream_st* stream);
void pair_dots_fp32_sm80(const PairDotsProblem& problem, CUstream_st* stream);

// grad[i, j] = bias_scale * sum over heads of dS[h, i, j] weight[h]  (where d_logits is given)
//            + sum over heads of P[h, i, j] d_features[i, h]          (where d_features is given)
// and the sums over pairs of dS z (not times bias_scale) and of dS.
struct PairBackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Block block;
  int channels = 0;  // of the tensor whose gradient this is
  const void* d_logits =
      nullptr;    // (batch, heads, block.rows, pair_line) of type_of(mode); or null
  Stored weight;  // (heads, channels)
  float bias_scale = 1.0f;
  const float* logits = nullptr;  // with d_features
  const float* log_sums = nullptr;
  const void* d_features = nullptr;  // (nodes(), features()): its pair values are read; or null
  // Results.
  void* grad = nullptr;  // (batch, n, n, channels), contiguous, the block's queries; or null
  DType grad_type = DType::kFloat32;
  bool accumulate = false;  // grad, of fp32, is added to, for one batch element at a time
  Pairs pair;               // what dS is multiplied with for the sums
  // (parts, heads, channels + 1), the last column dS alone; or null. The sums of the parts, in
  // order.
  float* sums = nullptr;
  int parts = 0;          // as pair_sum_parts() says for the largest block
  bool add_sums = false;  // to those of an earlier block
};

// How many blocks of threads share the sums: as many as run at once.
int pair_sum_parts(const Sizes& sizes, Mode mode);

void pair_backward_sm80(const PairBackwardProblem& problem, CUstream_st* stream);
void pair_backward_fp32_sm80(const PairBackwardProblem& problem, CUstream_st* stream);

// Sums of dS times the squared distance of the query's and key's points, times what makes them the
// gradient of head_weights: -point_scale * sigmoid(head_weights) / 2.
struct DistancesBackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Block block;
  const void* d_logits = nullptr;
  const float* q_points = nullptr;
  const float* k_points = nullptr;
  Stored head_weights;
  float point_scale = 1.0f;
  float* sums = nullptr;  // (parts, heads)
  int parts = 0;          // as distance_sum_parts() says for the largest block
  bool add_sums = false;
};

int distance_sum_parts(const Sizes& sizes);
void distances_backward_sm80(const DistancesBackwardProblem& problem, CUstream_st* stream);  // any

struct FramesBackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Frames frames;
  float scalar_scale = 1.0f;
  float point_scale = 1.0f;
  Stored head_weights;
  float norm_eps = 0.0f;
  const void* projected = nullptr;  // (nodes(), projected()): the local points are read
  const float* q_points = nullptr;
  const float* k_points = nullptr;
  const void* features = nullptr;
  const void* d_features = nullptr;
  const float* gathered = nullptr;
  const Centre* centres = nullptr;
  const float* d_queries = nullptr;  // sums of the scores' kernels
  const float* d_keys = nullptr;
  const float* d_values = nullptr;
  // Results.
  void* d_projected = nullptr;      // (nodes(), projected()) of type_of(mode), zeros in the filling
  float* d_translations = nullptr;  // (batch, n, 3); or null
  float* d_rotations = nullptr;     // (batch, n, 3, 3); or null
};

void frames_backward_sm80(const FramesBackwardProblem& problem, CUstream_st* stream);  // any mode

}  // namespace fused_ops::invariant_point_attention
