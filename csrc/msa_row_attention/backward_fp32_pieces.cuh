// SPDX-License-Identifier: Apache-2.0
// What the kernels of the backward for fp32 tensors share: their parameters, and products of a
// warp's 16 rows with lines of a head's numbers in shared memory. The order of inner axes and of
// results is that of attend_fp32_sm80.cuh, as are the sums that leave the tensor cores.
#pragma once

#include "msa_row_attention/attend_fp32_operands.cuh"
#include "msa_row_attention/backward_pieces.cuh"

namespace fused_ops::msa_row_attention {

struct BackwardFp32Params : BackwardParams {  // with tensors of fp32 instead of its own
  const float* projected = nullptr;
  const float* bias = nullptr;
  const float* d_attended = nullptr;
  float* d_projected = nullptr;
  // log2(e) / sqrt(dim) is logit_scale, cut off, and this.
  float logit_rest = 0.0f;

  // 2^(logit - log_sum). Infinity times an operand's lo, which is zero or NaN, may have made a NaN
  // of a logit. If it is really NaN or +inf, then all of its query's other statistics are NaN; so
  // it counts as -inf.
  template <Mode mode>
  __device__ __forceinline__ float weight(float logit, float log_sum) const {
    float x = fmaf(logit, logit_scale, -log_sum);
    if (mode == Mode::kSplit) x = fmaf(logit, logit_rest, x);
    return sm80::exp2_approx(fmaxf(x, kLowest));
  }
};

// A head's numbers of positions in global memory.
struct Fp32Rows {
  const float* first;
  unsigned stride;
  int count;
  unsigned dim;

  // Four of a position; zeros where there is no such position or number.
  template <int width>
  __device__ __forceinline__ float4 load(int row, unsigned column) const {
    if (row >= count || !(width == dim || column < dim)) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return *reinterpret_cast<const float4*>(first + std::uint64_t{stride} * row + column);
  }
};

__device__ __forceinline__ float opaque_number(float x) {
  const int bits = static_cast<int>(__float_as_uint(x));
  return __uint_as_float(static_cast<std::uint32_t>(sm80::opaque(bits)));
}

__device__ __forceinline__ float4 opaque_four(const float4& four) {
  return make_float4(opaque_number(four.x), opaque_number(four.y), opaque_number(four.z),
                     opaque_number(four.w));
}

template <Mode mode, int width>
struct Fp32Products {
  using Operands = Fp32Operands<mode, width>;
  static constexpr bool kSplit = Operands::kSplit;
  static constexpr int kPitch = Operands::kPitch;
  static constexpr int kVector = Operands::kVector;
  static constexpr int kGroups = Operands::kGroups;
  static constexpr int kInner = width / 16;  // pairs of steps along a head
  static constexpr int kPieces = width / 4;  // of 16 bytes
  // Of so many threads each has one piece of a line, or none.
  static constexpr int kPieceRoom = kPieces <= 4 ? 4 : kPieces <= 8 ? 8 : kPieces <= 16 ? 16 : 32;

  using Weights = float[2][4];  // 16 rows by 16 lines
  using Sums = float[kGroups * kVector][4];

  struct Left {  // of two steps
    std::uint32_t high[2][4], low[2][4];

    __device__ __forceinline__ void split(const float4& first, const float4& second) {
      const float numbers[2][4] = {{first.x, second.x, first.y, second.y},
                                   {first.z, second.z, first.w, second.w}};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) Operands::split(numbers[i][e], high[i][e], low[i][e]);
      }
    }
  };

  // A warp's 16 rows as left operands: split, as they are, or not at all, as registers allow.
  struct Held {
    static constexpr bool kAsSplit = width <= 32;
    static constexpr bool kAsTheyAre = !kAsSplit && width <= 64;
    Left left[kAsSplit ? kInner : 1];
    float4 numbers[kAsTheyAre ? kInner : 1][2];

    // `row`: the lane's rows of the operand.
    __device__ __forceinline__ void load(const Fp32Rows& rows, const int (&row)[2], int t) {
#pragma unroll
      for (int s = 0; s < kInner; ++s) {
        const float4 first = rows.load<width>(row[0], s * 16 + t * 4);
        const float4 second = rows.load<width>(row[1], s * 16 + t * 4);
        if (kAsSplit) left[kAsSplit ? s : 0].split(first, second);
        if (kAsTheyAre) {
          numbers[kAsTheyAre ? s : 0][0] = first;
          numbers[kAsTheyAre ? s : 0][1] = second;
        }
      }
    }

    __device__ __forceinline__ Left at(int s, const Fp32Rows& rows, const int (&row)[2],
                                       int t) const {
      if (kAsSplit) return left[kAsSplit ? s : 0];
      Left operand;
      if (kAsTheyAre) {
        // Else the compiler splits before the loop, and spills.
        const float4(&two)[2] = numbers[kAsTheyAre ? s : 0];
        operand.split(opaque_four(two[0]), opaque_four(two[1]));
      } else {
        operand.split(rows.load<width>(row[0], s * 16 + t * 4),
                      rows.load<width>(row[1], s * 16 + t * 4));
      }
      return operand;
    }
  };

  // sum = left * lines^T, of eight lines and 16 numbers of a head. Logits are bit for bit those of
  // attend_fp32, else the weights, whose sums it took, would not add up to one: the same numbers
  // are multiplied in the same order.
  template <bool transposed>
  static __device__ __forceinline__ void multiply_eight(float (&sum)[4], const Left& left,
                                                        const unsigned char* lines, int j, int s,
                                                        int g, int t) {
    float numbers[4];
    Operands::load_key(lines, j, s, g, t, numbers);
    std::uint32_t high[2][2], low[2][2];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      Operands::split(numbers[c], high[c / 2][c % 2], low[c / 2][c % 2]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = 0.0f;
    if (kSplit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (transposed) sm80::mma_tf32(sum, left.high[i], low[i]);
        sm80::mma_tf32(sum, left.low[i], high[i]);
        if (!transposed) sm80::mma_tf32(sum, left.high[i], low[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sm80::mma_tf32(sum, left.high[i], high[i]);
  }

  // weights = rows * lines^T, with `left(s)` the rows' numbers 16s to 16s + 15.
  template <bool transposed, class LeftOf>
  static __device__ __forceinline__ void multiply(Weights& weights, LeftOf left,
                                                  const unsigned char* lines, int g, int t) {
#pragma unroll
    for (int s = 0; s < kInner; ++s) {
      const Left rows = left(s);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float sum[4];
        multiply_eight<transposed>(sum, rows, lines, j, s, g, t);
#pragma unroll
        for (int e = 0; e < 4; ++e) weights[j][e] = s == 0 ? sum[e] : weights[j][e] + sum[e];
      }
      __syncwarp();  // else the compiler reads far ahead, and spills
    }
  }

  // sum += left * right of two steps, the small terms first.
  static __device__ __forceinline__ void multiply_two(float (&sum)[4],
                                                      const std::uint32_t (&left)[2][4],
                                                      const std::uint32_t (&left_low)[2][4],
                                                      const std::uint32_t (&right)[2][2],
                                                      const std::uint32_t (&right_low)[2][2]) {
    if (kSplit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sm80::mma_tf32(sum, left_low[i], right[i]);
        sm80::mma_tf32(sum, left[i], right_low[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sm80::mma_tf32(sum, left[i], right[i]);
  }

  // sums += weights * lines, of 16 lines. Tensor cores cut off what they add up: where all weights
  // have `one_sign`, these errors have too, and sums leave the tensor cores after 8 lines, not 16.
  template <bool one_sign>
  static __device__ __forceinline__ void add(Sums& sums, const Weights& weights,
                                             const unsigned char* lines, int g, int t) {
    std::uint32_t left[2][4], left_low[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
        Operands::split(weights[i][e % 2 * 2 + e / 2], left[i][e], left_low[i][e]);
      }
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float numbers[2][2][kVector];
      Operands::load_values(lines, j, g, t, numbers);
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        std::uint32_t high[2][2], low[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int k = 0; k < 2; ++k) Operands::split(numbers[i][k][c], high[i][k], low[i][k]);
        }
        float sum[2][4] = {};
        if (one_sign && kSplit) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            Operands::multiply(sum[i], left[i], left_low[i], high[i], low[i]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[0][e] += sum[1][e];
        } else {
          multiply_two(sum[0], left, left_low, high, low);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[j * kVector + c][e] += sum[0][e];
      }
      __syncwarp();
    }
  }

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int j = 0; j < kGroups * kVector; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
    }
  }

  // sums * scale to the lane's row of half `h` of the operand; zeros if it is not `here`.
  static __device__ __forceinline__ void store(float* line, const Sums& sums, int h, float scale,
                                               bool here, unsigned dim, int t) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 2 * kVector; c += 4) {
        const unsigned column = j * (8 * kVector) + t * (2 * kVector) + c;
        if (!(width == dim || column < dim)) continue;
        float four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = c + e;
          const float x = sums[j * kVector + i % kVector][2 * h + i / kVector];
          four[e] = here ? x * scale : 0.0f;
        }
        *reinterpret_cast<float4*>(line + column) = make_float4(four[0], four[1], four[2], four[3]);
      }
    }
  }

  // Asks for `lines` lines, 64 at most, by `threads` threads, of which this is number `thread`;
  // zeros for those without a bit in `here`. `first` is line 0.
  template <int threads, int lines>
  static __device__ __forceinline__ void copy(unsigned char* to, const float* first,
                                              unsigned stride, unsigned dim, unsigned thread,
                                              std::uint64_t here) {
    constexpr int kLineStep = threads / kPieceRoom;
    static_assert(lines % kLineStep == 0 && lines <= 64);
    const int piece = static_cast<int>(thread % kPieceRoom);
    const int line = static_cast<int>(thread / kPieceRoom);
    if (piece >= kPieces) return;
    const bool inside = width == dim || piece * 4u < dim;
    const float* from = first + std::uint64_t{stride} * line + piece * 4;
    here = inside ? here >> line : 0;
#pragma unroll
    for (int i = 0; i < lines; i += kLineStep) {
      sm80::cp_async_16(to + Operands::piece_at(line + i, piece), from, here >> i & 1 ? 16 : 0);
      from += std::uint64_t{stride} * kLineStep;
    }
  }

  // The first `count` lines, if there are as many.
  static __device__ __forceinline__ std::uint64_t first_lines(int count) {
    return count >= 64 ? ~std::uint64_t{0} : ~(~std::uint64_t{0} << count);
  }
};

}  // namespace fused_ops::msa_row_attention
