// SPDX-License-Identifier: Apache-2.0
// Weighted sums of lines of numbers, for 16 rows of weights at a time: of values (rows are queries)
// and of pair values (rows are heads). Weights are 2^(logit - shift).
//
// The four warps of a block take turns at 16 keys. Each has a ring of its own in shared memory and
// accumulators of all rows and columns, so that nobody waits for anybody until the end, when the
// four are added in a fixed order.
#pragma once

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "invariant_point_attention/invariant_point_attention.h"

namespace fused_ops::invariant_point_attention {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;
constexpr int kStep = 16;  // keys
constexpr int kStages = 3;

// The lane's weights of a step, lane 4g + t: of rows g and g + 8, of keys 2t, 2t + 1, 2t + 8, 2t
// + 9.
using Weights = float[2][4];

// Sums of weights as they were rounded for the product, and of the weights themselves.
struct Sums {
  float rounded = 0.0f;
  float exact = 0.0f;
};

template <DType type>
struct Product16 {
  static constexpr DType kType = type;
  using Number = std::uint16_t;
  static constexpr int kPadding = 8;  // of lines: an odd number of 16 bytes
  static constexpr bool kExactPoints = false;
  // Weights are so many powers of two larger, else small ones would be subnormal numbers of fp16.
  // The division by their sum undoes it.
  static constexpr float kShift = type == DType::kFloat16 ? 12.0f : 0.0f;

  template <int columns, int tiles>
  static __device__ __forceinline__ void multiply(float (&total)[tiles][4], Sums (&sums)[2],
                                                  const Weights& weights, const Number* lines,
                                                  int lane, int left, int) {
    std::uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&four)[4] = weights[i % 2];
      const float x = four[i / 2 * 2], y = four[i / 2 * 2 + 1];
      a[i] = pack_two<type>(x, y);
      const float2 two = unpack_two<type>(a[i]);
      sums[i % 2].rounded += two.x + two.y;
      sums[i % 2].exact += x + y;
    }
    const Number* line = lines + lane % 16 * (columns + kPadding) + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < tiles; j += 2) {
      if (j * 8 >= left) break;
      std::uint32_t four[4];
      sm80::ldmatrix_x4_trans(four, sm80::shared_address(line + j * 8));
      const std::uint32_t first[2] = {four[0], four[1]}, second[2] = {four[2], four[3]};
      if constexpr (type == DType::kBFloat16) {
        sm80::mma_bf16(total[j], a, first);
        sm80::mma_bf16(total[j + 1], a, second);
      } else {
        sm80::mma_f16(total[j], a, first);
        sm80::mma_f16(total[j + 1], a, second);
      }
    }
  }
};

// `split`: all products to fp32's accuracy; else those of columns from `split_from` on.
template <bool split>
struct Product32 {
  static constexpr DType kType = DType::kFloat32;
  using Number = float;
  static constexpr int kPadding = 4;  // two lines are then 8 banks apart
  static constexpr bool kExactPoints = true;
  static constexpr float kShift = 0.0f;

  // The nearest number of TF32, or one as good; NaN stays NaN.
  static __device__ __forceinline__ std::uint32_t high(float x) {
    return __float_as_uint(x * (1.0f + 1.0f / 3072.0f)) & ~0x1fffu;
  }
  static __device__ __forceinline__ std::uint32_t low(float x, std::uint32_t high) {
    return __float_as_uint(x - __uint_as_float(high));
  }
  // What the tensor core cuts off of a number.
  static __device__ __forceinline__ std::uint32_t rest(std::uint32_t x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & ~0x1fffu));
  }

  // The inner axis is in another order than the tensor core's: keys 2t and 2t + 1 are its t and
  // t + 4. Sums of a step are added in fp32, for the tensor core cuts off what it adds.
  template <int columns, int tiles>
  static __device__ __forceinline__ void multiply(float (&total)[tiles][4], Sums (&sums)[2],
                                                  const Weights& weights, const Number* lines,
                                                  int lane, int left, int split_from) {
    std::uint32_t a[2][4], a_low[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = weights[e % 2][i * 2 + e / 2];
        a[i][e] = high(x);
        a_low[i][e] = (low(x, a[i][e]) + 0x1000u) & ~0x1fffu;  // the nearest
        // What is added up is what is multiplied: coordinates may be large.
        const float used = __uint_as_float(a[i][e]) + __uint_as_float(a_low[i][e]);
        sums[e % 2].rounded += split ? used : __uint_as_float(a[i][e]);
        sums[e % 2].exact += used;
      }
    }
    constexpr int kPitch = columns + kPadding;
    const Number* line = lines + lane % 4 * 2 * kPitch + lane / 4;
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j * 8 >= left) break;
      float part[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = line[i * 8 * kPitch + j * 8], y = line[(i * 8 + 1) * kPitch + j * 8];
        const std::uint32_t b[2] = {high(x), high(y)};
        if (split || j * 8 >= split_from) {
          const std::uint32_t b_low[2] = {low(x, b[0]), low(y, b[1])};
          if (j * 8 + 8 > split_from) {  // coordinates keep all their bits
            const std::uint32_t b_rest[2] = {rest(b_low[0]), rest(b_low[1])};
            sm80::mma_tf32(part, a[i], b_rest);
          }
          sm80::mma_tf32(part, a_low[i], b);
          sm80::mma_tf32(part, a[i], b_low);
        }
        sm80::mma_tf32(part, a[i], b);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) total[j][e] += part[e];
    }
  }
};

// `columns` at a time; `all_columns`: of the sums that are kept.
template <class Product, int columns, int all_columns>
struct alignas(1024) WeightedSumsShared {
  static constexpr int kPitch = columns + Product::kPadding;
  static constexpr int kPartPitch = columns + 8;
  union {
    alignas(16) typename Product::Number lines[kWarps][kStages][kStep * kPitch];
    float parts[kWarps][kRows][kPartPitch];
  };
  float totals[kRows][all_columns];
  Sums part_sums[kWarps][kRows];
  Sums sums[kRows];
  float shifts[kRows];
};

// The lines that are added up: `n` of them, of which `width` columns count.
struct Lines {
  const void* data;
  DType type;  // the product's if copies are asynchronous
  std::int64_t stride;
  int n;
  int width;
};

template <class Product, int columns, int all_columns, bool aligned>
struct WeightedSums {
  using Shared = WeightedSumsShared<Product, columns, all_columns>;
  using Number = typename Product::Number;
  static constexpr int kTiles = columns / 8;
  static constexpr int kPieceNumbers = 16 / static_cast<int>(sizeof(Number));
  static constexpr int kPieces = columns / kPieceNumbers;
  static_assert(kStep * kPieces % 32 == 0 && columns % 16 == 0);

  Shared& shared;
  const Lines& lines;
  int thread;

  __device__ __forceinline__ int lane() const { return thread % 32; }

  // Asks for columns of a step's lines; zeros beyond the last line.
  __device__ __forceinline__ void copy(int first_column, int key, int stage) const {
    Number* const to = shared.lines[thread / 32][stage];
    if constexpr (aligned) {
#pragma unroll
      for (int i = 0; i < kStep * kPieces / 32; ++i) {
        const int index = i * 32 + lane();
        const int line = index / kPieces, column = index % kPieces * kPieceNumbers;
        if (first_column + column >= lines.width) continue;
        const bool here = key + line < lines.n;
        const Number* from = static_cast<const Number*>(lines.data) +
                             (here ? key + line : 0) * lines.stride + first_column + column;
        sm80::cp_async_16(to + line * Shared::kPitch + column, from, here ? 16 : 0);
      }
    } else {
      for (int index = lane(); index < kStep * columns; index += 32) {
        const int line = index / columns, column = index % columns;
        const bool here = key + line < lines.n && first_column + column < lines.width;
        const std::int64_t from = (key + line) * lines.stride + first_column + column;
        const float number = here ? load_number(lines.data, lines.type, from) : 0.0f;
        store_number(to, Product::kType, line * Shared::kPitch + column, number);
      }
    }
  }

  // Two neighbours twice, of the lane's rows; -inf where there is no such row or key.
  static __device__ __forceinline__ void load_logits(Weights& logits, const float* const (&rows)[2],
                                                     int key, int line) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        constexpr float kMinusInfinity = -__builtin_huge_valf();
        float2 two = make_float2(kMinusInfinity, kMinusInfinity);
        if (rows[h] && key + i * 8 < line) {
          two = *reinterpret_cast<const float2*>(rows[h] + key + i * 8);
        }
        logits[h][i * 2] = two.x;
        logits[h][i * 2 + 1] = two.y;
      }
    }
  }

  // totals and sums of columns from `first_column` on, kept from column `at` on. The shifts are
  // there, and all threads have seen them. `rows` are those of the lane: g and g + 8, null for
  // none.
  __device__ __forceinline__ void add_up(const float* const (&rows)[2], int first_column, int at,
                                         int split_from) {
    const int warp = thread / 32;
    const int steps = (lines.n + kStep - 1) / kStep;
    const int logits_line = (lines.n + 7) / 8 * 8;
    const float shift[2] = {shared.shifts[lane() / 4], shared.shifts[lane() / 4 + 8]};
    float total[kTiles][4] = {};
    Sums sums[2];
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (warp + i * kWarps < steps) copy(first_column, (warp + i * kWarps) * kStep, i);
      sm80::cp_async_commit();
    }
    Weights next;
    load_logits(next, rows, warp * kStep + lane() % 4 * 2, logits_line);
    int stage = 0;
    for (int step = warp; step < steps; step += kWarps) {
      sm80::cp_async_wait<kStages - 2>();
      __syncwarp();  // also: all have read what is overwritten now
      const int later = step + (kStages - 1) * kWarps;
      if (later < steps) copy(first_column, later * kStep, stage == 0 ? kStages - 1 : stage - 1);
      sm80::cp_async_commit();
      Weights weights;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) weights[h][e] = sm80::exp2_approx(next[h][e] - shift[h]);
      }
      load_logits(next, rows, (step + kWarps) * kStep + lane() % 4 * 2, logits_line);
      Product::template multiply<columns>(total, sums, weights, shared.lines[warp][stage], lane(),
                                          lines.width - first_column, split_from - first_column);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    sm80::cp_async_wait<0>();
    __syncthreads();  // the parts take the place of the lines
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        *reinterpret_cast<float2*>(&shared.parts[warp][g + 8 * h][j * 8 + 2 * t]) =
            make_float2(total[j][2 * h], total[j][2 * h + 1]);
      }
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        sums[h].rounded += __shfl_xor_sync(0xffffffff, sums[h].rounded, distance);
        sums[h].exact += __shfl_xor_sync(0xffffffff, sums[h].exact, distance);
      }
      if (t == 0) shared.part_sums[warp][g + 8 * h] = sums[h];
    }
    __syncthreads();
    for (int i = thread; i < kRows * columns; i += kThreads) {
      const int row = i / columns, column = i % columns;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared.parts[w][row][column];
      shared.totals[row][at + column] = sum;
    }
    if (thread < kRows) {
      Sums sum;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum.rounded += shared.part_sums[w][thread].rounded;
        sum.exact += shared.part_sums[w][thread].exact;
      }
      shared.sums[thread] = sum;
    }
    __syncthreads();
  }
};

}  // namespace fused_ops::invariant_point_attention
