// SPDX-License-Identifier: Apache-2.0
// What host op, launchers and kernels of MSA row attention say to each other. Plain data: no torch,
// no CUDA.
//
// Rows of the MSA that share a pair tensor are a group; row r of group g is number g * rows + r.
// The forward is
//   prepare   LayerNorm of the MSA; the mask as bits; the weights side by side in one matrix
//   (product) x * [query, key, value, gate]^T
//   bias      pair -> (groups, heads, N, N)
//   attend    softmax(q k^T + bias) v, times the gate
//   (product) the output projection
// with the products from a library.
#pragma once

#include <cstdint>

#include "common/rows.h"
#include "common/stored.h"

// cudaStream_t, without CUDA's headers: the planner has none.
struct CUstream_st;

namespace fused_ops::msa_row_attention {

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
  std::int64_t groups = 0;  // pair tensors
  std::int64_t rows = 0;    // of the MSA, that share one
  std::int64_t n = 0;       // positions
  int channels = 0;         // of the MSA
  int pair_channels = 0;
  int heads = 0;
  int dim = 0;       // of a head, rounded up to a multiple of 8; zeros fill it up
  int head_dim = 0;  // of a head, as the model has it

  constexpr int width() const { return heads * dim; }
  constexpr std::int64_t all_rows() const { return groups * rows; }
  constexpr std::int64_t positions() const { return groups * rows * n; }
};

// The mask of a row as bits: the lowest of word 0 is key 0. Bits beyond the last key are 0.
constexpr std::int64_t mask_words(std::int64_t n) {
  return ceil_div(n, 64);
}

// The bias of a group and head is stored by blocks of 16 queries by 16 keys, in the order in which
// the lanes of a warp hold the results of mma.m16n8k16: lane l = 4 * g + t has the eight numbers
//   (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1), then the same of columns 8 further,
// one after the other. Blocks of the same queries follow each other, up to a multiple of 64 keys;
// what lies beyond N is zero.
constexpr int kBiasBlock = 16;
constexpr int kBiasNumbers = kBiasBlock * kBiasBlock;

constexpr std::int64_t bias_blocks(std::int64_t n) {
  return ceil_div(n, kBiasBlock);
}

constexpr std::int64_t bias_key_blocks(std::int64_t n) {
  return ceil_div(n, 64) * (64 / kBiasBlock);
}

// In numbers, of all groups and heads: of type_of(mode).
constexpr std::int64_t bias_size(const Sizes& sizes) {
  return sizes.groups * sizes.heads * bias_blocks(sizes.n) * bias_key_blocks(sizes.n) *
         kBiasNumbers;
}

// An MSA as it is stored: element (group, row, position, channel) at group * group_stride +
// row * row_stride + position * position_stride + channel, in elements.
struct Msa {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  std::int64_t group_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t position_stride = 0;
};

// Of `sizes` groups, rows and n count.
inline Rows rows_of(const Sizes& sizes, const Msa& msa) {
  return {msa.data,
          msa.type,
          {{sizes.n, msa.position_stride},
           {sizes.rows, msa.row_stride},
           {sizes.groups, msa.group_stride}}};
}

// As an MSA; key (group, row, position). Null: all are there. Zero is "not there", all else, NaN
// included, "there".
struct Mask {
  const void* data = nullptr;
  MaskType type = MaskType::kUInt8;
  std::int64_t group_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t position_stride = 0;
};

// (group, i, j, channel) at group * group_stride + i * i_stride + j * j_stride + channel.
struct Pairs {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  std::int64_t group_stride = 0;
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
};

struct PrepareProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  float eps = 0.0f;
  Msa msa;
  Mask mask;
  Stored norm_weight, norm_bias;     // (channels)
  Stored query, key, value, gate;    // (heads * head_dim, channels)
  Stored gate_bias;                  // (heads * head_dim), or null
  Stored out_proj;                   // (channels, heads * head_dim)
  Stored out_proj_bias;              // (channels), or null
  void* normalised = nullptr;        // (positions(), channels) of type_of(mode)
  std::uint64_t* present = nullptr;  // (all_rows(), mask_words(n)); null where mask.data is null
  // Weights of type_of(mode), heads filled up with zeros to `dim`; null: not wanted.
  void* projections = nullptr;      // (4 * width, channels)
  void* projection_bias = nullptr;  // (4 * width): that of the gate, zeros for the others
  void* out_weight = nullptr;       // (channels, width)
  void* out_bias = nullptr;         // (channels); zeros where there is none
};

void prepare_sm80(const PrepareProblem& problem, CUstream_st* stream);

struct BiasProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  float eps = 0.0f;
  Pairs pair;
  Stored norm_weight, norm_bias;  // (pair_channels), or null: no LayerNorm
  Stored weight;                  // (heads, pair_channels)
  float scale = 1.0f;             // what the bias is stored times
  void* bias = nullptr;           // bias_size() numbers of type_of(mode)
};

void bias_sm80(const BiasProblem& problem, CUstream_st* stream);

// Of the weights, after the softmax; dropout.h and docs/ops/ say how. Only *_dropout_sm80 read it.
struct Dropout {
  const std::uint64_t* keys = nullptr;  // (all_rows(), heads, N), of dropout_keys_sm80
  std::uint32_t threshold = 0;          // in the upper half: lower numbers are dropped
  float kept = 1.0f;                    // the share of what is kept
  float factor = 1.0f;                  // what kept weights are taken times: 1 / kept, or 0
};

struct AttendProblem {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  // (positions(), 4 * width) of type_of(mode): query, key, value, gate of all heads.
  const void* projected = nullptr;
  // (4 * width), of fp32: added to the gate, the last quarter; zeros for the others. Null: the gate
  // has it already. Only attend_fp32_sm80 reads it.
  const float* projection_bias = nullptr;
  const void* bias = nullptr;              // stored times sqrt(dim)
  const std::uint64_t* present = nullptr;  // null: all keys are there
  void* out = nullptr;                     // (positions(), width) of type_of(mode)
  // What gives the weights again, (all_rows(), heads, n), or null: not wanted. A weight is
  // 2^(logit * log2(e) - log_sum). In fp32, where the logarithm does not fit one number to fp32's
  // accuracy, it is that times a factor between 1/2 and 1.
  float* log_sums = nullptr;
  float* factors = nullptr;  // of fp32
  Dropout dropout;
};

void attend_sm80(const AttendProblem& problem, CUstream_st* stream);  // 16-bit modes
void attend_dropout_sm80(const AttendProblem& problem, CUstream_st* stream);
void attend_fp32_dropout_sm80(const AttendProblem& problem, CUstream_st* stream);
void attend_fp32_sm80(const AttendProblem& problem, CUstream_st* stream);  // kTf32, kSplit

}  // namespace fused_ops::msa_row_attention
