// SPDX-License-Identifier: Apache-2.0
// How rows of results leave a block.
#pragma once

#include "common/cuda/sm80/quad.cuh"
#include "triangular_multiplicative_update/tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

// The first `count` of eight 16-bit numbers, zeros for the others.
__device__ __forceinline__ uint4 first_of_eight(const uint4& eight, int count) {
  const auto keep = [count](std::uint32_t word, int at) {
    return count >= at + 2 ? word : count == at + 1 ? word & 0xffffu : 0u;
  };
  return make_uint4(keep(eight.x, 0), keep(eight.y, 2), keep(eight.z, 4), keep(eight.w, 6));
}

// Over the eight lanes that hold the same columns of different rows.
__device__ __forceinline__ float over_rows(float x) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
  return x;
}

// Eight 16-bit numbers, `count` of which exist, to element `at` of a matrix.
__device__ __forceinline__ void store_words(void* matrix, std::int64_t at,
                                            const std::uint32_t (&word)[4], int count,
                                            bool aligned) {
  auto* to = static_cast<std::uint16_t*>(matrix) + at;
  if (aligned && count >= 8) {
    sm80::store_global_16(to, make_uint4(word[0], word[1], word[2], word[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) to[i] = static_cast<std::uint16_t>(word[i / 2] >> 16 * (i % 2));
  }
}

__device__ __forceinline__ void store_floats(void* matrix, std::int64_t at,
                                             const float (&number)[8], int count, bool aligned) {
  auto* to = static_cast<float*>(matrix) + at;
  if (aligned && count >= 8) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      sm80::store_global_16(
          to + i, make_uint4(__float_as_uint(number[i]), __float_as_uint(number[i + 1]),
                             __float_as_uint(number[i + 2]), __float_as_uint(number[i + 3])));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) to[i] = number[i];
  }
}

// Four lanes hold two neighbouring numbers of each of four tiles of eight, of one row. Lane t
// stores tile t at element `at`, as far as it exists, in the mode's type. All lanes of the warp
// call it.
template <Mode mode>
__device__ __forceinline__ void store_quad(const float (&number)[4][2], void* matrix,
                                           std::int64_t at, int count, bool aligned, int lane) {
  std::uint32_t word[4];
  if constexpr (is_wide(mode)) {
    float eight[8];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = __float_as_uint(number[i][x]);
      turn_quad(word, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) eight[2 * i + x] = __uint_as_float(word[i]);
    }
    store_floats(matrix, at, eight, count, aligned);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = pack_16<mode>(number[i][0], number[i][1]);
    turn_quad(word, lane);
    store_words(matrix, at, word, count, aligned);
  }
}

// A block's rows, from the operand of its products, to rows first_row on of a matrix of `count`
// rows, in the mode's type. `undo` takes back the scale of a row.
template <Mode mode, class Shape, bool kWhole, class Undo>
__device__ __forceinline__ void store_operand_as(const unsigned char* operand, int channels,
                                                 std::int64_t first_row, std::int64_t count,
                                                 void* matrix, int thread, Undo undo) {
  const int eights = kWhole ? Shape::kInnerMost / 8 : (channels + 7) / 8;
  for (int at = thread; at < Shape::kRows * eights; at += kThreads) {
    const int row = at / eights, eight = at % eights;
    if (first_row + row >= count) continue;
    const unsigned char* from = operand + eight / 8 * parts(mode) * Shape::kRows * kLineBytes +
                                sm80::split_offset(row, eight % 8);
    const uint4 hi = *reinterpret_cast<const uint4*>(from);
    const std::uint32_t word[4] = {hi.x, hi.y, hi.z, hi.w};
    const std::int64_t to = (first_row + row) * channels + eight * 8;
    const bool aligned = kWhole || channels % 8 == 0;
    if constexpr (is_wide(mode)) {
      std::uint32_t low[4] = {};
      if (mode == Mode::kSplit) {
        const uint4 lo = *reinterpret_cast<const uint4*>(from + Shape::kRows * kLineBytes);
        low[0] = lo.x, low[1] = lo.y, low[2] = lo.z, low[3] = lo.w;
      }
      const float scale = undo(row);
      float number[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 big = sm80::unpack_f16(word[i]), small = sm80::unpack_f16(low[i]);
        number[2 * i] = (big.x + small.x) * scale;
        number[2 * i + 1] = (big.y + small.y) * scale;
      }
      store_floats(matrix, to, number, channels - eight * 8, aligned);
    } else {
      store_words(matrix, to, word, channels - eight * 8, aligned);
    }
  }
}

template <Mode mode, class Shape, class Undo>
__device__ __forceinline__ void store_operand(const unsigned char* operand, int channels,
                                              std::int64_t first_row, std::int64_t count,
                                              void* matrix, int thread, Undo undo) {
  if (channels == Shape::kInnerMost) {  // no divisions
    store_operand_as<mode, Shape, true>(operand, channels, first_row, count, matrix, thread, undo);
  } else {
    store_operand_as<mode, Shape, false>(operand, channels, first_row, count, matrix, thread, undo);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
