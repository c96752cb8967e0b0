// SPDX-License-Identifier: Apache-2.0
// Makes a PreparedB: three small kernels before the large one.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/split.cuh"
#include "tensor_matmul/split.h"

namespace fused_ops::tensor_matmul {

struct PrepareParams {
  const float* b = nullptr;
  std::int64_t inner = 0;
  std::int64_t columns = 0;
  std::int64_t inner_stride = 0;
  std::int64_t column_stride = 0;
  PreparedB prepared{};
  unsigned char* workspace = nullptr;
  int slab = 0;  // chunks of the inner axis that a block of the second and third kernel takes

  __host__ __device__ float* row_scales() const {
    return reinterpret_cast<float*>(workspace + prepared.row_scales());
  }
  __host__ __device__ int* row_exponents() const {
    return reinterpret_cast<int*>(workspace + prepared.row_exponents());
  }
  __host__ __device__ float* column_scales() const {
    return reinterpret_cast<float*>(workspace + prepared.column_scales());
  }
  __host__ __device__ int* column_exponents() const {
    return reinterpret_cast<int*>(workspace + prepared.column_exponents());
  }
};

constexpr int kPrepareThreads = 256;
constexpr int kPrepareRows = kPrepareThreads / 32;  // of the first kernel's blocks, a warp each
constexpr int kPrepareColumns = 32;                 // of the others' blocks

// Below the exponent of every number: that of a line without any.
constexpr int kNoExponent = -(1 << 20);

// The exponent of a finite number that is not zero, subnormals included; kNoExponent for others.
__device__ inline int exponent_of(float x) {
  const int biased = static_cast<int>(__float_as_uint(x) >> 23 & 0xff);
  if (biased == 255 || x == 0.0f) return kNoExponent;
  if (biased > 0) return biased - 127;
  return static_cast<int>(__float_as_uint(x * 0x1p64f) >> 23 & 0xff) - 127 - 64;
}

// The exponents of the rows of B; also clears those of the columns. A row's is the mean of its
// numbers' exponents: the largest would let one outlier in one column set A's scale for them all.
__global__ void __launch_bounds__(kPrepareThreads) prepare_rows_kernel(const PrepareParams p) {
  const std::int64_t all = static_cast<std::int64_t>(gridDim.x) * kPrepareThreads;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kPrepareThreads;
  for (std::int64_t i = first + threadIdx.x; i < p.prepared.columns; i += all) {
    p.column_exponents()[i] = kNoExponent;
  }

  const int lane = threadIdx.x % 32;
  const std::int64_t l =
      static_cast<std::int64_t>(blockIdx.x) * kPrepareRows + static_cast<int>(threadIdx.x) / 32;
  std::int64_t sum = 0;
  std::int64_t count = 0;
  if (l < p.inner) {
    const float* row = p.b + l * p.inner_stride;
#pragma unroll 8
    for (std::int64_t column = lane; column < p.columns; column += 32) {
      const int exponent = exponent_of(row[column * p.column_stride]);
      if (exponent != kNoExponent) {
        sum += exponent;
        ++count;
      }
    }
  }
#pragma unroll
  for (int other = 1; other < 32; other *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, other);
    count += __shfl_xor_sync(0xffffffffu, count, other);
  }
  if (lane == 0) {
    // A row of zeros takes A's column out, so that what stands there does not set A's scale.
    const int mean = count == 0 ? 0 : static_cast<int>(sum / count);
    p.row_scales()[l] = count == 0 ? 0.0f : ldexpf(1.0f, mean);
    p.row_exponents()[l] = mean;
  }
}

// The exponents of the columns of B, its rows divided by their scales. blockIdx.x counts slabs of
// kPrepareColumns columns first, then of the inner axis.
__global__ void __launch_bounds__(kPrepareThreads) prepare_columns_kernel(const PrepareParams p) {
  const int column_slabs = static_cast<int>(p.prepared.columns / kPrepareColumns);
  const std::int64_t column =
      static_cast<std::int64_t>(blockIdx.x % column_slabs) * kPrepareColumns + threadIdx.x % 32;
  if (column >= p.columns) return;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x / column_slabs) * p.slab * PreparedB::kInner;
  const std::int64_t last = min(first + p.slab * PreparedB::kInner, p.inner);
  int largest = kNoExponent;
#pragma unroll 4
  for (std::int64_t l = first + threadIdx.x / 32; l < last; l += kPrepareThreads / 32) {
    const float x = p.b[l * p.inner_stride + column * p.column_stride];
    largest = max(largest, exponent_of(x) - p.row_exponents()[l]);
  }
  atomicMax(p.column_exponents() + column, largest);
}

// The split halves and the scales of the columns.
__global__ void __launch_bounds__(kPrepareThreads) prepare_split_kernel(const PrepareParams p) {
  const int column_slabs = static_cast<int>(p.prepared.columns / kPrepareColumns);
  const std::int64_t column =
      static_cast<std::int64_t>(blockIdx.x % column_slabs) * kPrepareColumns + threadIdx.x % 32;
  const std::int64_t slab = blockIdx.x / column_slabs;
  const bool inside = column < p.columns;
  const float* source = p.b + column * p.column_stride;
  int largest = p.column_exponents()[column];
  if (largest < kNoExponent / 2) largest = 0;  // a column of zeros
  const int top = sm80::kSplitTop - largest;   // may lie far outside fp32's exponents
  if (slab == 0 && threadIdx.x < 32) {
    // A column so far from the scale of its rows that its own leaves fp32 is marked by NaN: its
    // results are computed in plain fp32.
    const bool representable = -top >= -126 && -top <= 127;
    p.column_scales()[column] = representable ? ldexpf(1.0f, -top) : __uint_as_float(0x7fffffffu);
  }

  constexpr int kPiece = 8;  // halves in 16 bytes
  constexpr int kPieces = PreparedB::kInner / kPiece;
  const std::int64_t last = min((slab + 1) * p.slab, p.prepared.chunks) * kPieces;
  for (std::int64_t piece = slab * p.slab * kPieces + threadIdx.x / 32; piece < last;
       piece += kPrepareThreads / 32) {
    float x[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const std::int64_t l = piece * kPiece + i;
      x[i] = inside && l < p.inner ? source[l * p.inner_stride] : 0.0f;
      if (x[i] != 0.0f) x[i] = ldexpf(x[i], top - p.row_exponents()[l]);
    }
    std::uint32_t hi[kPiece / 2];
    std::uint32_t lo[kPiece / 2];
#pragma unroll
    for (int i = 0; i < kPiece / 2; ++i) {
      sm80::split_pair(x[2 * i], x[2 * i + 1], &hi[i], &lo[i]);
    }
    const std::int64_t chunk = piece / kPieces;
    const int at_piece = static_cast<int>(piece % kPieces);
    unsigned char* line = p.workspace + p.prepared.lines() +
                          (chunk * p.prepared.columns + column) * sm80::kSplitLineBytes;
    const int order = static_cast<int>(column & 7);
    *reinterpret_cast<uint4*>(line + ((at_piece ^ order) << 4)) =
        make_uint4(hi[0], hi[1], hi[2], hi[3]);
    *reinterpret_cast<uint4*>(line + (((at_piece + kPieces) ^ order) << 4)) =
        make_uint4(lo[0], lo[1], lo[2], lo[3]);
  }
}

}  // namespace fused_ops::tensor_matmul
