// SPDX-License-Identifier: Apache-2.0
// Gradients of the pair tensor and of the bias projection, 16-bit products. Bound by bandwidth.
//
// Of 16 keys a warp takes dS (heads x keys) twice from shared memory: turned, it is the
// left operand for the gradient (keys x channels), whose right operand, the weight, stays in
// registers; as it is, that for the sums (heads x channels), whose right operand is the pair
// tensor. The sums stay in registers over all tiles of a block.
#pragma once

#include <cstdint>

#include "invariant_point_attention/pair_backward_pieces.cuh"

namespace fused_ops::invariant_point_attention {

template <Mode mode>
struct PairBackward : PairBackwardBlock<type_of(mode)> {
  using Base = PairBackwardBlock<type_of(mode)>;
  static constexpr DType kType = type_of(mode);
  static constexpr int kKeys = Base::kPairKeys;
  static constexpr int kStep = 32;  // keys whose gradient is under way at once
  using Gradient = float[kStep / 16][4][4];

  static __device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4],
                                                  const std::uint32_t (&b)[2]) {
    mode == Mode::kBFloat16 ? sm80::mma_bf16(d, a, b) : sm80::mma_f16(d, a, b);
  }

  std::uint32_t bias[4][2];      // weight, as right operands of four tiles of channels
  std::uint32_t features[4][2];  // the query's d_features, likewise
  float sum[4][4];
  float alone[4];

  __device__ __forceinline__ explicit PairBackward(const PairBackwardParams& params)
      : Base{params, thread_index()}, bias{}, features{}, sum{}, alone{} {}

  // `number(head, channel)`.
  template <class Number>
  __device__ __forceinline__ void load_operand(std::uint32_t (&to)[4][2], Number number) const {
    const int head = 2 * this->t();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int channel = this->channel_of(j, this->g());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[j][half] =
            pack_two<kType>(number(head + half * 8, channel), number(head + half * 8 + 1, channel));
      }
    }
  }

  __device__ __forceinline__ void take(const PairTile& tile, int stage, bool new_query) {
    const PairBackwardProblem& problem = this->p.problem;
    if (this->channels_left() <= 0) return;
    if (problem.d_features && new_query) {
      load_operand(features,
                   [&](int head, int channel) { return this->d_feature(tile, head, channel); });
    }
    if (problem.sums) add_sums(stage);
    if (!problem.grad) return;
    const int first_key = tile.key_tile * kKeys;
#pragma unroll 1
    for (int keys = 0; keys < kKeys && first_key + keys < this->p.n; keys += kStep) {
      Gradient grad = {};
      if (problem.d_logits) add_bias(stage, keys, grad);
      if (problem.d_features) add_features(stage, keys, grad);
#pragma unroll
      for (int i = 0; i < kStep / 16; ++i) this->store(tile, first_key + keys + i * 16, grad[i]);
    }
  }

  // The tensor cores cut sums off: those of a tile are added to the others by fp32 units.
  __device__ __forceinline__ void add_sums(int stage) {
    const int lane = this->lane();
    const std::uint32_t one = pack_two<kType>(1.0f, 1.0f);
    const std::uint32_t ones[2] = {one, one};
    float now[4][4] = {};
    float now_alone[4] = {};
#pragma unroll
    for (int keys = 0; keys < kKeys; keys += 16) {
      std::uint32_t scores[4];
      const int score_at = Base::score_piece(lane % 16, keys / 8 + lane / 16);
      sm80::ldmatrix_x4(scores, sm80::shared_address(this->scores(stage) + score_at));
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        std::uint32_t four[4];
        const int pair_at = Base::pair_piece(keys + lane % 16, j + lane / 16);
        sm80::ldmatrix_x4_trans(four, sm80::shared_address(this->pairs(stage) + pair_at));
        const std::uint32_t first[2] = {four[0], four[1]}, second[2] = {four[2], four[3]};
        multiply(now[j], scores, first);
        multiply(now[j + 1], scores, second);
      }
      // All warps, for it costs less than a branch.
      multiply(now_alone, scores, ones);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j][e] += now[j][e];
      alone[e] += now_alone[e];
    }
  }

  __device__ __forceinline__ void add_bias(int stage, int keys, Gradient& grad) const {
    const int head = this->lane() / 16 * 8 + this->lane() % 8;
    const int piece = keys / 8 + this->lane() / 8 % 2;
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i) {
      std::uint32_t scores[4];
      const int at = Base::score_piece(head, piece + i * 2);
      sm80::ldmatrix_x4_trans(scores, sm80::shared_address(this->scores(stage) + at));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        multiply(grad[i][j], scores, bias[j]);
#pragma unroll
        for (float& number : grad[i][j]) number *= this->p.problem.bias_scale;
      }
    }
  }

  __device__ __forceinline__ void add_features(int stage, int keys, Gradient& grad) const {
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i) {
      std::uint32_t weights[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int key = keys + i * 16 + this->g() + w % 2 * 8;
        const int head = this->t() * 2 + w / 2 * 8;
        weights[w] =
            pack_two<kType>(this->weight(stage, head, key), this->weight(stage, head + 1, key));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply(grad[i][j], weights, features[j]);
    }
  }

  __device__ __forceinline__ void run() {
    const PairBackwardProblem& problem = this->p.problem;
    if (problem.d_logits && problem.grad) {
      load_operand(bias, [&](int head, int channel) { return this->bias_weight(head, channel); });
    }
    walk_pairs(*this, [&](const PairTile& tile, int stage, bool new_query) {
      take(tile, stage, new_query);
    });
    if (problem.sums) this->store_sums(sum, alone);
  }
};

template <Mode mode>
__global__ void __launch_bounds__(kPairMostWarps * 32, 3)
    pair_backward_kernel(const __grid_constant__ PairBackwardParams params) {
  PairBackward<mode>(params).run();
}

}  // namespace fused_ops::invariant_point_attention
