// SPDX-License-Identifier: Apache-2.0
// The kernels for large problems: their launchers' arguments. Plain data.
#pragma once

#include <limits>

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

// The type of a mode's results and of the matrices of its backward.
constexpr DType type_of(Mode mode) {
  return mode == Mode::kBFloat16  ? DType::kBFloat16
         : mode == Mode::kFloat16 ? DType::kFloat16
                                  : DType::kFloat32;
}

// Whether the kernels of resident_sm90a.cuh take the tensor: rows begin at multiples of 16 bytes
// and of eight numbers, and 32 bits count the eights; fp32 or the mode's 16 bits.
inline bool is_walkable(const Pairs& pairs, const Sizes& sizes, Mode mode) {
  const std::int64_t strides = pairs.batch_stride | pairs.i_stride | pairs.j_stride;
  const std::int64_t last =
      (sizes.batch - 1) * pairs.batch_stride + (sizes.n - 1) * (pairs.i_stride + pairs.j_stride);
  return (pairs.type == DType::kFloat32 || pairs.type == type_of(mode)) &&
         reinterpret_cast<std::uintptr_t>(pairs.data) % 16 == 0 && strides % 8 == 0 &&
         sizes.channels % 8 == 0 && last / 8 < std::numeric_limits<int>::max() - kMostChannels &&
         pairs.batch_stride >= 0 && pairs.i_stride >= 0 && pairs.j_stride >= 0;
}

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
  // On Hopper, where resident_backward(): as many blocks. Then grad is (4 * hidden, count), and
  // each block has its row of sums.
  int resident_blocks = 0;
};

// Whether the backward has kernels that stay on a multiprocessor, given those for 128 rows.
inline bool resident_backward(const Pairs& pair, const Sizes& sizes, Mode mode) {
  return mode == Mode::kBFloat16 && pair.type == DType::kBFloat16 && is_walkable(pair, sizes, mode);
}

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
  // As in ProjectBackwardProblem; out_grad is_walkable() and bf16.
  int resident_blocks = 0;
};

void output_backward_sm80(const OutputBackwardProblem& problem, CUstream_st* stream);
void output_backward_sm90a(const OutputBackwardProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::triangular_multiplicative_update
