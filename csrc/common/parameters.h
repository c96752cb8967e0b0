// SPDX-License-Identifier: Apache-2.0
// The ends of the backward: through the LayerNorms, and the gradients of the parameters, which are
// sums over all rows. Plain data.
#pragma once

#include <cstdint>

#include "common/rows.h"
#include "common/stored.h"

// cudaStream_t, without CUDA's headers.
struct CUstream_st;

namespace fused_ops {

struct NormBackwardProblem {
  int channels = 0;
  float eps = 0.0f;
  Rows source;                 // what was normalised
  Stored weight;               // (channels)
  const void* grad = nullptr;  // (rows, channels): of the LayerNorm's result
  DType grad_type = DType::kFloat32;
  void* out = nullptr;  // likewise, of source.type: the gradient of the source; or null
  // Sums over rows, of the gradient and of its product with what was normalised, in parts; and
  // memory for mean, its correction and 1 / deviation. Null: not wanted.
  float* sums = nullptr;        // (parts, 2, channels)
  float* statistics = nullptr;  // (rows, 4)
  int parts = 0;
};

int norm_sum_parts(std::int64_t rows);
void norm_backward_sm80(const NormBackwardProblem& problem, CUstream_st* stream);

// Sums over rows of a gradient, and of its product with what a LayerNorm made of its source
// before weight and bias. The rows are cut into `parts`, whose sums are stored apart.
struct ColumnSumsProblem {
  std::int64_t rows = 0;
  int columns = 0;
  const void* grad = nullptr;  // (rows, columns)
  DType grad_type = DType::kFloat32;
  std::int64_t grad_stride = 0;  // from a row to the next
  Rows source;                   // of as many rows and columns; null: only the first sums
  const float* statistics = nullptr;
  int parts = 0;
  float* sums = nullptr;  // (parts, 1 or 2, columns)
};

// A few for each multiprocessor: they are added one after the other.
int column_sum_parts(std::int64_t rows, int columns);
void column_sums_sm80(const ColumnSumsProblem& problem, CUstream_st* stream);

// Where a gradient goes, in its parameter's type. Null: not wanted.
struct Result {
  void* data = nullptr;
  DType type = DType::kFloat32;
};

// One of the results: `factor` times the sum of `slabs` times its numbers, in order. Of each
// `chunk` of these numbers it has the first `filled`.
struct Summand {
  const float* from = nullptr;
  std::int64_t slabs = 0;
  std::int64_t slab_stride = 0;
  std::int64_t count = 0;  // of results
  std::int64_t chunk = 1;
  std::int64_t filled = 1;
  float factor = 1.0f;
  Result result;
};

constexpr int kSummands = 20;

struct FinishProblem {
  Summand summands[kSummands];
  int count = 0;
};

void finish_sm80(const FinishProblem& problem, CUstream_st* stream);

}  // namespace fused_ops
