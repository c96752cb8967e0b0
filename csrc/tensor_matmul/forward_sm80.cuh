// SPDX-License-Identifier: Apache-2.0
// A register-tiled matrix product in plain fp32 (FFMA), for any shape and any strides.
//
// A block owns one tile of C and walks the inner axis in slices. While it multiplies the slice in
// shared memory, each thread already holds its part of the next one in registers, which hides the
// latency of global memory behind arithmetic; two stages of shared memory make one barrier a slice
// enough. A and B are read alike: both are `lines` (rows of A, columns of B) along the inner axis.
#pragma once

#include <cstdint>

#include "common/cuda/device.h"
#include "tensor_matmul/config.h"
#include "tensor_matmul/row_axes.cuh"
#include "tensor_matmul/tensor_matmul.h"

namespace fused_ops::tensor_matmul {

// How the threads of a block share out the reading of an operand; the launcher finds out.
struct Access {
  bool along_inner = true;  // neighbouring threads read along the inner axis, else along the lines
  bool vector = false;      // four elements at once in that direction
};

struct KernelParams {
  ForwardParams problem;
  Access a;
  Access b;
  bool c_vector = false;
};

// In shared memory lines lie innermost, so that a thread reads four of its operands at once. The
// padding halves the bank conflicts of writing along the inner axis and keeps 16-byte alignment.
template <int kLines, int kInner>
struct SharedOperand {
  float slice[2][kInner][kLines + 4];
  std::int64_t offset[kLines];  // of each line's first element in global memory; -1 past the last
};

template <int tile>
struct alignas(16) SharedStorage {
  SharedOperand<kTiles[tile].rows, kTiles[tile].inner> a;
  SharedOperand<kTiles[tile].columns, kTiles[tile].inner> b;
};

// One thread's share of a slice of one operand, on its way from global to shared memory.
template <int kLines, int kInner, int kThreads>
struct Share {
  static constexpr int kCount = kLines * kInner / kThreads;
  float held[kCount];

  // The position in the slice of the thread's i-th group of `width` elements.
  template <int width>
  static __device__ void locate(int i, bool along_inner, int* line, int* l) {
    const int group = threadIdx.x + i * kThreads;
    *line = along_inner ? group / (kInner / width) : group % (kLines / width) * width;
    *l = along_inner ? group % (kInner / width) * width : group / (kLines / width);
  }

  template <int width>
  __device__ void load(const SharedOperand<kLines, kInner>& shared, const float* data,
                       std::int64_t inner_stride, std::int64_t left, bool along_inner) {
#pragma unroll
    for (int i = 0; i < kCount / width; ++i) {
      int line, l;
      locate<width>(i, along_inner, &line, &l);
      if constexpr (width == 4) {
        const bool whole = along_inner ? shared.offset[line] >= 0 && l + 4 <= left
                                       : shared.offset[line + 3] >= 0 && l < left;
        if (whole) {
          const float* address = data + shared.offset[line] + l * inner_stride;
          const float4 four = *reinterpret_cast<const float4*>(address);
          held[4 * i] = four.x;
          held[4 * i + 1] = four.y;
          held[4 * i + 2] = four.z;
          held[4 * i + 3] = four.w;
          continue;
        }
      }
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const std::int64_t offset = shared.offset[along_inner ? line : line + j];
        const int at = along_inner ? l + j : l;
        held[width * i + j] = offset >= 0 && at < left ? data[offset + at * inner_stride] : 0.0f;
      }
    }
  }

  template <int width>
  __device__ void store(SharedOperand<kLines, kInner>& shared, int stage, bool along_inner) const {
#pragma unroll
    for (int i = 0; i < kCount / width; ++i) {
      int line, l;
      locate<width>(i, along_inner, &line, &l);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        shared.slice[stage][along_inner ? l + j : l][along_inner ? line : line + j] =
            held[width * i + j];
      }
    }
  }

  // `data` points at the slice's first inner element, of which `left` remain.
  __device__ void load(const SharedOperand<kLines, kInner>& shared, const float* data,
                       std::int64_t inner_stride, std::int64_t left, Access access) {
    if (access.vector) {
      load<4>(shared, data, inner_stride, left, access.along_inner);
    } else {
      load<1>(shared, data, inner_stride, left, access.along_inner);
    }
  }

  __device__ void store(SharedOperand<kLines, kInner>& shared, int stage, Access access) const {
    if (access.vector) {
      store<4>(shared, stage, access.along_inner);
    } else {
      store<1>(shared, stage, access.along_inner);
    }
  }
};

// A thread's lines in the tile are groups of four, spread evenly: two neighbouring threads' float4
// reads are then neighbours too, without bank conflicts.
template <int kLines, int kPerThread>
__device__ int line_of(int thread, int i) {
  return i / 4 * (kLines / (kPerThread / 4)) + thread * 4 + i % 4;
}

template <int tile>
__global__ void __launch_bounds__(kTiles[tile].threads(), kTiles[tile].min_blocks)
    forward_kernel(const KernelParams params) {
  constexpr Tile kTile = kTiles[tile];
  constexpr int kThreads = kTile.threads();
  static_assert(kTile.thread_rows % 4 == 0 && kTile.thread_columns % 4 == 0);
  static_assert(kTile.rows <= kThreads && kTile.columns <= kThreads);
  auto& shared = shared_memory<SharedStorage<tile>>();

  const ForwardParams& p = params.problem;
  // Blocks that share rows of A are neighbours in the grid, so those rows are read from L2.
  const std::int64_t column_tiles = ceil_div(p.columns, kTile.columns);
  const std::int64_t first_row = blockIdx.x / column_tiles * kTile.rows;
  const std::int64_t first_column = blockIdx.x % column_tiles * kTile.columns;

  const int thread = threadIdx.x;
  if (thread < kTile.rows) {
    const std::int64_t row = first_row + thread;
    shared.a.offset[thread] = row < p.rows ? row_offset(p.a_rows, row) : -1;
  }
  if (thread < kTile.columns) {
    const std::int64_t column = first_column + thread;
    shared.b.offset[thread] = column < p.columns ? column * p.b_column_stride : -1;
  }
  __syncthreads();

  constexpr int kThreadsAcross = kTile.columns / kTile.thread_columns;
  const int thread_row = thread / kThreadsAcross;
  const int thread_column = thread % kThreadsAcross;
  float sum[kTile.thread_rows][kTile.thread_columns] = {};
  // Where finished chains are added up; the compiler drops it where there is a single chain.
  float total[kTile.thread_rows][kTile.thread_columns] = {};

  Share<kTile.rows, kTile.inner, kThreads> a;
  Share<kTile.columns, kTile.inner, kThreads> b;
  const auto load = [&](std::int64_t slice) {
    a.load(shared.a, p.a + slice * p.a_inner_stride, p.a_inner_stride, p.inner - slice, params.a);
    b.load(shared.b, p.b + slice * p.b_inner_stride, p.b_inner_stride, p.inner - slice, params.b);
  };

  int stage = 0;
  if (p.inner > 0) {
    load(0);
    a.store(shared.a, stage, params.a);
    b.store(shared.b, stage, params.b);
  }
  __syncthreads();
  for (std::int64_t slice = 0; slice < p.inner; slice += kTile.inner) {
    const std::int64_t next = slice + kTile.inner;
    if (next < p.inner) load(next);

#pragma unroll
    for (int l = 0; l < kTile.inner; ++l) {
      float row[kTile.thread_rows];
      float column[kTile.thread_columns];
#pragma unroll
      for (int i = 0; i < kTile.thread_rows; ++i) {
        row[i] = shared.a.slice[stage][l][line_of<kTile.rows, kTile.thread_rows>(thread_row, i)];
      }
#pragma unroll
      for (int j = 0; j < kTile.thread_columns; ++j) {
        column[j] =
            shared.b
                .slice[stage][l][line_of<kTile.columns, kTile.thread_columns>(thread_column, j)];
      }
#pragma unroll
      for (int i = 0; i < kTile.thread_rows; ++i) {
#pragma unroll
        for (int j = 0; j < kTile.thread_columns; ++j) {
          sum[i][j] = fmaf(row[i], column[j], sum[i][j]);
        }
      }
    }

    if constexpr (kTile.chain > 0) {
      if (next % kTile.chain == 0) {
#pragma unroll
        for (int i = 0; i < kTile.thread_rows; ++i) {
#pragma unroll
          for (int j = 0; j < kTile.thread_columns; ++j) {
            total[i][j] += sum[i][j];
            sum[i][j] = 0.0f;
          }
        }
      }
    }
    if (next < p.inner) {  // the other stage: nobody reads it since the last barrier
      stage ^= 1;
      a.store(shared.a, stage, params.a);
      b.store(shared.b, stage, params.b);
      __syncthreads();
    }
  }

#pragma unroll
  for (int i = 0; i < kTile.thread_rows; ++i) {
    const std::int64_t row = first_row + line_of<kTile.rows, kTile.thread_rows>(thread_row, i);
    if (row >= p.rows) continue;
#pragma unroll
    for (int j = 0; j < kTile.thread_columns; j += 4) {
      const std::int64_t column =
          first_column + line_of<kTile.columns, kTile.thread_columns>(thread_column, j);
      float* c = p.c + row * p.columns + column;
      if (params.c_vector && column < p.columns) {  // columns are a multiple of four: all or none
        *reinterpret_cast<float4*>(c) =
            make_float4(total[i][j] + sum[i][j], total[i][j + 1] + sum[i][j + 1],
                        total[i][j + 2] + sum[i][j + 2], total[i][j + 3] + sum[i][j + 3]);
        continue;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (column + k < p.columns) c[k] = total[i][j + k] + sum[i][j + k];
      }
    }
  }
}

}  // namespace fused_ops::tensor_matmul
