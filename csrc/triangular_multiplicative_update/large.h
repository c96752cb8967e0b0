// SPDX-License-Identifier: Apache-2.0
// The kernels for large problems: their launchers' arguments. Plain data.
#pragma once

#include "triangular_multiplicative_update/config.h"
#include "triangular_multiplicative_update/packed.h"

namespace fused_ops::triangular_multiplicative_update {

// Packs weights; with a mask whose values may exceed kMaskRoom, looks for the largest.
struct PackProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Weights weights;
  Mask mask;
  void* workspace = nullptr;  // Packed::of(sizes, mode).bytes
};

constexpr bool needs_largest(const Mask& mask, Mode mode) {
  return is_scaled(mode) && mask.data && mask.type != MaskType::kUInt8 &&
         mask.type != MaskType::kInt8;
}

void pack_sm80(const PackProblem& problem, CUstream_st* stream);

// The launchers for sm_90a take the tile of 128 rows alone.

// LayerNorm, the four input projections, gates and mask. Channels first_block * 64 on, `blocks` *
// 64 of them (fewer at the end), into planes that begin with the first of these.
struct ProjectProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  bool outgoing = false;
  float eps = 0.0f;
  int tile = 0;
  Pairs pair;
  Mask mask;
  const void* packed = nullptr;  // the workspace
  int first_block = 0;
  int blocks = 0;
  std::uint16_t* a[2] = {};  // parts hi and lo
  std::uint16_t* b[2] = {};
};

void project_sm80(const ProjectProblem& problem, CUstream_st* stream);
void project_sm90a(const ProjectProblem& problem, CUstream_st* stream);

// The same up to the gates, then backward from da and db to the projections' results. Of pairs
// first_pair to first_pair + count - 1, a multiple of the tile's rows or up to the last pair.
struct ProjectBackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  bool outgoing = false;
  float eps = 0.0f;
  int tile = 0;
  Pairs pair;
  Mask mask;
  const void* packed = nullptr;
  std::int64_t first_pair = 0;
  std::int64_t count = 0;
  // Planes: bf16 for kBFloat16, else fp32. For kFloat16 and kTf32 they are products of scaled
  // planes: times grad_undo (hidden), and for kTf32 times the way back from b's plane and a's, they
  // are the gradients.
  const void* da = nullptr;
  const void* db = nullptr;
  const float* grad_undo = nullptr;
  // In the type of the products (bf16, fp16 or fp32); zeros in the padding.
  void* grad = nullptr;        // (count, 4 * hidden): of proj_a, gate_a, proj_b, gate_b before bias
  void* normalised = nullptr;  // (count, channels)
  float* sums = nullptr;       // (row_blocks(), 4 * hidden): column sums of grad
};

constexpr std::int64_t row_blocks(int tile, std::int64_t count) {
  return ceil_div(count, kTiles[tile].rows);
}

void project_backward_sm80(const ProjectBackwardProblem& problem, CUstream_st* stream);
void project_backward_sm90a(const ProjectBackwardProblem& problem, CUstream_st* stream);

// LayerNorm of o, output projection, output gate.
struct OutputProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  bool gate_normalized = false;
  float eps = 0.0f;
  int tile = 0;
  Pairs pair;
  const void* packed = nullptr;
  const void* o =
      nullptr;          // plane: bf16 for kBFloat16, else fp32; scaled planes of kTf32 undone here
  void* out = nullptr;  // contiguous (batch, n, n, channels), of the mode's type
};

void output_sm80(const OutputProblem& problem, CUstream_st* stream);
void output_sm90a(const OutputProblem& problem, CUstream_st* stream);

// The same up to the gate, then backward from the result's gradient.
struct OutputBackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  bool gate_normalized = false;
  float eps = 0.0f;
  int tile = 0;
  Pairs pair;
  Pairs out_grad;
  const void* packed = nullptr;
  const void* o = nullptr;
  std::int64_t first_pair = 0;
  std::int64_t count = 0;
  // In the type of the products; zeros in the padding.
  void* out_proj_grad = nullptr;  // (count, channels): of the output projection's result
  void* gate_grad = nullptr;      // (count, channels): of the gate's, before the sigmoid
  void* normalised = nullptr;     // (count, hidden): o normalised
  void* gate_input = nullptr;     // (count, channels), or null: what the gate has read
  float* sums = nullptr;          // (row_blocks(), 2 * channels): column sums of the first two
};

void output_backward_sm80(const OutputBackwardProblem& problem, CUstream_st* stream);
void output_backward_sm90a(const OutputBackwardProblem& problem, CUstream_st* stream);

// The type of a mode's results and of the matrices of its backward.
constexpr DType type_of(Mode mode) {
  return mode == Mode::kBFloat16  ? DType::kBFloat16
         : mode == Mode::kFloat16 ? DType::kFloat16
                                  : DType::kFloat32;
}

}  // namespace fused_ops::triangular_multiplicative_update
