// SPDX-License-Identifier: Apache-2.0
// out = product + bias, of (rows, channels) and (channels). For fp32, whose products come from
// elsewhere and without bias. Plain data.
#pragma once

#include <cstdint>

// cudaStream_t, without CUDA's headers.
struct CUstream_st;

namespace fused_ops {

struct AddBiasProblem {
  std::int64_t rows = 0;
  int channels = 0;
  const float* product = nullptr;
  const float* bias = nullptr;
  float* out = nullptr;
};

void add_bias_sm80(const AddBiasProblem& problem, CUstream_st* stream);

}  // namespace fused_ops
