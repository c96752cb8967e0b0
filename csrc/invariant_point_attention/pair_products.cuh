// SPDX-License-Identifier: Apache-2.0
// Products of the pair tensor with a row of weights for each head. Up to 16 heads are the rows of
// an mma, eight pairs its columns. The order of the inner axis is free: lane 4g + t takes the
// 16-byte piece t of every four, of pair g and of heads g and g + 8; so what it reads of a pair is
// the right operand as it is, and weights lie in shared memory in the order of the left one.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "invariant_point_attention/config.h"

namespace fused_ops::invariant_point_attention {

constexpr int kPairThreads = 128;
constexpr int kTableSteps = 8;  // of four pieces, whose weights a block holds at a time
constexpr int kLoadSteps = 4;   // that are asked for at once

template <Mode mode>
struct PairOperands {
  static constexpr DType kType = type_of(mode);
  static constexpr int kNumbers = is_fp32(mode) ? 4 : 8;  // of a piece
  static constexpr int kStep = 4 * kNumbers;
  static constexpr int kChunk = kTableSteps * kStep;

  // A piece of a line that has `left` numbers from `index` on, zeros beyond. `whole`: lines are
  // aligned to eight numbers.
  static __device__ __forceinline__ uint4 load(const Stored& line, std::int64_t index, int left,
                                               bool whole) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (left <= 0) return words;
    if (whole && line.type == kType) {
      const auto* from = static_cast<const unsigned char*>(line.data) + index * bytes_of(kType);
      return *reinterpret_cast<const uint4*>(from);
    }
    float numbers[kNumbers];
    if (whole) {
      load_numbers(line, index, numbers);
    } else {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        numbers[i] = i < left ? load_number(line.data, line.type, index + i) : 0.0f;
      }
    }
    store_numbers_as<kType>(&words, 0, numbers);
    return words;
  }

  // The nearest of TF32, and what is left.
  static __device__ __forceinline__ void split(float x, std::uint32_t& high, std::uint32_t& low) {
    high = (__float_as_uint(x) + 0x1000u) & ~0x1fffu;
    low = __float_as_uint(x - __uint_as_float(high));
  }

  // sum[0] += a * b, sum[1] += a * b_8: operands of one mma each.
  static __device__ __forceinline__ void multiply_two(float (&sum)[2][4],
                                                      const std::uint32_t (&a)[4],
                                                      const std::uint32_t (&b)[2],
                                                      const std::uint32_t (&b_8)[2]) {
    if constexpr (mode == Mode::kBFloat16) {
      sm80::mma_bf16(sum[0], a, b);
      sm80::mma_bf16(sum[1], a, b_8);
    } else if constexpr (mode == Mode::kFloat16) {
      sm80::mma_f16(sum[0], a, b);
      sm80::mma_f16(sum[1], a, b_8);
    } else if constexpr (mode == Mode::kTf32) {
      const std::uint32_t left[4] = {third(a[0]), third(a[1]), third(a[2]), third(a[3])};
      const std::uint32_t right[2] = {third(b[0]), third(b[1])};
      const std::uint32_t right_8[2] = {third(b_8[0]), third(b_8[1])};
      sm80::mma_tf32(sum[0], left, right);
      sm80::mma_tf32(sum[1], left, right_8);
    } else {
      std::uint32_t high[4], low[4], right[2][2], right_low[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) split(__uint_as_float(a[i]), high[i], low[i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        split(__uint_as_float(b[i]), right[0][i], right_low[0][i]);
        split(__uint_as_float(b_8[i]), right[1][i], right_low[1][i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sm80::mma_tf32(sum[i], low, right[i]);  // the small terms first
        sm80::mma_tf32(sum[i], high, right_low[i]);
        sm80::mma_tf32(sum[i], high, right[i]);
      }
    }
  }

  // The tensor cores cut 13 bits off: a third of the last bit that stays is added before.
  static __device__ __forceinline__ std::uint32_t third(std::uint32_t x) {
    return __float_as_uint(__uint_as_float(x) * (1.0f + 1.0f / 3072.0f));
  }

  // sum += a * b: pieces of rows g and g + 8, and of column g.
  static __device__ __forceinline__ void multiply(float (&sum)[4], const uint4& row,
                                                  const uint4& row_8, const uint4& column) {
    const std::uint32_t first[4] = {row.x, row.y, row.z, row.w};
    const std::uint32_t second[4] = {row_8.x, row_8.y, row_8.z, row_8.w};
    const std::uint32_t other[4] = {column.x, column.y, column.z, column.w};
    // The tensor cores cut sums off. Of fp32 numbers those of a piece are added by rounding.
    [[maybe_unused]] float of_piece[4] = {};
#pragma unroll
    for (int s = 0; s < 4; s += 2) {
      std::uint32_t a[4] = {first[s], second[s], first[s + 1], second[s + 1]};
      std::uint32_t b[2] = {other[s], other[s + 1]};
      if constexpr (mode == Mode::kBFloat16) {
        sm80::mma_bf16(sum, a, b);
      } else if constexpr (mode == Mode::kFloat16) {
        sm80::mma_f16(sum, a, b);
      } else if constexpr (mode == Mode::kTf32) {
#pragma unroll
        for (std::uint32_t& x : a) x = third(x);
#pragma unroll
        for (std::uint32_t& x : b) x = third(x);
        sm80::mma_tf32(sum, a, b);
      } else {
        std::uint32_t a_low[4], b_low[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) split(__uint_as_float(a[i]), a[i], a_low[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) split(__uint_as_float(b[i]), b[i], b_low[i]);
        sm80::mma_tf32(of_piece, a_low, b);  // the small terms first
        sm80::mma_tf32(of_piece, a, b_low);
        sm80::mma_tf32(of_piece, a, b);
      }
    }
    if constexpr (mode == Mode::kSplit) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += of_piece[e];
    }
  }
};

// Sums of the lane: of two eights of pairs, pairs 2t and 2t + 1 of head g, then of head g + 8.
using PairSums = float[2][4];

// Weights of a chunk of channels in shared memory: of a step two left operands.
struct PairTable {
  uint4 operands[kTableSteps][2][32];

  // From `weights`, of which a head's line of `channels` begins at first + head * channels.
  template <Mode mode>
  __device__ __forceinline__ void fill(const Stored& weights, std::int64_t first, int heads,
                                       int channels, int from, bool whole, int thread) {
    using Operands = PairOperands<mode>;
    const int needed = static_cast<int>(ceil_div(channels - from, Operands::kStep));
    const int steps = min(kTableSteps, needed);
    for (int i = thread; i < steps * 32; i += kPairThreads) {
      const int channel = from + i / 32 * Operands::kStep + i % 4 * Operands::kNumbers;
      uint4 of_heads[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = half * 8 + i % 32 / 4;
        const int left = head < heads ? channels - channel : 0;
        const std::int64_t at = first + std::int64_t{head} * channels + channel;
        of_heads[half] = Operands::load(weights, at, left, whole);
      }
      const uint4 &low = of_heads[0], &high = of_heads[1];
      operands[i / 32][0][i % 32] = make_uint4(low.x, high.x, low.y, high.y);
      operands[i / 32][1][i % 32] = make_uint4(low.z, high.z, low.w, high.w);
    }
  }

  // sum += a step of all heads times pieces of pairs g and g + 8.
  template <Mode mode>
  __device__ __forceinline__ void multiply(int step, int lane, const uint4& pair,
                                           const uint4& pair_8, PairSums& sum) const {
    using Operands = PairOperands<mode>;
    // The tensor cores cut sums off. Of fp32 numbers those of a step are added by rounding.
    [[maybe_unused]] PairSums of_step = {};
    PairSums& to = mode == Mode::kSplit ? of_step : sum;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 four = operands[step][half][lane];
      const std::uint32_t a[4] = {four.x, four.y, four.z, four.w};
      const std::uint32_t b[2] = {half ? pair.z : pair.x, half ? pair.w : pair.y};
      const std::uint32_t b_8[2] = {half ? pair_8.z : pair_8.x, half ? pair_8.w : pair_8.y};
      Operands::multiply_two(to, a, b, b_8);
    }
    if constexpr (mode == Mode::kSplit) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e / 4][e % 4] += of_step[e / 4][e % 4];
    }
  }
};

// Pieces of two lines of a lane, asked for together. What lies beyond the line is zero.
template <Mode mode>
struct PairPieces {
  uint4 line[kLoadSteps], line_8[kLoadSteps];

  // Of lines that are whole and of the mode's type. `full`: all steps are there.
  template <bool full>
  __device__ __forceinline__ void ask(const Stored& pair, std::int64_t at, std::int64_t at_8,
                                      int channels, int from, int lane) {
    using Operands = PairOperands<mode>;
    const Stored same = {pair.data, Operands::kType};
#pragma unroll
    for (int s = 0; s < kLoadSteps; ++s) {
      const int channel = from + s * Operands::kStep + lane % 4 * Operands::kNumbers;
      const int left = full ? Operands::kNumbers : channels - channel;
      line[s] = Operands::load(same, at + channel, left, true);
      line_8[s] = Operands::load(same, at_8 + channel, left, true);
    }
  }

  // sum += these times the table's steps from `first` on, of which there are `steps`.
  template <bool full>
  __device__ __forceinline__ void multiply(const PairTable& table, int first, int steps, int lane,
                                           PairSums& sum) const {
#pragma unroll
    for (int s = 0; s < kLoadSteps; ++s) {
      if (!full && first + s >= steps) break;
      table.template multiply<mode>(first + s, lane, line[s], line_8[s], sum);
    }
  }
};

// sum += the chunk from `from` on of two lines of the lane times the table.
template <Mode mode>
__device__ __forceinline__ void multiply_pairs(const PairTable& table, const Stored& pair,
                                               std::int64_t line, std::int64_t line_8, int channels,
                                               int from, bool whole, int lane, PairSums& sum) {
  using Operands = PairOperands<mode>;
  const int steps = (channels - from + Operands::kStep - 1) / Operands::kStep;
#pragma unroll 1
  for (int first = 0; first < min(steps, kTableSteps); first += kLoadSteps) {
    const int channel = from + first * Operands::kStep;
    if (whole && pair.type == Operands::kType) {
      PairPieces<mode> pieces;
      pieces.template ask<false>(pair, line, line_8, channels, channel, lane);
      pieces.template multiply<false>(table, first, steps, lane, sum);
      continue;
    }
#pragma unroll 1
    for (int s = 0; s < kLoadSteps && first + s < steps; ++s) {
      const int at = channel + s * Operands::kStep + lane % 4 * Operands::kNumbers;
      const uint4 x = Operands::load(pair, line + at, channels - at, whole);
      const uint4 x_8 = Operands::load(pair, line_8 + at, channels - at, whole);
      table.template multiply<mode>(first + s, lane, x, x_8, sum);
    }
  }
}

// Whether all lines begin where pieces of eight numbers may, and end with one. Steps along axes of
// length 1 are never made.
inline bool whole_lines(const Pairs& pair, const Sizes& sizes, int channels) {
  std::int64_t steps = 0;
  if (sizes.batch > 1) steps |= pair.batch_stride;
  if (sizes.n > 1) steps |= pair.i_stride | pair.j_stride;
  const auto address = reinterpret_cast<std::uintptr_t>(pair.data);
  return channels % 8 == 0 && steps * bytes_of(pair.type) % 16 == 0 && address % 16 == 0;
}

}  // namespace fused_ops::invariant_point_attention
