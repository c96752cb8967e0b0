// SPDX-License-Identifier: Apache-2.0
// C[..., k] = sum over l of A[..., l] * B[l, k], seen as a matrix product of
// A (rows, inner) and B (inner, columns): `rows` runs over all leading axes of A together.
#pragma once

#include <cstddef>
#include <cstdint>

// cudaStream_t, without CUDA's headers: the planner has none.
struct CUstream_st;

namespace fused_ops::tensor_matmul {

// The leading axes of A, outermost first, after neighbours that one stride can walk were merged.
// A contiguous A has one; a sliced or expanded one has more.
struct RowAxes {
  static constexpr int kMax = 8;
  int count = 0;
  std::int64_t size[kMax] = {};
  std::int64_t stride[kMax] = {};  // in elements; 0 where A is expanded
};

// Merges the leading axes. Returns how many remain; more than kMax do not fit into `axes`.
int merge_axes(const std::int64_t* sizes, const std::int64_t* strides, std::size_t dims,
               RowAxes* axes);

struct ForwardParams {
  const float* a = nullptr;
  const float* b = nullptr;
  float* c = nullptr;  // contiguous (rows, columns)
  std::int64_t rows = 0;
  std::int64_t inner = 0;
  std::int64_t columns = 0;
  RowAxes a_rows;
  std::int64_t a_inner_stride = 0;
  std::int64_t b_inner_stride = 0;
  std::int64_t b_column_stride = 0;
};

// C = A^T * G, a sum over all rows: the gradient of B from A and the gradient of the product.
struct ReduceProblem {
  const float* a = nullptr;
  const float* g = nullptr;
  float* c = nullptr;  // contiguous (lines, columns)
  std::int64_t rows = 0;
  std::int64_t lines = 0;  // the inner axis of the forward product
  std::int64_t columns = 0;
  RowAxes a_rows;
  RowAxes g_rows;
  std::int64_t a_line_stride = 0;
  std::int64_t g_column_stride = 0;
};

// fp32 operands and accumulation, every shape and stride. `tile` indexes kTiles in config.h.
// Does nothing for an empty C; throws std::runtime_error when the launch fails.
void forward_sm80(const ForwardParams& params, int tile, CUstream_st* stream);

}  // namespace fused_ops::tensor_matmul
