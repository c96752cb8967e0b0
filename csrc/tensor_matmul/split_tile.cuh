// SPDX-License-Identifier: Apache-2.0
// What the kernels of C = A * B on split operands share: how a block walks over tiles of C and
// chunks of the inner axis, how operands come to shared memory and are split, and how results
// leave.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/ring.cuh"
#include "common/cuda/sm80/split.cuh"
#include "tensor_matmul/row_axes.cuh"
#include "tensor_matmul/split.h"

namespace fused_ops::tensor_matmul {

struct SplitParams {
  ForwardParams problem;
  PreparedB prepared{};
  const unsigned char* workspace = nullptr;
  int row_tiles = 0;
  int column_tiles = 0;
  int row_step = 0;  // from a block's tile to its next one
  int column_step = 0;
  bool vector = false;      // A's rows are 16-byte aligned and contiguous
  bool along_rows = false;  // else: A's neighbours in memory are rows
  bool c_vector = false;    // four columns of C can be stored at once
  bool every_thread_arrives = false;
};

template <int kRows, int kColumns, int kStages>
struct alignas(1024) SplitShared {
  static constexpr int kInner = sm80::kSplitInner;
  unsigned char b[kStages][kColumns * sm80::kSplitLineBytes];
  unsigned char a[kStages][kRows * sm80::kSplitLineBytes];
  float raw[kStages][kRows * kInner];
  float row_scale[kStages][kInner];  // of B's rows that belong to raw
  float undo[kStages][kRows];        // scales of a
  float column_scale[4][kColumns];   // of B; as many tiles as can be under way
  const float* row[2][kRows];        // A's rows, for every other tile
};

// A position in a block's stream of chunks. Tiles that share rows of A are neighbours, so that
// those are read from L2.
struct SplitStream {
  int row_tile;
  int column_tile;
  int chunk = 0;
  int turn = 0;  // the number of tiles before, modulo 4

  __device__ explicit SplitStream(const SplitParams& params)
      : row_tile(static_cast<int>(blockIdx.x) / params.column_tiles),
        column_tile(static_cast<int>(blockIdx.x) % params.column_tiles) {}

  __device__ __forceinline__ void advance(const SplitParams& params) {
    if (++chunk == static_cast<int>(params.prepared.chunks)) {
      chunk = 0;
      turn = (turn + 1) & 3;
      row_tile += params.row_step;
      column_tile += params.column_step;
      if (column_tile >= params.column_tiles) {
        column_tile -= params.column_tiles;
        ++row_tile;
      }
    }
  }
};

// Stores a warp's results at (first_row, first_column) of a contiguous (rows, columns) matrix, as
// far as they lie inside. Returns whether all of this thread's are finite. `fours`: four columns
// may be stored at once.
template <class Product>
__device__ __forceinline__ bool store_results(const Product& product, float* matrix,
                                              std::int64_t rows, std::int64_t columns,
                                              std::int64_t first_row, std::int64_t first_column,
                                              bool fours, int lane) {
  constexpr int kRows = Product::kRowTiles * 16;
  constexpr int kColumns = Product::kColumnTiles * 8;
  const std::int64_t row = first_row + lane / 4;
  const std::int64_t column = first_column + lane % 4 * 2;
  const bool whole = fours && first_row + kRows <= rows && first_column + kColumns <= columns;
  float* at = matrix + row * columns + column;
  const auto x = [&](int i, int j) { return product.total[i / 2][j][i % 2 * 2]; };
  const auto y = [&](int i, int j) { return product.total[i / 2][j][i % 2 * 2 + 1]; };
  if (whole) {
    // Two lanes exchange halves of two column tiles, so that each has four columns of one.
    const bool odd = lane % 2 == 1;
    at += odd ? 8 - 2 : 0;
#pragma unroll
    for (int i = 0; i < Product::kRowTiles * 2; ++i) {
#pragma unroll
      for (int j = 0; j < Product::kColumnTiles; j += 2) {
        const float give_x = odd ? x(i, j) : x(i, j + 1);
        const float give_y = odd ? y(i, j) : y(i, j + 1);
        const float keep_x = odd ? x(i, j + 1) : x(i, j);
        const float keep_y = odd ? y(i, j + 1) : y(i, j);
        const float take_x = __shfl_xor_sync(0xffffffffu, give_x, 1);
        const float take_y = __shfl_xor_sync(0xffffffffu, give_y, 1);
        const float4 four = odd ? make_float4(take_x, take_y, keep_x, keep_y)
                                : make_float4(keep_x, keep_y, take_x, take_y);
        __stcs(reinterpret_cast<float4*>(at + j * 8), four);
      }
      at += columns * 8;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Product::kRowTiles * 2; ++i) {
#pragma unroll
      for (int j = 0; j < Product::kColumnTiles; ++j) {
        const bool inside = row + i * 8 < rows;
        if (inside && column + j * 8 < columns) at[j * 8] = x(i, j);
        if (inside && column + j * 8 + 1 < columns) at[j * 8 + 1] = y(i, j);
      }
      at += columns * 8;
    }
  }
  float sums[4] = {};  // finite only if all results are
#pragma unroll
  for (int i = 0; i < Product::kRowTiles * 2; ++i) {
#pragma unroll
    for (int j = 0; j < Product::kColumnTiles; ++j) {
      sums[i % 2 * 2] += x(i, j);
      sums[i % 2 * 2 + 1] += y(i, j);
    }
  }
  const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return fabsf(sum) < __uint_as_float(0x7f800000u);
}

// The way of A and B into shared memory, by kThreads threads.
template <int kRows, int kColumns, int kThreads, int kStages>
struct SplitCopies {
  static constexpr int kInner = sm80::kSplitInner;

  SplitShared<kRows, kColumns, kStages>& shared;
  const SplitParams& params;
  int thread;

  // Where the four numbers that start at 4 * group of a raw row stand. In this order neither the
  // reads of split_a() nor a column of scalar copies meets in one bank.
  static __device__ __forceinline__ int raw_offset(int row, int group) {
    const int order = (row & 1) | (row >> 1 & 2) | (row << 1 & 4);
    return row * kInner + ((group ^ order) << 2);
  }

  __device__ __forceinline__ const float* row_scales() const {
    return reinterpret_cast<const float*>(params.workspace + params.prepared.row_scales());
  }

  __device__ __forceinline__ const float* column_scales() const {
    return reinterpret_cast<const float*>(params.workspace + params.prepared.column_scales());
  }

  // Rows past the last are read as the last one and never stored.
  __device__ __forceinline__ void find_rows(const SplitStream& at) const {
    const ForwardParams& p = params.problem;
    for (int i = thread; i < kRows; i += kThreads) {
      const std::int64_t row = static_cast<std::int64_t>(at.row_tile) * kRows + i;
      shared.row[at.turn % 2][i] = p.a + row_offset(p.a_rows, min(row, p.rows - 1));
    }
  }

  // Starts copying a chunk of A and the row scales of B that go with it.
  __device__ __forceinline__ void copy_a(const SplitStream& at, int stage) const {
    constexpr int kGroups = kInner / 4;
    const std::int64_t first = static_cast<std::int64_t>(at.chunk) * kInner;
    const std::int64_t left = params.problem.inner - first;
    if (params.vector) {
      constexpr int kStride = kThreads / kGroups;  // a multiple of 8: the order of groups repeats
      constexpr int kCount = kRows / kStride;
      const int row = thread / kGroups;
      const int group = thread % kGroups;
      float* raw = shared.raw[stage] + raw_offset(row, group);
      const float* from[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) from[i] = shared.row[at.turn % 2][row + i * kStride];
      const std::int64_t start = first + group * 4;
      if (left >= kInner) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          sm80::cp_async_16(raw + i * kStride * kInner, from[i] + start);
        }
      } else {
        const int bytes = min(max(static_cast<int>(left) - group * 4, 0), 4) * 4;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          sm80::cp_async_16(raw + i * kStride * kInner, bytes > 0 ? from[i] + start : from[i],
                            bytes);
        }
      }
    } else {
      copy_a_by_element(at, stage);
    }
    if (thread < kGroups) {
      sm80::cp_async_16(&shared.row_scale[stage][thread * 4], row_scales() + first + thread * 4);
    }
  }

  __device__ __forceinline__ void copy_a_by_element(const SplitStream& at, int stage) const {
    const std::int64_t first = static_cast<std::int64_t>(at.chunk) * kInner;
    const std::int64_t left = params.problem.inner - first;
    for (int i = thread; i < kRows * kInner; i += kThreads) {
      const int row = params.along_rows ? i % kRows : i / kInner;
      const int l = params.along_rows ? i / kRows : i % kInner;
      const float* from = shared.row[at.turn % 2][row];
      const bool exists = l < left;
      sm80::cp_async_4(shared.raw[stage] + raw_offset(row, l / 4) + l % 4,
                       exists ? from + (first + l) * params.problem.a_inner_stride : from,
                       exists ? 4 : 0);
    }
  }

  __device__ __forceinline__ void copy_b(const SplitStream& at, int stage) const {
    const int first = at.column_tile * kColumns;
    const unsigned char* source =
        params.workspace + params.prepared.lines() +
        (at.chunk * params.prepared.columns + first) * sm80::kSplitLineBytes + thread * 16;
    unsigned char* b = shared.b[stage] + thread * 16;
#pragma unroll
    for (int i = 0; i < kColumns * sm80::kSplitLineBytes / 16 / kThreads; ++i) {
      sm80::cp_async_16(b + i * kThreads * 16, source + i * kThreads * 16);
    }
    if (at.chunk == 0 && thread < kColumns / 4) {
      sm80::cp_async_16(&shared.column_scale[at.turn][thread * 4],
                        column_scales() + first + thread * 4);
    }
  }

  // Scales and splits a raw chunk of A, half a row a thread at a time.
  __device__ __forceinline__ void split_a(int raw, int stage) const {
    // Rows are read before the first one is written, so that the reads wait together.
    constexpr int kTogether = kRows * 2 / kThreads < 2 ? 1 : 2;
    constexpr int kStep = kThreads / 2;
    const int half = thread % 2;
#pragma unroll 1
    for (int index = thread / 2; index < kRows; index += kTogether * kStep) {
      float x[kTogether][kHalf];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) read_half(raw, row_of(index + i * kStep), half, x[i]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        split_half(x[i], stage, row_of(index + i * kStep), half);
      }
    }
  }

  // Rows 0, 1, 4, 5, then 2, 3, 6, 7 of eight: four rows' pieces meet eight different banks.
  static __device__ __forceinline__ int row_of(int index) {
    return (index & ~6) | (index << 1 & 4) | (index >> 1 & 2);
  }

  static constexpr int kHalf = kInner / 2;

  __device__ __forceinline__ void read_half(int raw, int row, int half, float (&x)[kHalf]) const {
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
      const int group = half * (kHalf / 4) + i / 4;
      const float4 scale = *reinterpret_cast<const float4*>(&shared.row_scale[raw][group * 4]);
      const float4 four =
          *reinterpret_cast<const float4*>(&shared.raw[raw][raw_offset(row, group)]);
      x[i] = four.x * scale.x;
      x[i + 1] = four.y * scale.y;
      x[i + 2] = four.z * scale.z;
      x[i + 3] = four.w * scale.w;
    }
  }

  __device__ __forceinline__ void split_half(float (&x)[kHalf], int stage, int row,
                                             int half) const {
    float most[4];  // of every fourth: a chain of sixteen would wait for each of its links
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = fabsf(x[i]);
#pragma unroll
    for (int i = 4; i < kHalf; ++i) most[i % 4] = sm80::max_nan(most[i % 4], fabsf(x[i]));
    float largest = sm80::max_nan(sm80::max_nan(most[0], most[1]), sm80::max_nan(most[2], most[3]));
    largest = sm80::max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 1));

    float enlarged = 1.0f;
    if (largest < 0x1p-100f) {  // the multiplier would leave fp32: enlarge beforehand
      enlarged = 0x1p-64f;
      largest = fmaxf(largest * 0x1p64f, 0x1p-100f);  // zeros too
#pragma unroll
      for (int i = 0; i < kHalf; ++i) x[i] *= 0x1p64f;
    }
    const float multiply = sm80::split_multiplier(largest);
    unsigned char* a = shared.a[stage];
#pragma unroll
    for (int i = 0; i < kHalf; i += 8) {
      std::uint32_t hi[4];
      std::uint32_t lo[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sm80::split_pair(x[i + 2 * j] * multiply, x[i + 2 * j + 1] * multiply, &hi[j], &lo[j]);
      }
      const int piece = half * 2 + i / 8;
      *reinterpret_cast<uint4*>(a + sm80::split_offset(row, piece)) =
          make_uint4(hi[0], hi[1], hi[2], hi[3]);
      *reinterpret_cast<uint4*>(a + sm80::split_offset(row, piece + 4)) =
          make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
    if (half == 0) shared.undo[stage][row] = sm80::split_undo(largest) * enlarged;
  }
};

// The results' way into C, by the warps that hold them (sm80::SplitWarps or the like).
template <int kRows, int kColumns, int kStages, class Warps>
struct SplitResults {
  using Product = typename Warps::Product;

  SplitShared<kRows, kColumns, kStages>& shared;
  const SplitParams& params;
  Warps warps;

  template <class Release>
  __device__ __forceinline__ void multiply(Product& product, int stage, Release release) const {
    warps.template multiply<false>(product, shared.a[stage], shared.undo[stage], shared.b[stage],
                                   nullptr, release);
  }

  // Plain fp32 for the results of one thread, straight from global memory.
  static __device__ __noinline__ void redo(const SplitParams& params, std::int64_t first_row,
                                           std::int64_t first_column) {
    const ForwardParams& p = params.problem;
    const int lane = thread_index() % 32;
    for (int i = 0; i < Product::kRowTiles * 2; ++i) {
      const std::int64_t row = first_row + i * 8 + lane / 4;
      if (row >= p.rows) continue;
      const float* a = p.a + row_offset(p.a_rows, row);
      for (int j = 0; j < Product::kColumnTiles; ++j) {
        for (int e = 0; e < 2; ++e) {
          const std::int64_t column = first_column + j * 8 + lane % 4 * 2 + e;
          if (column >= p.columns) continue;
          const float* b = p.b + column * p.b_column_stride;
          float sum = 0.0f;
          for (std::int64_t l = 0; l < p.inner; ++l) {
            sum = fmaf(a[l * p.a_inner_stride], b[l * p.b_inner_stride], sum);
          }
          p.c[row * p.columns + column] = sum;
        }
      }
    }
  }

  __device__ __forceinline__ void store(Product& product, const SplitStream& at) const {
    const ForwardParams& p = params.problem;
    const int lane = warps.thread % 32;
    const std::int64_t first_row = static_cast<std::int64_t>(at.row_tile) * kRows + warps.row();
    const std::int64_t first_column =
        static_cast<std::int64_t>(at.column_tile) * kColumns + warps.column();
    const float* scales = &shared.column_scale[at.turn][warps.column() + lane % 4 * 2];
#pragma unroll
    for (int j = 0; j < Product::kColumnTiles; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + j * 8);
#pragma unroll
      for (int i = 0; i < Product::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) product.total[i][j][e] *= e % 2 == 0 ? scale.x : scale.y;
      }
    }
    const bool finite = store_results(product, p.c, p.rows, p.columns, first_row, first_column,
                                      params.c_vector, lane);
    if (!finite) redo(params, first_row, first_column);
  }
};

}  // namespace fused_ops::tensor_matmul
