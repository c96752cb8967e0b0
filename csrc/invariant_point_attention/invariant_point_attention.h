// SPDX-License-Identifier: Apache-2.0
// What host op, launchers and kernels of invariant point attention say to each other. Plain data:
// no torch, no CUDA.
//
// The forward is
//   prepare   LayerNorm of the nodes; the mask as bits; the centre of each batch element; the
//             weights side by side in one matrix
//   (product) x * [q, k, v, query points, key points, value points]^T
//   frames    points to the global frame, less the centre; the rows that values are gathered from
// and, for a block of queries at a time, so that its logits stay in the L2 cache,
//   logits    q k^T, distances of points, and the bias from the pair tensor, which is read once
//   values    softmax, times the values; points back to the frame of the query
//   gather    (where pair values are asked for) the weights times the pair-value tensor
// then
//   (product) the output projection
// with the products from a library.
#pragma once

#include <cstdint>

#include "common/stored.h"

// cudaStream_t, without CUDA's headers: the planner has none.
struct CUstream_st;

namespace fused_ops::invariant_point_attention {

// In what the products are taken.
enum class Mode : std::uint8_t {
  kBFloat16,
  kFloat16,
  kTf32,   // fp32 tensors, with the error of one TF32 product
  kSplit,  // fp32 tensors to fp32's accuracy
};

constexpr DType type_of(Mode mode) {
  return mode == Mode::kBFloat16  ? DType::kBFloat16
         : mode == Mode::kFloat16 ? DType::kFloat16
                                  : DType::kFloat32;
}

constexpr bool is_fp32(Mode mode) {
  return type_of(mode) == DType::kFloat32;
}

constexpr std::int64_t round_up(std::int64_t count, std::int64_t to) {
  return ceil_div(count, to) * to;
}

struct Sizes {
  std::int64_t batch = 0;
  std::int64_t n = 0;      // residues
  int channels = 0;        // of a node
  int pair_channels = 0;   // of the tensor that the bias comes from
  int value_channels = 0;  // of the pair-value tensor; 0: no pair values are gathered
  int heads = 0;
  int dim = 0;       // of a head, rounded up to a multiple of 8; zeros fill it up
  int head_dim = 0;  // of a head, as the model has it
  int query_points = 0;
  int value_points = 0;
  bool norms = false;  // lengths of the gathered local points are features too

  constexpr std::int64_t nodes() const { return batch * n; }
  constexpr int width() const { return heads * dim; }
  // Numbers of a head's query (and key) points, and of its value points: (point, xyz).
  constexpr int query_numbers() const { return 3 * query_points; }
  constexpr int value_numbers() const { return 3 * value_points; }

  // Columns of what the input projections give for a node, in this order: q, k, v (heads, dim);
  // query, key and value points (heads, points, xyz); zeros up to a multiple of 8.
  constexpr int query_points_at() const { return 3 * width(); }
  constexpr int key_points_at() const { return query_points_at() + heads * query_numbers(); }
  constexpr int value_points_at() const { return key_points_at() + heads * query_numbers(); }
  constexpr int projected_filled() const { return value_points_at() + heads * value_numbers(); }
  constexpr int projected() const { return static_cast<int>(round_up(projected_filled(), 8)); }

  // Columns of what the output projection gets for a node: gathered scalars (heads, head_dim),
  // local points (heads, points, xyz), their lengths (heads, points) if `norms`, gathered pair
  // values (heads, value_channels); zeros up to a multiple of 8.
  constexpr int points_at() const { return heads * head_dim; }
  constexpr int norms_at() const { return points_at() + heads * value_numbers(); }
  constexpr int pair_values_at() const { return norms_at() + (norms ? heads * value_points : 0); }
  constexpr int features_filled() const { return pair_values_at() + heads * value_channels; }
  constexpr int features() const { return static_cast<int>(round_up(features_filled(), 8)); }
};

// Points that products gather are stored as one fp32 number in fp32 modes and as two of the 16-bit
// type otherwise, high + low. Infinities of high are replaced by the largest finite number where
// the coordinate is finite, so that a residue that is not there cannot make a NaN.
constexpr int point_copies(Mode mode) {
  return is_fp32(mode) ? 1 : 2;
}

// Numbers of a line of `values`: v (dim), the high parts of all value points, the low parts (16-bit
// modes), zeros up to a multiple of 8.
constexpr int value_line(const Sizes& sizes, Mode mode) {
  return static_cast<int>(round_up(sizes.dim + point_copies(mode) * sizes.value_numbers(), 8));
}

// Fp32 numbers of a line of `q_points` and `k_points`: zeros up to a multiple of 4.
constexpr int point_line(const Sizes& sizes) {
  return static_cast<int>(round_up(sizes.query_numbers(), 4));
}

// Numbers from a query's logits to the next one's, also of other tensors of pairs of residues and
// heads. What lies beyond n is -inf in logits, 0 in others.
constexpr std::int64_t pair_line(std::int64_t n) {
  return round_up(n, 8);
}

// The mask as bits: the lowest of word 0 is residue 0. Bits beyond the last are 0.
constexpr std::int64_t mask_words(std::int64_t n) {
  return ceil_div(n, 64);
}

// (batch, residue, channel) at batch * batch_stride + residue * stride + channel, in elements.
struct Nodes {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  std::int64_t batch_stride = 0;
  std::int64_t stride = 0;
};

// Likewise. Null: all are there. Zero is "not there", all else, NaN included, "there".
struct Mask {
  const void* data = nullptr;
  MaskType type = MaskType::kUInt8;
  std::int64_t batch_stride = 0;
  std::int64_t stride = 0;
};

// (batch, i, j, channel) at batch * batch_stride + i * i_stride + j * j_stride + channel.
struct Pairs {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  std::int64_t batch_stride = 0;
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
};

// Frames, contiguous in a batch element: translations (n, xyz), rotations (n, 3, 3), fp32 or
// 16-bit.
struct Frames {
  Stored translations;
  std::int64_t translations_stride = 0;  // from a batch element to the next; 0: shared
  Stored rotations;
  std::int64_t rotations_stride = 0;
};

// Of a batch element. Points are stored less the centre; fp32 translations less it are exact near
// it.
struct alignas(16) Centre {
  float at[3];
  float present;  // residues that are there; 0: the attention of the batch element is zero
};

struct PrepareProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  float eps = 0.0f;
  Nodes node;
  Mask mask;
  Frames frames;                  // translations only
  Stored norm_weight, norm_bias;  // (channels); both null: no LayerNorm, nodes are only converted
  Linear q, k, v;                 // (heads * head_dim, channels)
  Linear q_points, k_points, v_points;  // (heads * points * 3, channels)
  Linear out;                           // (channels, features_filled())
  // Results; null: not wanted.
  void* normalised = nullptr;        // (nodes(), channels) of type_of(mode)
  std::uint64_t* present = nullptr;  // (batch, mask_words(n)); null where mask.data is null
  Centre* centres = nullptr;         // (batch)
  // Weights of type_of(mode), zeros where something is filled up.
  void* projections = nullptr;      // (projected(), channels)
  void* projection_bias = nullptr;  // (projected()); zeros where there is none
  void* out_weight = nullptr;       // (channels, features())
  void* out_bias = nullptr;         // (channels)
};

void prepare_sm80(const PrepareProblem& problem, CUstream_st* stream);

struct FramesProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Frames frames;
  const Centre* centres = nullptr;
  void* projected = nullptr;  // (nodes(), projected()) of type_of(mode)
  // (projected()), of fp32 modes, whose product has none: added to `projected`, in place. Or null.
  const float* projection_bias = nullptr;
  // Results. Global coordinates less the centre.
  float* q_points = nullptr;  // (batch, heads, n, point_line)
  float* k_points = nullptr;
  void* values = nullptr;  // (batch, heads, n, value_line) of type_of(mode)
  // What the backward multiplies with, (batch, heads, n, moment_line) of type_of(mode); backward.h
  // says what it is. Null: not wanted.
  void* q_moments = nullptr;
  void* k_moments = nullptr;
};

void frames_sm80(const FramesProblem& problem, CUstream_st* stream);

// A part of the queries: `rows` of each batch element from `first_row` on.
struct Block {
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
};

// logits = log2(e) * (scalar_scale * q.k + bias_scale * (W z + b)
//                     - point_scale * softplus(head_weights) / 2 * sum of squared distances),
// -inf where the key is not there.
struct LogitsProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Block block;
  const void* projected = nullptr;  // (nodes(), projected()) of type_of(mode); q and k are read
  const float* q_points = nullptr;
  const float* k_points = nullptr;
  const std::uint64_t* present = nullptr;  // null: all are there
  Pairs pair;                              // of any type, whatever the mode
  Linear bias;                             // (heads, pair_channels)
  Stored head_weights;                     // (heads)
  float scalar_scale = 1.0f;
  float point_scale = 1.0f;
  float bias_scale = 1.0f;
  float* logits = nullptr;  // (batch, heads, block.rows, pair_line)
};

void logits_sm80(const LogitsProblem& problem, CUstream_st* stream);       // 16-bit modes
void logits_fp32_sm80(const LogitsProblem& problem, CUstream_st* stream);  // kTf32, kSplit

struct ValuesProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Block block;
  const float* logits = nullptr;  // (batch, heads, block.rows, pair_line)
  const void* values = nullptr;   // (batch, heads, n, value_line) of type_of(mode)
  Frames frames;
  const Centre* centres = nullptr;
  float norm_eps = 0.0f;
  // Results, of the block's queries. Zeros where no key is there.
  void* features = nullptr;  // (nodes(), features()) of type_of(mode): all but the pair values; the
                             // filling too
  float* log_sums = nullptr;  // (batch, heads, n): a weight is 2^(logit - log_sum); +inf where no
                              // key is there. Or null.
  float* gathered = nullptr;  // (batch, n, heads, value_numbers()): the points that were gathered,
                              // in the global frame, less the query's translation. Or null.
};

void values_sm80(const ValuesProblem& problem, CUstream_st* stream);
void values_fp32_sm80(const ValuesProblem& problem, CUstream_st* stream);

struct GatherProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Block block;
  const float* logits = nullptr;
  const float* log_sums = nullptr;
  Pairs pair;                // with value_channels
  void* features = nullptr;  // the pair values of it are written
};

void gather_sm80(const GatherProblem& problem, CUstream_st* stream);
void gather_fp32_sm80(const GatherProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::invariant_point_attention
