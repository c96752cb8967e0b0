// SPDX-License-Identifier: Apache-2.0
// C = A^T * G to fp32's accuracy on the fp16 tensor cores, A (rows, lines) and G (rows, columns):
// the gradient of B, a sum over all rows.
//
// A block sums one tile of C over a slab of rows; where there are several slabs, each has a partial
// result of its own and a second kernel adds those in order, so that the sum is the same each time.
// Four warps split, the others multiply. A chunk of rows is split in two steps, because both scales
// it needs run across the rows: each row of A is divided by the power of two of its largest number,
// and the row of G multiplied by it, so that the two can vary inversely along the sum; then each
// column has the scale that all its rows give. Columns of which, after the first step, all numbers
// are below 2^-112 lose digits.
#pragma once

#include "tensor_matmul/split_tile.cuh"

namespace fused_ops::tensor_matmul {

struct SplitReduceParams {
  ReduceProblem problem;
  float* partial = nullptr;  // (slabs, lines, columns)
  int line_tiles = 0;
  int column_tiles = 0;
  int slabs = 0;
  bool a_vector = false;  // 16 bytes may be copied at a time
  bool g_vector = false;
  bool pairs = false;  // two columns of a partial result may be stored at once
};

template <int kLines, int kColumns>
struct SplitReduceShared {
  static constexpr int kInner = sm80::kSplitInner;
  static constexpr int kStages = 2;
  unsigned char a[kStages][2 * sm80::kSplitAcrossBytes<kLines>];
  unsigned char g[kStages][2 * sm80::kSplitAcrossBytes<kColumns>];
  float raw_a[kStages][kInner][kLines];
  float raw_g[kStages][kInner][kColumns];
  float largest[2][4][kLines + kColumns];  // of each column in a warp's rows
  float undo_a[kStages][kLines];
  float undo_g[kStages][kColumns];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};

// One warp's 8 rows of a chunk, 4 columns of each segment of 128 a lane. What a lane copies it
// alone reads, so that copies need no barrier.
template <int kLines, int kColumns>
struct SplitReduceProducer {
  using Shared = SplitReduceShared<kLines, kColumns>;
  static constexpr int kInner = Shared::kInner;
  static constexpr int kThreads = 128;
  static constexpr int kRows = kInner / 4;  // of a warp
  static constexpr int kSegmentsA = kLines / 128;
  static constexpr int kSegmentsG = kColumns / 128;
  static_assert(kLines % 128 == 0 && kColumns % 128 == 0);

  Shared& shared;
  const SplitReduceParams& params;
  std::int64_t first_line;
  std::int64_t first_column;
  int warp;
  int lane;

  template <int kSegments, int kWidth>
  __device__ __forceinline__ void copy_row(float (&raw)[kWidth], const float* row, bool exists,
                                           std::int64_t first, std::int64_t count,
                                           std::int64_t stride, bool vector) const {
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const int at = s * 128 + lane * 4;
      const std::int64_t left = exists ? count - first - at : 0;
      const float* from = row + (first + at) * stride;
      if (vector) {
        const int bytes = static_cast<int>(max(min(left, std::int64_t{4}), std::int64_t{0})) * 4;
        sm80::cp_async_16(raw + at, bytes > 0 ? from : row, bytes);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sm80::cp_async_4(raw + at + i, i < left ? from + i * stride : row, i < left ? 4 : 0);
        }
      }
    }
  }

  __device__ __forceinline__ void copy(std::int64_t chunk, int slot) const {
    const ReduceProblem& p = params.problem;
    // Lanes 0 to 7 find the rows of A, lanes 8 to 15 those of G.
    const std::int64_t first = chunk * kInner + warp * kRows;
    const std::int64_t mine = min(first + lane % kRows, p.rows - 1);
    const float* row =
        lane / kRows % 2 == 0 ? p.a + row_offset(p.a_rows, mine) : p.g + row_offset(p.g_rows, mine);
    const auto address = reinterpret_cast<std::uint64_t>(row);
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const auto* a = reinterpret_cast<const float*>(__shfl_sync(0xffffffffu, address, r));
      const auto* g = reinterpret_cast<const float*>(__shfl_sync(0xffffffffu, address, r + kRows));
      const bool exists = first + r < p.rows;
      const int at = warp * kRows + r;
      copy_row<kSegmentsA>(shared.raw_a[slot][at], a, exists, first_line, p.lines, p.a_line_stride,
                           params.a_vector);
      copy_row<kSegmentsG>(shared.raw_g[slot][at], g, exists, first_column, p.columns,
                           p.g_column_stride, params.g_vector);
    }
  }

  static __device__ __forceinline__ float4 absolute_max(float4 a, float4 b) {
    return make_float4(sm80::max_nan(a.x, fabsf(b.x)), sm80::max_nan(a.y, fabsf(b.y)),
                       sm80::max_nan(a.z, fabsf(b.z)), sm80::max_nan(a.w, fabsf(b.w)));
  }

  static __device__ __forceinline__ float4 times(float4 x, float factor) {
    return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
  }

  static __device__ __forceinline__ float finite_or_zero(float x) {
    return fabsf(x) < __uint_as_float(0x7f800000u) ? x : 0.0f;
  }

  // The biased exponents of the rows of A, 0 for a row of zeros. What is not finite must not count:
  // it spoils its own line, but the others need the row. Looking for it costs, so it is left out
  // only when a row turns out to have some.
  template <bool finite_only>
  __device__ __forceinline__ void find_row_exponents(int slot, int (&exponent)[kRows]) const {
    float largest[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4 most = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int s = 0; s < kSegmentsA; ++s) {
        float4 x = four(shared.raw_a[slot][warp * kRows + r], s);
        if (finite_only) {
          x = make_float4(finite_or_zero(x.x), finite_or_zero(x.y), finite_or_zero(x.z),
                          finite_or_zero(x.w));
        }
        most = absolute_max(most, x);
      }
      largest[r] = sm80::max_nan(sm80::max_nan(most.x, most.y), sm80::max_nan(most.z, most.w));
    }
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        largest[r] = sm80::max_nan(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], other));
      }
    }
    bool finite = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int biased = static_cast<int>(__float_as_uint(largest[r]) >> 23 & 0xff);
      exponent[r] = largest[r] == 0.0f ? 0 : min(max(biased, 1), 253);
      finite &= biased < 255;
    }
    if constexpr (!finite_only) {
      if (!finite) find_row_exponents<true>(slot, exponent);
    }
  }

  // What a row of A is multiplied by, and a row of G. A row of zeros takes G's row out, so that
  // what stands there does not set G's scale.
  static __device__ __forceinline__ float factor_a(int exponent) {
    return sm80::power_of_two(254 - max(exponent, 1));
  }
  static __device__ __forceinline__ float factor_g(int exponent) {
    return __uint_as_float(static_cast<std::uint32_t>(exponent) << 23);
  }

  template <int kWidth>
  __device__ __forceinline__ float4 four(const float (&row)[kWidth], int segment) const {
    return *reinterpret_cast<const float4*>(row + segment * 128 + lane * 4);
  }

  // Splits a segment with the scales of its columns, which are returned in `undo`.
  template <int kWidth>
  __device__ __forceinline__ float4 split_segment(const float (&raw)[kInner][kWidth],
                                                  unsigned char* out, int segment, float4 largest,
                                                  const int (&exponent)[kRows], bool is_a) const {
    const float4 multiply =
        make_float4(sm80::split_multiplier(largest.x), sm80::split_multiplier(largest.y),
                    sm80::split_multiplier(largest.z), sm80::split_multiplier(largest.w));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = warp * kRows + r;
      const float factor = is_a ? factor_a(exponent[r]) : factor_g(exponent[r]);
      const float4 x = times(four(raw[row], segment), factor);
      uint2 hi, lo;
      sm80::split_pair(x.x * multiply.x, x.y * multiply.y, &hi.x, &lo.x);
      sm80::split_pair(x.z * multiply.z, x.w * multiply.w, &hi.y, &lo.y);
      unsigned char* at = out + sm80::split_across_offset<kWidth>(row, segment * 128 + lane * 4);
      *reinterpret_cast<uint2*>(at) = hi;
      *reinterpret_cast<uint2*>(at + sm80::kSplitAcrossBytes<kWidth>) = lo;
    }
    return make_float4(sm80::split_undo(largest.x), sm80::split_undo(largest.y),
                       sm80::split_undo(largest.z), sm80::split_undo(largest.w));
  }

  // The largest numbers of columns over all warps; at least what a scale can be found for.
  __device__ __forceinline__ float4 largest_of_all(int buffer, int at) const {
    constexpr float kLeast = 0x1p-112f;
    float4 most = make_float4(kLeast, kLeast, kLeast, kLeast);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      most = absolute_max(most, *reinterpret_cast<const float4*>(&shared.largest[buffer][w][at]));
    }
    return most;
  }

  __device__ __forceinline__ void run(std::int64_t first_chunk, std::int64_t last_chunk) const {
    copy(first_chunk, 0);
    sm80::cp_async_commit();
    if (first_chunk + 1 < last_chunk) copy(first_chunk + 1, 1);
    sm80::cp_async_commit();
    Slot<Shared::kStages> slot;
    for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      const int stage = slot.stage;
      sm80::cp_async_wait<1>();
      int exponent[kRows];
      find_row_exponents<false>(stage, exponent);
      float* largest = shared.largest[stage][warp];
#pragma unroll
      for (int s = 0; s < kSegmentsA + kSegmentsG; ++s) {
        float4 most = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int row = warp * kRows + r;
          const float4 x =
              s < kSegmentsA
                  ? times(four(shared.raw_a[stage][row], s), factor_a(exponent[r]))
                  : times(four(shared.raw_g[stage][row], s - kSegmentsA), factor_g(exponent[r]));
          most = absolute_max(most, x);
        }
        *reinterpret_cast<float4*>(largest + s * 128 + lane * 4) = most;
      }
      sm80::named_barrier<1, kThreads>();
      sm80::mbarrier_wait(&shared.empty[stage], slot.round ^ 1);
#pragma unroll
      for (int s = 0; s < kSegmentsA + kSegmentsG; ++s) {
        const float4 most = largest_of_all(stage, s * 128 + lane * 4);
        float* undo = s < kSegmentsA ? shared.undo_a[stage] + s * 128
                                     : shared.undo_g[stage] + (s - kSegmentsA) * 128;
        const float4 scales = s < kSegmentsA ? split_segment(shared.raw_a[stage], shared.a[stage],
                                                             s, most, exponent, true)
                                             : split_segment(shared.raw_g[stage], shared.g[stage],
                                                             s - kSegmentsA, most, exponent, false);
        if (warp == 0) *reinterpret_cast<float4*>(undo + lane * 4) = scales;
      }
      __syncwarp();
      if (lane == 0) sm80::mbarrier_arrive(&shared.full[stage]);
      slot.advance();
      if (chunk + 2 < last_chunk) copy(chunk + 2, stage);
      sm80::cp_async_commit();
    }
    sm80::cp_async_wait<0>();
  }
};

template <int kLines, int kColumns, int kWarpLines, int kWarpColumns>
struct SplitReduce {
  using Shared = SplitReduceShared<kLines, kColumns>;
  using Producer = SplitReduceProducer<kLines, kColumns>;
  using Product = sm80::SplitProduct<kWarpLines, kWarpColumns>;
  static constexpr int kWarpsAcross = kColumns / kWarpColumns;
  static constexpr int kProducers = Producer::kThreads;
  static constexpr int kConsumers = 32 * (kLines / kWarpLines) * kWarpsAcross;
  static constexpr int kThreads = kProducers + kConsumers;

  // Plain fp32 for the results of one thread.
  static __device__ __noinline__ void redo(const SplitReduceParams& params, float* out,
                                           std::int64_t first_row, std::int64_t last_row,
                                           std::int64_t first_line, std::int64_t first_column) {
    const ReduceProblem& p = params.problem;
    const int lane = thread_index() % 32;
    for (int i = 0; i < Product::kRowTiles * 2; ++i) {
      const std::int64_t line = first_line + i * 8 + lane / 4;
      if (line >= p.lines) continue;
      for (int j = 0; j < Product::kColumnTiles * 2; ++j) {
        const std::int64_t column = first_column + j / 2 * 8 + lane % 4 * 2 + j % 2;
        if (column >= p.columns) continue;
        float sum = 0.0f;
        for (std::int64_t row = first_row; row < last_row; ++row) {
          sum = fmaf(p.a[row_offset(p.a_rows, row) + line * p.a_line_stride],
                     p.g[row_offset(p.g_rows, row) + column * p.g_column_stride], sum);
        }
        out[line * p.columns + column] = sum;
      }
    }
  }

  // exchange(is_producer) may move registers from the warps that split to those that multiply.
  template <class Exchange>
  static __device__ __forceinline__ void run(const SplitReduceParams& params, Exchange exchange) {
    auto& shared = shared_memory<Shared>();
    const ReduceProblem& p = params.problem;
    const int thread = thread_index();
    if (thread < Shared::kStages) {
      sm80::mbarrier_init(&shared.full[thread], kProducers / 32);
      sm80::mbarrier_init(&shared.empty[thread], kConsumers / 32);
    }
    __syncthreads();
    const int tiles = params.line_tiles * params.column_tiles;
    const int tile = static_cast<int>(blockIdx.x) % tiles;
    const int slab = static_cast<int>(blockIdx.x) / tiles;
    const std::int64_t first_line = static_cast<std::int64_t>(tile / params.column_tiles) * kLines;
    const std::int64_t first_column =
        static_cast<std::int64_t>(tile % params.column_tiles) * kColumns;
    const std::int64_t chunks = ceil_div(p.rows, Shared::kInner);
    const std::int64_t first_chunk = chunks * slab / params.slabs;
    const std::int64_t last_chunk = chunks * (slab + 1) / params.slabs;

    if (thread < kProducers) {
      exchange(true);
      Producer{shared, params, first_line, first_column, thread / 32, thread % 32}.run(first_chunk,
                                                                                       last_chunk);
      return;
    }
    exchange(false);
    const int warp = thread / 32 - kProducers / 32;
    const int lane = thread % 32;
    const int line = warp / kWarpsAcross * kWarpLines;
    const int column = warp % kWarpsAcross * kWarpColumns;
    Product product;
    product.clear();
    Slot<Shared::kStages> slot;
    for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      const int stage = slot.stage;
      sm80::mbarrier_wait(&shared.full[stage], slot.round);
      product.multiply(
          sm80::SplitAcrossA<kLines>(shared.a[stage], shared.undo_a[stage], line, lane),
          sm80::SplitAcrossB<kColumns>(shared.g[stage], shared.undo_g[stage], column, lane));
      __syncwarp();
      if (lane == 0) sm80::mbarrier_arrive(&shared.empty[stage]);
      slot.advance();
    }
    float* out = params.partial + static_cast<std::int64_t>(slab) * p.lines * p.columns;
    const bool finite = store_results(product, out, p.lines, p.columns, first_line + line,
                                      first_column + column, params.pairs, lane);
    if (!finite) {
      redo(params, out, first_chunk * Shared::kInner, min(last_chunk * Shared::kInner, p.rows),
           first_line + line, first_column + column);
    }
  }
};

// Adds the partial results of all slabs, in their order.
struct AddSlabsParams {
  const float* partial = nullptr;
  float* out = nullptr;
  std::int64_t count = 0;
  int slabs = 0;
};

constexpr int kAddSlabsThreads = 256;

__global__ void __launch_bounds__(kAddSlabsThreads) add_slabs_kernel(const AddSlabsParams params) {
  const std::int64_t i =
      static_cast<std::int64_t>(blockIdx.x) * kAddSlabsThreads + static_cast<int>(threadIdx.x);
  if (i >= params.count) return;
  float sum = params.partial[i];
#pragma unroll 8
  for (int slab = 1; slab < params.slabs; ++slab) sum += params.partial[slab * params.count + i];
  params.out[i] = sum;
}

}  // namespace fused_ops::tensor_matmul
