// SPDX-License-Identifier: Apache-2.0
// Products of the pair tensor with a row of weights for each head. 16 pairs are the rows of an mma,
// eight heads (an octet) its columns. The order of the inner axis is free: lane 4g + t takes the
// 16-byte piece t of every four, of pairs g and g + 8 and of head g, in the order of its operands.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "invariant_point_attention/config.h"

namespace fused_ops::invariant_point_attention {

constexpr int kPairThreads = 128;
constexpr int kOctets = kMostHeads / 8;
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
        // The tensor cores cut 13 bits off: a third of the last bit that stays is added before.
        constexpr float kThird = 1.0f + 1.0f / 3072.0f;
#pragma unroll
        for (std::uint32_t& x : a) x = __float_as_uint(__uint_as_float(x) * kThird);
#pragma unroll
        for (std::uint32_t& x : b) x = __float_as_uint(__uint_as_float(x) * kThird);
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

// Weights of a chunk of channels in shared memory, in the order of operands.
struct PairTable {
  uint4 pieces[kTableSteps][kOctets][32];

  // From `weights`, of which a head's line of `channels` begins at first + head * channels.
  template <Mode mode>
  __device__ __forceinline__ void fill(const Stored& weights, std::int64_t first, int heads,
                                       int channels, int from, bool whole, int thread) {
    using Operands = PairOperands<mode>;
    const int needed =
        static_cast<int>(round_up(ceil_div(channels - from, Operands::kStep), kLoadSteps));
    const int steps = min(kTableSteps, needed);  // those beyond the line are zeros
    for (int i = thread; i < steps * kOctets * 32; i += kPairThreads) {
      const int head = i / 32 % kOctets * 8 + i % 32 / 4;
      const int channel = from + i / (32 * kOctets) * Operands::kStep + i % 4 * Operands::kNumbers;
      const int left = head < heads ? channels - channel : 0;
      const std::int64_t at = first + std::int64_t{head} * channels + channel;
      (&pieces[0][0][0])[i] = Operands::load(weights, at, left, whole);
    }
  }
};

// Pieces of two lines of a lane, asked for together. What lies beyond the line is zero.
template <Mode mode>
struct PairPieces {
  uint4 line[kLoadSteps], line_8[kLoadSteps];

  // Of lines that are whole and of the mode's type.
  __device__ __forceinline__ void ask(const Stored& pair, std::int64_t at, std::int64_t at_8,
                                      int channels, int from, int lane) {
    using Operands = PairOperands<mode>;
    const Stored same = {pair.data, Operands::kType};
#pragma unroll
    for (int s = 0; s < kLoadSteps; ++s) {
      const int channel = from + s * Operands::kStep + lane % 4 * Operands::kNumbers;
      line[s] = Operands::load(same, at + channel, channels - channel, true);
      line_8[s] = Operands::load(same, at_8 + channel, channels - channel, true);
    }
  }

  // sum += these times the table's steps from `first` on, of which there are `steps`.
  __device__ __forceinline__ void multiply(const PairTable& table, int first, int steps,
                                           bool second, int lane, float (&sum)[kOctets][4]) const {
    using Operands = PairOperands<mode>;
#pragma unroll
    for (int s = 0; s < kLoadSteps; ++s) {
      if (first + s >= steps) break;
      Operands::multiply(sum[0], line[s], line_8[s], table.pieces[first + s][0][lane]);
      if (second) {
        Operands::multiply(sum[1], line[s], line_8[s], table.pieces[first + s][1][lane]);
      }
    }
  }
};

// sum += the chunk from `from` on of two lines of the lane times the table.
template <Mode mode>
__device__ __forceinline__ void multiply_pairs(const PairTable& table, const Stored& pair,
                                               std::int64_t line, std::int64_t line_8, int channels,
                                               int from, bool whole, bool second, int lane,
                                               float (&sum)[kOctets][4]) {
  using Operands = PairOperands<mode>;
#pragma unroll 1
  for (int first = 0; first < kTableSteps; first += kLoadSteps) {
    if (from + first * Operands::kStep >= channels) break;
    uint4 a[kLoadSteps], a_8[kLoadSteps];
    const int channel = from + first * Operands::kStep + lane % 4 * Operands::kNumbers;
    if (whole && pair.type == Operands::kType) {
#pragma unroll
      for (int s = 0; s < kLoadSteps; ++s) {
        const int at = channel + s * Operands::kStep;
        a[s] = Operands::load({pair.data, Operands::kType}, line + at, channels - at, true);
        a_8[s] = Operands::load({pair.data, Operands::kType}, line_8 + at, channels - at, true);
      }
#pragma unroll
      for (int s = 0; s < kLoadSteps; ++s) {
        Operands::multiply(sum[0], a[s], a_8[s], table.pieces[first + s][0][lane]);
        if (second) Operands::multiply(sum[1], a[s], a_8[s], table.pieces[first + s][1][lane]);
      }
    } else {
#pragma unroll 1
      for (int s = 0; s < kLoadSteps; ++s) {
        const int at = channel + s * Operands::kStep;
        const uint4 x = Operands::load(pair, line + at, channels - at, whole);
        const uint4 x_8 = Operands::load(pair, line_8 + at, channels - at, whole);
        Operands::multiply(sum[0], x, x_8, table.pieces[first + s][0][lane]);
        if (second) Operands::multiply(sum[1], x, x_8, table.pieces[first + s][1][lane]);
      }
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
