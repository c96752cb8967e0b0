// SPDX-License-Identifier: Apache-2.0
// Gradients of the pair tensor and of the bias projection for fp32 tensors, with TF32 products:
// one, or three of halves of the numbers. As pair_backward_sm80.cuh says, with tiles of half the
// keys.
#pragma once

#include <cstdint>

#include "invariant_point_attention/pair_backward_pieces.cuh"

namespace fused_ops::invariant_point_attention {

// An operand: what TF32 has of the numbers, and what that leaves.
template <int kNumbers>
struct Tf32Operand {
  std::uint32_t high[kNumbers];
  std::uint32_t low[kNumbers];

  // To the nearest. What is not finite shows in at least one of both.
  __device__ __forceinline__ void split(int i, float x) {
    high[i] = (__float_as_uint(x) + 0x1000u) & ~0x1fffu;
    low[i] = __float_as_uint(x - __uint_as_float(high[i]));
  }
  // For one product. The tensor cores cut 13 bits off; a third of the last one that stays, added
  // before, makes that nearly rounding, and leaves infinities and NaN what they are.
  __device__ __forceinline__ void round(int i, float x) {
    high[i] = __float_as_uint(x * (1.0f + 1.0f / 3072.0f));
    low[i] = 0;
  }
  template <Mode mode>
  __device__ __forceinline__ void set(int i, float x) {
    mode == Mode::kSplit ? split(i, x) : round(i, x);
  }
};

template <Mode mode>
struct PairBackwardFp32 : PairBackwardBlock<DType::kFloat32> {
  using Base = PairBackwardBlock<DType::kFloat32>;
  static constexpr int kKeys = Base::kPairKeys;
  using Left = Tf32Operand<4>;
  using Right = Tf32Operand<2>;

  // d += a * b, the small terms first.
  static __device__ __forceinline__ void multiply(float (&d)[4], const Left& a, const Right& b) {
    if (mode == Mode::kSplit) multiply_small(d, a, b);
    sm80::mma_tf32(d, a.high, b.high);
  }
  static __device__ __forceinline__ void multiply_small(float (&d)[4], const Left& a,
                                                        const Right& b) {
    sm80::mma_tf32(d, a.low, b.high);
    sm80::mma_tf32(d, a.high, b.low);
  }

  Right bias[2][4];      // of eight heads each: weight, of four tiles of channels
  Right features[2][4];  // the query's d_features, likewise
  float sum[4][4];
  float alone[4];

  __device__ __forceinline__ explicit PairBackwardFp32(const PairBackwardParams& params)
      : Base{params, thread_index()}, bias{}, features{}, sum{}, alone{} {}

  // `number(head, channel)`.
  template <class Number>
  __device__ __forceinline__ void load_operand(Right (&to)[2][4], Number number) const {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          to[s][j].template set<mode>(i, number(s * 8 + i * 4 + t(), channel_of(j, g())));
        }
      }
    }
  }

  __device__ __forceinline__ void take(const PairTile& tile, int stage, bool new_query) {
    const PairBackwardProblem& problem = p.problem;
    if (channels_left() <= 0) return;
    if (problem.d_features && new_query) {
      load_operand(features, [&](int head, int channel) { return d_feature(tile, head, channel); });
    }
    const int first_key = tile.key_tile * kKeys;
    // The tensor cores cut sums off: those of a tile are added to the others by fp32 units.
    float now[4][4] = {};
    float now_alone[4] = {};
#pragma unroll 1
    for (int keys = 0; keys < kKeys && first_key + keys < p.n; keys += 16) {
      if (problem.sums) {
        add_sums(stage, keys, now, now_alone);
        add_sums(stage, keys + 8, now, now_alone);
      }
      if (!problem.grad) continue;
      float grad[4][4] = {};
      if (problem.d_logits) {
        multiply_all(
            grad, 0.0f, bias, [&](int head, int key) { return score(stage, head, key); }, keys);
      }
      if (problem.d_features) {
        multiply_all(
            grad, problem.bias_scale, features,
            [&](int head, int key) { return weight(stage, head, key); }, keys);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (float& number : grad[j]) number *= problem.bias_scale;
        }
      }
      store(tile, first_key + keys, grad);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j][e] += now[j][e];
      alone[e] += now_alone[e];
    }
  }

  __device__ __forceinline__ float score(int stage, int head, int key) const {
    const int at = score_piece(head, key >> 2) + (key & 3) * 4;
    return *reinterpret_cast<const float*>(scores(stage) + at);
  }

  // Of eight keys.
  __device__ __forceinline__ void add_sums(int stage, int keys, float (&now)[4][4],
                                           float (&now_alone)[4]) const {
    Left left;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left.template set<mode>(i, score(stage, g() + i % 2 * 8, keys + t() + i / 2 * 4));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Right right;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = j * 8 + g();
        const int at = pair_piece(keys + t() + i * 4, channel >> 2) + (channel & 3) * 4;
        right.template set<mode>(i, *reinterpret_cast<const float*>(pairs(stage) + at));
      }
      multiply(now[j], left, right);
    }
    if (first_channel() == 0) {
      // A plain sum has fp32's accuracy in both modes; 1 has no low half.
      Left exact;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        exact.split(i, score(stage, g() + i % 2 * 8, keys + t() + i / 2 * 4));
      }
      const std::uint32_t one = __float_as_uint(1.0f);
      const std::uint32_t ones[2] = {one, one};
      sm80::mma_tf32(now_alone, exact.low, ones);
      sm80::mma_tf32(now_alone, exact.high, ones);
    }
  }

  // grad = before * grad + the product of `number(head, key)`, of 16 keys, with a right operand.
  template <class Number>
  __device__ __forceinline__ void multiply_all(float (&grad)[4][4], float before,
                                               const Right (&right)[2][4], Number number,
                                               int keys) const {
    Left left[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        left[s].template set<mode>(i, number(s * 8 + i / 2 * 4 + t(), keys + g() + i % 2 * 8));
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float product[4] = {};
      if (mode == Mode::kSplit) {
#pragma unroll
        for (int s = 0; s < 2; ++s) multiply_small(product, left[s], right[s][j]);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) sm80::mma_tf32(product, left[s].high, right[s][j].high);
#pragma unroll
      for (int e = 0; e < 4; ++e) grad[j][e] = fmaf(before, grad[j][e], product[e]);
    }
  }

  __device__ __forceinline__ void run() {
    if (p.problem.d_logits && p.problem.grad) {
      load_operand(bias, [&](int head, int channel) { return bias_weight(head, channel); });
    }
    walk_pairs(*this, [&](const PairTile& tile, int stage, bool new_query) {
      take(tile, stage, new_query);
    });
    if (p.problem.sums) store_sums(sum, alone);
  }
};

template <Mode mode>
__global__ void __launch_bounds__(kPairMostWarps * 32, 2)
    pair_backward_fp32_kernel(const __grid_constant__ PairBackwardParams params) {
  PairBackwardFp32<mode>(params).run();
}

}  // namespace fused_ops::invariant_point_attention
