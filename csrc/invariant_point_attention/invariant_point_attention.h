// SPDX-License-Identifier: Apache-2.0
// What host op, launchers and kernels of invariant point attention say to each other. Plain data:
// no torch, no CUDA.
//
// The forward is
//   prepare   LayerNorm of the nodes; the mask as bits; the weights side by side in one matrix; the
//             centre of each sample
//   (product) x * [query, key, value, query points, key points, value points]^T
//   frames    points to the global frame, less the centre
//   logits    for a block of queries: q k^T, distances and the pair's bias, the pair read once
//   values    softmax; what the queries gather; points back to the queries' frames
//   gather    sum over keys of weights times pair values, where the model has them
//   (product) the output projection
// with the products from a library. What is of size N * N exists for a block of queries only.
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

struct Sizes {
  std::int64_t samples = 0;
  std::int64_t n = 0;  // residues of a sample
  int channels = 0;    // of a node
  int pair_channels = 0;
  int value_channels = 0;  // of the pair values, 0 where there are none
  int heads = 0;
  int dim = 0;       // of a head, rounded up to a multiple of 8; zeros fill it up
  int head_dim = 0;  // of a head, as the model has it
  int query_points = 0;
  int value_points = 0;
  bool has_norms = false;  // of the gathered points, among the features

  constexpr std::int64_t positions() const { return samples * n; }
  constexpr int width() const { return heads * dim; }
  // Coordinates of a head's query points, and of its value points; zeros fill them up.
  constexpr int query_coordinates() const { return (3 * query_points + 3) / 4 * 4; }
  constexpr int value_coordinates() const { return (3 * value_points + 7) / 8 * 8; }
  // What the first product gives of a position, one after the other: query, key, value (heads,
  // dim), query points, key points (heads, query_points, 3), value points (heads, value_points, 3).
  constexpr int points_at() const { return 3 * width(); }
  constexpr int columns() const {
    return points_at() + 3 * heads * (2 * query_points + value_points);
  }
  // From one position to the next.
  constexpr int projected_pitch() const { return (columns() + 7) / 8 * 8; }
  // What the last product takes of a position, one after the other: scalars (heads, head_dim),
  // local points (heads, value_points, 3), norms (heads, value_points) if any, pair values (heads,
  // value_channels) if any.
  constexpr int local_points_at() const { return heads * head_dim; }
  constexpr int norms_at() const { return local_points_at() + 3 * heads * value_points; }
  constexpr int pair_values_at() const {
    return norms_at() + (has_norms ? heads * value_points : 0);
  }
  constexpr int features() const { return pair_values_at() + heads * value_channels; }
  constexpr int feature_pitch() const { return (features() + 7) / 8 * 8; }
  // Of a line of logits, in numbers.
  constexpr std::int64_t logit_pitch() const { return (n + 3) / 4 * 4; }
};

// The mask of a sample as bits: the lowest of word 0 is residue 0. Bits beyond the last are 0.
constexpr std::int64_t mask_words(std::int64_t n) {
  return ceil_div(n, 64);
}

// Element (sample, residue, channel) at sample * sample_stride + residue * residue_stride +
// channel.
struct Nodes {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  std::int64_t sample_stride = 0;
  std::int64_t residue_stride = 0;
};

// (sample, i, j, channel) at sample * sample_stride + i * i_stride + j * j_stride + channel.
struct Pairs {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  std::int64_t sample_stride = 0;
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
};

// Null: all are there. Zero is "not there", all else, NaN included, "there".
struct Mask {
  const void* data = nullptr;
  MaskType type = MaskType::kUInt8;
  std::int64_t sample_stride = 0;
  std::int64_t residue_stride = 0;
};

// fp32. Translation (sample, residue, axis) at sample * sample_stride + residue * 3 + axis,
// rotation
// (.., row, column) at sample * sample_stride + residue * 9 + row * 3 + column; points are rows: a
// local one p is p R + t.
struct Frames {
  const float* translations = nullptr;
  const float* rotations = nullptr;
  std::int64_t translation_sample_stride = 0;
  std::int64_t rotation_sample_stride = 0;
};

struct PrepareProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  float eps = 0.0f;
  Nodes nodes;
  Mask mask;
  Frames frames;
  Stored norm_weight, norm_bias;  // (channels), or null: no LayerNorm, x is the nodes
  // (heads * head_dim, channels), (3 * heads * points, channels), and biases or null.
  Linear query, key, value, query_points, key_points, value_points;
  Linear output;                     // (channels, features())
  void* normalised = nullptr;        // (positions(), channels) of type_of(mode)
  std::uint64_t* present = nullptr;  // (samples, mask_words(n)); null where mask.data is null
  float* centres = nullptr;          // (samples, 3): mean translation of the residues there are
  // Of type_of(mode), heads filled up with zeros to `dim`, lines to projected_pitch().
  void* projections = nullptr;      // (projected_pitch(), channels)
  void* projection_bias = nullptr;  // (projected_pitch())
  void* output_weight = nullptr;    // (channels, feature_pitch()), or null: not wanted
  void* output_bias = nullptr;      // (channels), zeros where there is none; or null: not wanted
};

void prepare_sm80(const PrepareProblem& problem, CUstream_st* stream);

struct FramesProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  const void* projected = nullptr;  // (positions(), projected_pitch()) of type_of(mode)
  Frames frames;
  const float* centres = nullptr;
  Stored head_weights;       // (heads), before the softplus
  float point_scale = 1.0f;  // of the softplus
  // (samples, heads, n, query_coordinates()): global coordinates less the centre, times the root of
  // softplus / 2 * point_scale * log2(e). So that what a logit loses is the sum of their squared
  // differences.
  float* query_points = nullptr;
  float* key_points = nullptr;
  // Global coordinates less the centre. 16 bits: (samples, heads, n, 2, value_coordinates()), what
  // one number holds and what a second holds of the rest; fp32: (samples, heads, n,
  // value_coordinates()).
  void* value_points = nullptr;
};

void frames_sm80(const FramesProblem& problem, CUstream_st* stream);

// Which queries a launch is of: `count` of each of `samples`, from the first ones on. More than one
// sample only if these are all of their queries.
struct Queries {
  std::int64_t first_sample = 0;
  std::int64_t samples = 1;
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// Of these: (queries.samples, heads, queries.count, logit_pitch()), in powers of 2, minus infinity
// for residues that are not there; what lies beyond n in a line is not defined.
struct LogitsProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Queries queries;
  const void* projected = nullptr;
  const float* query_points = nullptr;
  const float* key_points = nullptr;
  const std::uint64_t* present = nullptr;  // null: all are there
  Pairs pair;
  Linear bias;  // weight (heads, pair_channels), bias (heads) or null
  float bias_scale = 1.0f;
  float scalar_scale = 1.0f;  // of q k^T
  float* logits = nullptr;
};

void logits_sm80(const LogitsProblem& problem, CUstream_st* stream);       // 16-bit modes
void logits_fp32_sm80(const LogitsProblem& problem, CUstream_st* stream);  // kTf32, kSplit

// Queries without any key gather nothing: zeros for scalars, points and pair values.
struct ValuesProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Queries queries;
  const float* logits = nullptr;
  const void* projected = nullptr;
  const void* value_points = nullptr;
  Frames frames;
  const float* centres = nullptr;
  float norm_eps = 0.0f;
  // All columns but the pair values', and zeros beyond features() in a line.
  void* features = nullptr;  // (positions(), feature_pitch()) of type_of(mode)
  // What gives the weights: a weight is 2^(logit - statistic 0) * statistic 1; zeros where no key
  // is there.
  float* statistics = nullptr;  // (samples, heads, n, 2)
};

void values_sm80(const ValuesProblem& problem, CUstream_st* stream);
void values_fp32_sm80(const ValuesProblem& problem, CUstream_st* stream);

struct GatherProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Queries queries;
  const float* logits = nullptr;
  const float* statistics = nullptr;
  Pairs values;  // of value_channels
  void* features = nullptr;
};

void gather_sm80(const GatherProblem& problem, CUstream_st* stream);
void gather_fp32_sm80(const GatherProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::invariant_point_attention
