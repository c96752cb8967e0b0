// SPDX-License-Identifier: Apache-2.0
#include "common/cuda/sm80/add_bias.cuh"

#include <cstdint>
#include <limits>

#include "common/launch.h"

namespace fused_ops {
namespace {

constexpr const char* kAdd = "launching add_bias_sm80";

template <int numbers>
void run_add(const AddBiasProblem& problem, CUstream_st* stream) {
  const std::int64_t blocks =
      ceil_div(problem.rows * (problem.channels / numbers), AddBias<numbers>::kBlockPieces);
  FO_CHECK_RUNTIME(blocks <= std::numeric_limits<int>::max(), kAdd,
                   " must be given less at a time");
  launch(kAdd, add_bias_kernel<numbers>, static_cast<unsigned>(blocks), kAddThreads, 0, stream,
         problem);
}

}  // namespace

void add_bias_sm80(const AddBiasProblem& problem, CUstream_st* stream) {
  if (problem.rows == 0 || problem.channels == 0) return;
  const auto is_aligned = [](const float* data) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  };
  const bool fits = problem.channels % 4 == 0 && is_aligned(problem.product) &&
                    is_aligned(problem.bias) && is_aligned(problem.out);
  fits ? run_add<4>(problem, stream) : run_add<1>(problem, stream);
}

}  // namespace fused_ops
