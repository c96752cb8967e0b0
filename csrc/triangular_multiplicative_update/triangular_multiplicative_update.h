// SPDX-License-Identifier: Apache-2.0
// What host op, launchers and kernels of the triangular multiplicative update say to each other.
// Plain data: no torch, no CUDA.
//
// Pairs are numbered as they lie in the planes. The contraction is always
//   o[line][column] = sum over k of a[line][k] * b[column][k],
// so for "incoming" the planes a and b hold pair (k, line) where those of "outgoing" hold
// (line, k); o is (i, j) in both. A line of n pairs is padded to `pitch` places, so that 16 bytes
// never cross lines, and pair q = (batch * n + line) * pitch + column.
//
// A plane is channel-first: element (channel, q) at channel * pairs() + q.
#pragma once

#include <cstdint>

#include "common/stored.h"

// cudaStream_t, without CUDA's headers: the planner has none.
struct CUstream_st;

namespace fused_ops::triangular_multiplicative_update {

// In what the products are taken, and with that how planes are stored.
enum class Mode : std::uint8_t {
  kBFloat16,  // planes a, b, o in bf16
  kFloat16,   // a, b in fp16, o in fp32: it may exceed fp16's range
  kTf32,      // fp32 tensors; one product of numbers scaled and rounded to fp16, a, b so, o in fp32
  kSplit,     // fp32 tensors to fp32's accuracy: a, b as two fp16 planes hi and lo, o in fp32
};

constexpr int kPlaces = 8;  // lines are padded to a multiple of so many pairs

struct Sizes {
  std::int64_t batch = 0;
  std::int64_t n = 0;
  std::int64_t pitch = 0;  // n rounded up to a multiple of kPlaces
  int channels = 0;        // of the pair representation
  int hidden = 0;

  constexpr std::int64_t pairs() const { return batch * n * pitch; }  // with the padding
};

struct Weights {
  Stored norm_in_weight, norm_in_bias;    // (channels)
  Stored norm_out_weight, norm_out_bias;  // (hidden)
  Linear proj_a, gate_a, proj_b, gate_b;  // (hidden, channels)
  Linear out_proj;                        // (channels, hidden)
  Linear out_gate;                        // (channels, channels)
  float eps = 0.0f;
  bool gate_normalized = false;  // the output gate reads LayerNorm(pair) instead of pair
};

// The pair representation or something of its shape: element (batch, i, j, channel) at
// batch * batch_stride + i * i_stride + j * j_stride + channel, in elements.
struct Pairs {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  std::int64_t batch_stride = 0;
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
};

// (batch, i, j) at batch * batch_stride + i * i_stride + j * j_stride; null: all ones.
struct Mask {
  const void* data = nullptr;
  MaskType type = MaskType::kUInt8;
  std::int64_t batch_stride = 0;  // 0 where the mask is shared
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
};

// Small problems ---------------------------------------------------------------------------------
// Two launches for the whole op, on the fp32 units, straight from the stored parameters.
struct SmallProblem {
  Sizes sizes;
  bool outgoing = false;
  Pairs pair;
  Mask mask;
  Weights weights;
  DType output_type = DType::kFloat32;
  void* out = nullptr;  // contiguous (batch, n, n, channels)
  // small_workspace(sizes) floats (small.h), aligned to 16 bytes, contents arbitrary.
  float* workspace = nullptr;
};

// For problems that small_fits() of small.h admits.
void small_forward_sm80(const SmallProblem& problem, CUstream_st* stream);

// The contraction of split planes
// ------------------------------------------------------------------ For each channel and batch
// element, of (n, n) matrices with lines of `pitch`:
enum class Product : std::uint8_t {
  kNT,  // out[i][j] = sum over k of a[i][k] * b[j][k]     o from a, b
  kNN,  // out[i][j] = sum over k of a[i][k] * b[k][j]     da from do, b
  kTN,  // out[i][j] = sum over k of a[k][i] * b[k][j]     db from do, a
};

// A plane of scaled numbers, each the sum of two fp16 numbers. Padding holds zeros. The number is
// (hi + lo) * undo[channel].
struct SplitPlane {
  const std::uint16_t* hi = nullptr;
  const std::uint16_t* lo = nullptr;
  const float* undo = nullptr;
};

struct ContractProblem {
  Sizes sizes;
  int channels = 0;  // planes of so many channels
  Product product = Product::kNT;
  SplitPlane a;
  SplitPlane b;
  float* out = nullptr;  // plane; its padding is not written
};

void contract_sm80(const ContractProblem& problem, CUstream_st* stream);
void contract_sm90a(const ContractProblem& problem, CUstream_st* stream);  // for n above 64

// Backward through the LayerNorms
// ------------------------------------------------------------------ Both take pairs first_pair to
// first_pair + count - 1; these are whole lines of `pitch` places.

// Through the one after the contraction. `grad` (count, hidden) holds the gradient with respect to
// the normalised o, before weight and bias, of these pairs, in the type of the products (bf16,
// fp16, or fp32 for the two fp32 modes). The gradient with respect to o replaces it in the plane,
// zeros in the padding. `largest` (hidden), or null: raised to the largest magnitude of each
// channel as the bits of a non-negative float, infinite and NaN left out, by integer atomics.
struct NormOutBackwardProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  float eps = 0.0f;
  std::int64_t first_pair = 0;
  std::int64_t count = 0;
  const void* grad = nullptr;
  const float* o_undo = nullptr;         // (hidden): o is the plane times it; null: all ones
  const float* o_undo_second = nullptr;  // and times this one
  void* o = nullptr;                     // bf16 for kBFloat16, else fp32
  unsigned* largest = nullptr;
};

void norm_out_backward_sm80(const NormOutBackwardProblem& problem, CUstream_st* stream);

// Scales a plane of fp32 numbers channel by channel to the top of fp16's range and splits them:
// hi and, unless null, lo. `largest` as above; undo (hidden) receives the way back.
struct SplitPlaneProblem {
  Sizes sizes;
  const float* plane = nullptr;
  const unsigned* largest = nullptr;
  std::uint16_t* hi = nullptr;
  std::uint16_t* lo = nullptr;
  float* undo = nullptr;
};

void split_plane_sm80(const SplitPlaneProblem& problem, CUstream_st* stream);

// Through the one before the projections, and the sum with what came through the output gate.
// Pairs here are those of the planes a and b: (k, line) for incoming. `grad` (count, channels)
// holds the gradient with respect to the normalised input, before weight and bias. `gate_grad`, or
// null, is for ALL pairs and in the order of o, (pairs(), channels): the gradient that came through
// the output gate, with respect to the raw pair, or with gate_normalized to the normalised one.
struct NormInBackwardProblem {
  Sizes sizes;
  bool outgoing = false;
  bool gate_normalized = false;
  float eps = 0.0f;
  std::int64_t first_pair = 0;
  std::int64_t count = 0;
  Pairs pair;
  DType grad_type = DType::kFloat32;  // of grad and gate_grad
  const void* grad = nullptr;
  const void* gate_grad = nullptr;
  DType output_type = DType::kFloat32;
  void* out = nullptr;  // contiguous (batch, n, n, channels)
};

void norm_in_backward_sm80(const NormInBackwardProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::triangular_multiplicative_update
