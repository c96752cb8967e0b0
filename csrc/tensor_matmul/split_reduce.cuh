// SPDX-License-Identifier: Apache-2.0
// C = A^T * G to fp32's accuracy on the fp16 tensor cores, A (rows, lines) and G (rows, columns):
// the gradient of B, a sum over all rows.
//
// A block sums one tile of C over a slab of rows; where there are several slabs, each has a partial
// result of its own and a second kernel adds those in order, so that the sum is the same each time.
// Some warps split, the others multiply. A chunk of rows is split in two steps, because both scales
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

template <int kLines, int kColumns, int kSplitWarps>
struct alignas(128) SplitReduceShared {
  static constexpr int kInner = sm80::kSplitInner;
  static constexpr int kStages = 2;
  unsigned char a[kStages][2 * sm80::kSplitAcrossBytes<kLines>];
  unsigned char g[kStages][2 * sm80::kSplitAcrossBytes<kColumns>];
  float raw_a[kStages][kInner][kLines];
  float raw_g[kStages][kInner][kColumns];
  int row_exponent[kStages][kInner];  // of A
  float undo_a[kStages][kLines];
  float undo_g[kStages][kColumns];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};

// The warps that copy and split. A warp copies some rows and finds the exponents of A's; then it
// splits groups of 16 columns over all rows of the chunk.
template <int kLines, int kColumns, int kSplitWarps>
struct SplitReduceProducer {
  using Shared = SplitReduceShared<kLines, kColumns, kSplitWarps>;
  static constexpr int kInner = Shared::kInner;
  static constexpr int kThreads = 32 * kSplitWarps;
  static constexpr int kRows = kInner / kSplitWarps;  // that a warp copies
  static_assert(kLines % 128 == 0 && kColumns % 128 == 0 && 8 % kSplitWarps == 0);

  Shared& shared;
  const SplitReduceParams& params;
  int first_line;
  int first_column;
  bool plain;  // one stride from row to row, aligned, and all lines and columns inside
  int warp;
  int lane;

  // Where the four numbers of a raw row that start at 4 * group stand: rows read together take
  // turns in the order.
  static __device__ __forceinline__ int raw_offset(int row, int group) {
    return (group ^ (row & 1) << 2) * 4;
  }

  template <int kWidth>
  __device__ __forceinline__ void copy_row(float (&raw)[kWidth], int at_row, const float* row,
                                           bool exists, int first, std::int64_t count,
                                           std::int64_t stride, bool vector) const {
#pragma unroll
    for (int s = 0; s < kWidth; s += 128) {
      const int at = s + lane * 4;
      const std::int64_t left = exists ? count - first - at : 0;
      const float* from = row + std::int64_t{first + at} * stride;
      float* to = raw + raw_offset(at_row, at / 4);
      if (vector) {
        const int bytes = static_cast<int>(max(min(left, std::int64_t{4}), std::int64_t{0})) * 4;
        sm80::cp_async_16(to, bytes > 0 ? from : row, bytes);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sm80::cp_async_4(to + i, i < left ? from + i * stride : row, i < left ? 4 : 0);
        }
      }
    }
  }

  // The usual case.
  template <int kWidth>
  __device__ __forceinline__ void copy_rows(float (*raw)[kWidth], const float* from,
                                            std::int64_t stride) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int s = 0; s < kWidth; s += 128) {
        sm80::cp_async_16(&raw[r][s + raw_offset(r, lane)], from + s);
      }
      from += stride;
    }
  }

  // Where the lane's part of its first row in the next chunk begins, for the usual case.
  struct Next {
    const float* a;
    const float* g;
  };

  __device__ __forceinline__ void copy(int chunk, int slot, Next* next) const {
    const ReduceProblem& p = params.problem;
    const std::int64_t first = std::int64_t{chunk} * kInner + warp * kRows;
    if (plain) {
      const Next now = *next;
      next->a += kInner * p.a_rows.stride[0];
      next->g += kInner * p.g_rows.stride[0];
      if (first + kRows <= p.rows) {
        copy_rows(shared.raw_a[slot] + warp * kRows, now.a, p.a_rows.stride[0]);
        copy_rows(shared.raw_g[slot] + warp * kRows, now.g, p.g_rows.stride[0]);
        return;
      }
    }
    // The first kRows lanes find the rows of A, the next ones those of G.
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
      copy_row(shared.raw_a[slot][at], r, a, exists, first_line, p.lines, p.a_line_stride,
               params.a_vector);
      copy_row(shared.raw_g[slot][at], r, g, exists, first_column, p.columns, p.g_column_stride,
               params.g_vector);
    }
  }

  static __device__ __forceinline__ float largest_of(float4 x) {
    return sm80::max_nan(sm80::max_nan(fabsf(x.x), fabsf(x.y)),
                         sm80::max_nan(fabsf(x.z), fabsf(x.w)));
  }

  static __device__ __forceinline__ float finite_or_zero(float x) {
    return fabsf(x) < __uint_as_float(0x7f800000u) ? x : 0.0f;
  }

  // Stores the biased exponents of the rows of A that this warp has copied, 0 for a row of zeros.
  // What is not finite must not count: it spoils its own line, but the others need the row. Looking
  // for it costs, so it is left out only when a row turns out to have some.
  template <bool finite_only>
  __device__ __forceinline__ void find_row_exponents(int slot) const {
    float largest[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = 0.0f;
#pragma unroll
      for (int s = 0; s < kLines; s += 128) {
        float4 x = *reinterpret_cast<const float4*>(
            &shared.raw_a[slot][warp * kRows + r][s + raw_offset(r, lane)]);
        if (finite_only) {
          x = make_float4(finite_or_zero(x.x), finite_or_zero(x.y), finite_or_zero(x.z),
                          finite_or_zero(x.w));
        }
        largest[r] = sm80::max_nan(largest[r], largest_of(x));
      }
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
      finite &= biased < 255;
      const int exponent = largest[r] == 0.0f ? 0 : min(max(biased, 1), 253);
      if (lane == r) shared.row_exponent[slot][warp * kRows + r] = exponent;
    }
    if constexpr (!finite_only) {
      if (!finite) find_row_exponents<true>(slot);
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

  // Splits the 16 columns from `first` on. A lane has four columns of the rows lane/4, lane/4 + 8,
  // and so on: so the eight lanes that share columns store to different banks.
  template <int kWidth>
  __device__ __forceinline__ void split_columns(const float (&raw)[kInner][kWidth],
                                                unsigned char* out, float* undo, int first,
                                                const float (&factor)[4]) const {
    const int row = lane / 4;
    const int column = first + lane % 4 * 4;
    float4 x[4];
    float4 most = make_float4(0x1p-112f, 0x1p-112f, 0x1p-112f, 0x1p-112f);  // scales need as much
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = *reinterpret_cast<const float4*>(&raw[row + i * 8][raw_offset(row, column / 4)]);
      x[i] = make_float4(x[i].x * factor[i], x[i].y * factor[i], x[i].z * factor[i],
                         x[i].w * factor[i]);
      most =
          make_float4(sm80::max_nan(most.x, fabsf(x[i].x)), sm80::max_nan(most.y, fabsf(x[i].y)),
                      sm80::max_nan(most.z, fabsf(x[i].z)), sm80::max_nan(most.w, fabsf(x[i].w)));
    }
#pragma unroll
    for (int other = 4; other < 32; other *= 2) {
      most.x = sm80::max_nan(most.x, __shfl_xor_sync(0xffffffffu, most.x, other));
      most.y = sm80::max_nan(most.y, __shfl_xor_sync(0xffffffffu, most.y, other));
      most.z = sm80::max_nan(most.z, __shfl_xor_sync(0xffffffffu, most.z, other));
      most.w = sm80::max_nan(most.w, __shfl_xor_sync(0xffffffffu, most.w, other));
    }
    const float4 multiply =
        make_float4(sm80::split_multiplier(most.x), sm80::split_multiplier(most.y),
                    sm80::split_multiplier(most.z), sm80::split_multiplier(most.w));
    unsigned char* at = out + sm80::split_across_offset<kWidth>(row, column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint2 hi, lo;
      sm80::split_pair(x[i].x * multiply.x, x[i].y * multiply.y, &hi.x, &lo.x);
      sm80::split_pair(x[i].z * multiply.z, x[i].w * multiply.w, &hi.y, &lo.y);
      *reinterpret_cast<uint2*>(at + i * 8 * kWidth * 2) = hi;
      *reinterpret_cast<uint2*>(at + i * 8 * kWidth * 2 + sm80::kSplitAcrossBytes<kWidth>) = lo;
    }
    if (row == 0) {
      *reinterpret_cast<float4*>(undo + column) =
          make_float4(sm80::split_undo(most.x), sm80::split_undo(most.y), sm80::split_undo(most.z),
                      sm80::split_undo(most.w));
    }
  }

  __device__ __forceinline__ void run(int first_chunk, int last_chunk) const {
    const ReduceProblem& p = params.problem;
    const std::int64_t first_row = std::int64_t{first_chunk} * kInner + warp * kRows;
    Next next{p.a + first_row * p.a_rows.stride[0] + first_line + lane * 4,
              p.g + first_row * p.g_rows.stride[0] + first_column + lane * 4};
    copy(first_chunk, 0, &next);
    sm80::cp_async_commit();
    Slot<Shared::kStages> slot;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
      const int stage = slot.stage;
      sm80::cp_async_wait<0>();
      find_row_exponents<false>(stage);  // from what this lane has copied
      // Now all have copied this chunk and split the last one.
      sm80::named_barrier<1, kThreads>();
      if (chunk + 1 < last_chunk) copy(chunk + 1, stage ^ 1, &next);
      sm80::cp_async_commit();
      float of_a[4];
      float of_g[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int exponent = shared.row_exponent[stage][lane / 4 + i * 8];
        of_a[i] = factor_a(exponent);
        of_g[i] = factor_g(exponent);
      }
      sm80::mbarrier_wait(&shared.empty[stage], slot.round ^ 1);
#pragma unroll 1
      for (int first = warp * 16; first < kLines; first += kSplitWarps * 16) {
        split_columns(shared.raw_a[stage], shared.a[stage], shared.undo_a[stage], first, of_a);
      }
#pragma unroll 1
      for (int first = warp * 16; first < kColumns; first += kSplitWarps * 16) {
        split_columns(shared.raw_g[stage], shared.g[stage], shared.undo_g[stage], first, of_g);
      }
      __syncwarp();
      if (lane == 0) sm80::mbarrier_arrive(&shared.full[stage]);
      slot.advance();
    }
    sm80::cp_async_wait<0>();
  }
};

template <int kLines, int kColumns, int kWarpLines, int kWarpColumns, int kSplitWarps>
struct SplitReduce {
  using Shared = SplitReduceShared<kLines, kColumns, kSplitWarps>;
  using Producer = SplitReduceProducer<kLines, kColumns, kSplitWarps>;
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
    const int first_line = tile / params.column_tiles * kLines;
    const int first_column = tile % params.column_tiles * kColumns;
    const std::int64_t chunks = ceil_div(p.rows, Shared::kInner);
    const int first_chunk = static_cast<int>(chunks * slab / params.slabs);
    const int last_chunk = static_cast<int>(chunks * (slab + 1) / params.slabs);

    if (thread < kProducers) {
      exchange(true);
      const bool plain = params.a_vector && params.g_vector && p.a_rows.count == 1 &&
                         p.g_rows.count == 1 && first_line + kLines <= p.lines &&
                         first_column + kColumns <= p.columns;
      Producer{shared, params, first_line, first_column, plain, thread / 32, thread % 32}.run(
          first_chunk, last_chunk);
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
    for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
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
      redo(params, out, std::int64_t{first_chunk} * Shared::kInner,
           min(std::int64_t{last_chunk} * Shared::kInner, p.rows), first_line + line,
           first_column + column);
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
