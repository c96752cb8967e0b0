// SPDX-License-Identifier: Apache-2.0
// A product of fp32 numbers, which came without bias, to where results belong, with the bias. Bound
// by memory bandwidth.
#pragma once

#include "common/add_bias.h"
#include "common/cuda/sm80/numbers.cuh"

namespace fused_ops {

constexpr int kAddThreads = 256;
constexpr int kAddPieces = 4;  // of a thread

// `numbers` of a piece: 4, or 1 where channels are not a multiple.
template <int numbers>
struct AddBias {
  static constexpr int kBlockPieces = kAddThreads * kAddPieces;

  static __device__ __forceinline__ void run(const AddBiasProblem& p) {
    const int pieces = p.channels / numbers;  // of a row
    const std::int64_t count = p.rows * pieces;
    const std::int64_t first = std::int64_t{blockIdx.x} * kBlockPieces;
    const int first_column = static_cast<int>(first % pieces);
    float products[kAddPieces][numbers];
#pragma unroll
    for (int i = 0; i < kAddPieces; ++i) {
      const std::int64_t at = first + i * kAddThreads + thread_index();
      if (at < count) load(p.product + at * numbers, products[i]);
    }
#pragma unroll
    for (int i = 0; i < kAddPieces; ++i) {
      const int in_block = i * kAddThreads + thread_index();
      if (first + in_block >= count) continue;
      float bias[numbers];
      load(p.bias + (first_column + in_block) % pieces * numbers, bias);
#pragma unroll
      for (int e = 0; e < numbers; ++e) products[i][e] += bias[e];
      store(p.out + (first + in_block) * numbers, products[i]);
    }
  }

  static __device__ __forceinline__ void load(const float* from, float (&to)[numbers]) {
    if constexpr (numbers == 4) {
      load_numbers_as<DType::kFloat32>(from, 0, to);
    } else {
      to[0] = *from;
    }
  }

  static __device__ __forceinline__ void store(float* to, const float (&from)[numbers]) {
    if constexpr (numbers == 4) {
      store_numbers_as<DType::kFloat32>(to, 0, from);
    } else {
      *to = from[0];
    }
  }
};

template <int numbers>
__global__ void __launch_bounds__(kAddThreads)
    add_bias_kernel(const __grid_constant__ AddBiasProblem params) {
  AddBias<numbers>::run(params);
}

}  // namespace fused_ops
