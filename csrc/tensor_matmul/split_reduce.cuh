// SPDX-License-Identifier: Apache-2.0
// C = A^T * G to fp32's accuracy on the fp16 tensor cores, A (rows, lines) and G (rows, columns):
// the gradient of B, a sum over all rows.
//
// A block sums one tile of C over a slab of rows; where there are several slabs, each has a partial
// result of its own and a second kernel adds those in order, so that the sum is the same each time.
// Some warps split, the others multiply. A chunk of rows is split in two steps, because both scales
// it needs run across the rows: each row of A is divided by a power of two, the mean magnitude of
// its numbers, and the row of G multiplied by it, so that the two can vary inversely along the sum;
// then each column has the scale that all its rows give. Columns of which, after the first step,
// all numbers are below 2^-112 lose digits.
#pragma once

#include "tensor_matmul/split_tile.cuh"

namespace fused_ops::tensor_matmul {

struct SplitReduceParams {
  ReduceProblem problem;
  float* partial = nullptr;  // (slabs, lines, columns); C itself for one slab
  int line_tiles = 0;
  int column_tiles = 0;
  int slabs = 0;
  bool a_vector = false;  // 16 bytes may be copied at a time
  bool g_vector = false;
  bool out_vector = false;  // four columns of a partial result may be stored at once
  bool every_thread_arrives = false;
};

template <int kLines, int kColumns, int kSplitWarps>
struct alignas(1024) SplitReduceShared {
  static constexpr int kInner = sm80::kSplitInner;
  static constexpr int kStages = 2;
  unsigned char a[kStages][kLines * sm80::kSplitLineBytes];
  unsigned char g[kStages][kColumns * sm80::kSplitLineBytes];
  float raw_a[kStages][kInner][kLines];
  float raw_g[kStages][kInner][kColumns];
  float factor_a[kStages][kInner];  // of A's rows
  float factor_g[kStages][kInner];
  float undo_a[kStages][kLines];
  float undo_g[kStages][kColumns];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};

// The warps that copy and split. A warp copies some rows and finds the exponents of A's; then it
// splits columns over all rows of the chunk.
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

  template <int kWidth>
  __device__ __forceinline__ void copy_row(float (&raw)[kWidth], const float* row, bool exists,
                                           int first, std::int64_t count, std::int64_t stride,
                                           bool vector) const {
#pragma unroll
    for (int s = 0; s < kWidth; s += 128) {
      const int at = s + lane * 4;
      const std::int64_t left = exists ? count - first - at : 0;
      const float* from = row + std::int64_t{first + at} * stride;
      float* to = raw + at;
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
        sm80::cp_async_16(&raw[r][s + lane * 4], from + s);
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
      copy_row(shared.raw_a[slot][at], a, exists, first_line, p.lines, p.a_line_stride,
               params.a_vector);
      copy_row(shared.raw_g[slot][at], g, exists, first_column, p.columns, p.g_column_stride,
               params.g_vector);
    }
  }

  // Finds what to multiply the rows that this warp has copied by: a row of A is divided by the
  // power of two that is the mean magnitude of its numbers (of the largest of every four: one
  // outlier must not set the scale of G's row for all lines). What is not finite does not count: it
  // spoils its own line, but the others need the row. A row of zeros takes G's row out, so that
  // what stands there does not set G's scale.
  __device__ __forceinline__ void find_factors(int slot) const {
    unsigned exponent[kRows];  // a sum of biased ones, and in the upper half how many
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      exponent[r] = 0;
#pragma unroll
      for (int s = 0; s < kLines; s += 128) {
        const float4 x =
            *reinterpret_cast<const float4*>(&shared.raw_a[slot][warp * kRows + r][s + lane * 4]);
        const unsigned bits =
            __float_as_uint(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
        const bool counts = bits - 1 < 0x7f7fffffu;  // neither zero nor infinite
        if (counts) exponent[r] += max(bits >> 23, 1u) | 1u << 16;
      }
    }
    unsigned mine = 0;  // lane r keeps that of row r
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const unsigned all = __reduce_add_sync(0xffffffffu, exponent[r]);
      if (lane == r) mine = all;
    }
    if (lane < kRows) {
      const unsigned count = mine >> 16;
      const float sum = static_cast<float>(mine & 0xffffu);
      const auto ratio = static_cast<unsigned>(__fdividef(sum, static_cast<float>(max(count, 1u))));
      const unsigned mean = min(max(ratio, 1u), 253u);
      shared.factor_a[slot][warp * kRows + lane] = sm80::power_of_two(static_cast<int>(254 - mean));
      shared.factor_g[slot][warp * kRows + lane] =
          count == 0 ? 0.0f : sm80::power_of_two(static_cast<int>(mean));
    }
  }

  // Splits 32 columns from `first` on, one a lane, into lines.
  template <int kWidth>
  __device__ __forceinline__ void split_columns(const float (&raw)[kInner][kWidth],
                                                const float (&factor)[kInner], unsigned char* out,
                                                float* undo, int first) const {
    const int column = first + lane;
    float x[kInner];
    float largest[4];  // scales need as much
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = 0x1p-112f;
#pragma unroll
    for (int i = 0; i < kInner; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(factor + i);
      x[i] = raw[i][column] * four.x;
      x[i + 1] = raw[i + 1][column] * four.y;
      x[i + 2] = raw[i + 2][column] * four.z;
      x[i + 3] = raw[i + 3][column] * four.w;
#pragma unroll
      for (int j = 0; j < 4; ++j) largest[j] = sm80::max_nan(largest[j], fabsf(x[i + j]));
    }
    const float most =
        sm80::max_nan(sm80::max_nan(largest[0], largest[1]), sm80::max_nan(largest[2], largest[3]));
    const float multiply = sm80::split_multiplier(most);
#pragma unroll
    for (int piece = 0; piece < kInner / 8; ++piece) {
      std::uint32_t hi[4];
      std::uint32_t lo[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = piece * 8 + j * 2;
        sm80::split_pair(x[i] * multiply, x[i + 1] * multiply, &hi[j], &lo[j]);
      }
      *reinterpret_cast<uint4*>(out + sm80::split_offset(column, piece)) =
          make_uint4(hi[0], hi[1], hi[2], hi[3]);
      *reinterpret_cast<uint4*>(out + sm80::split_offset(column, piece + 4)) =
          make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
    undo[column] = sm80::split_undo(most);
  }

  template <class Warps>
  __device__ __forceinline__ void run(int first_chunk, int last_chunk) const {
    const ReduceProblem& p = params.problem;
    const std::int64_t first_row = std::int64_t{first_chunk} * kInner + warp * kRows;
    Next next{p.a + first_row * p.a_rows.stride[0] + first_line + lane * 4,
              p.g + first_row * p.g_rows.stride[0] + first_column + lane * 4};
    copy(first_chunk, 0, &next);
    sm80::cp_async_commit();
    sm80::RingSlot<Shared::kStages> slot;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
      const int stage = slot.stage;
      sm80::cp_async_wait<0>();
      find_factors(stage);  // from what this lane has copied
      // Now all have copied this chunk and split the last one.
      sm80::named_barrier<1, kThreads>();
      if (chunk + 1 < last_chunk) copy(chunk + 1, stage ^ 1, &next);
      sm80::cp_async_commit();
      sm80::mbarrier_wait(&shared.empty[stage], slot.round ^ 1);
#pragma unroll 1
      for (int first = warp * 32; first < kLines; first += kThreads) {
        split_columns(shared.raw_a[stage], shared.factor_a[stage], shared.a[stage],
                      shared.undo_a[stage], first);
      }
#pragma unroll 1
      for (int first = warp * 32; first < kColumns; first += kThreads) {
        split_columns(shared.raw_g[stage], shared.factor_g[stage], shared.g[stage],
                      shared.undo_g[stage], first);
      }
      Warps::publish();
      sm80::warp_arrives(&shared.full[stage], lane, params.every_thread_arrives);
      slot.advance();
    }
    sm80::cp_async_wait<0>();
  }
};

// Warps: those that multiply, sm80::SplitWarps or the like.
template <int kLines, int kColumns, int kSplitWarps, class Warps>
struct SplitReduce {
  using Shared = SplitReduceShared<kLines, kColumns, kSplitWarps>;
  using Producer = SplitReduceProducer<kLines, kColumns, kSplitWarps>;
  using Product = typename Warps::Product;
  static constexpr int kProducers = Producer::kThreads;
  static constexpr int kConsumers = Warps::kThreads;
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
      sm80::mbarrier_init(&shared.full[thread],
                          sm80::arrivals(kProducers, params.every_thread_arrives));
      sm80::mbarrier_init(&shared.empty[thread],
                          sm80::arrivals(kConsumers, params.every_thread_arrives));
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
      Producer{shared, params, first_line, first_column, plain, thread / 32, thread % 32}
          .template run<Warps>(first_chunk, last_chunk);
      return;
    }
    exchange(false);
    const Warps warps{thread - kProducers};
    const int lane = thread % 32;
    Product product;
    product.clear();
    sm80::RingSlot<Shared::kStages> slot;
    for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
      const int stage = slot.stage;
      sm80::mbarrier_wait(&shared.full[stage], slot.round);
      warps.template multiply<true>(
          product, shared.a[stage], shared.undo_a[stage], shared.g[stage], shared.undo_g[stage],
          [&] { sm80::warp_arrives(&shared.empty[stage], lane, params.every_thread_arrives); });
      slot.advance();
    }
    float* out = params.partial + static_cast<std::int64_t>(slab) * p.lines * p.columns;
    const bool finite = store_results(product, out, p.lines, p.columns, first_line + warps.row(),
                                      first_column + warps.column(), params.out_vector, lane);
    if (!finite) {
      redo(params, out, std::int64_t{first_chunk} * Shared::kInner,
           min(std::int64_t{last_chunk} * Shared::kInner, p.rows), first_line + warps.row(),
           first_column + warps.column());
    }
  }
};

}  // namespace fused_ops::tensor_matmul
