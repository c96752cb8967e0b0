// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/contract_sm80.cuh"

#include <algorithm>

#include "common/launch.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

// Sides of tiles, and blocks a multiprocessor that registers are limited for.
constexpr int kLargeSide = 128;  // 128 sums a thread: 255 registers, two blocks
constexpr int kSmallSide = 64;
constexpr int kLargeBlocks = 2;
constexpr int kSmallBlocks = 4;
constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;  // of a launch

// Three, unless only two let as many blocks as the registers allow live on a multiprocessor.
template <class Kernel>
int choose_stages(int blocks) {
  const std::size_t shared = shared_bytes_of_multiprocessor();
  const auto fits = [&](int stages) {
    return blocks * (stages * sizeof(typename Kernel::Stage) + 1024) <= shared;
  };
  return !fits(3) && fits(2) ? 2 : 3;
}

template <Layout a_layout, Layout b_layout, int kSide, int kMinBlocks>
void launch_tiles(const ContractProblem& problem, CUstream_st* stream, int stages = 0) {
  using Kernel = Contract<a_layout, b_layout, kSide>;
  ContractParams params = contract_params(problem, kSide, kSide);
  params.stages = stages != 0 ? stages : choose_stages<Kernel>(kMinBlocks);
  for (; params.first_tile < params.end_tile; params.first_tile += kMostBlocks) {
    launch("triangular_multiplicative_update: launching contract_sm80",
           contract_kernel<a_layout, b_layout, kSide, kMinBlocks>,
           static_cast<unsigned>(std::min(params.end_tile - params.first_tile, kMostBlocks)),
           Kernel::kThreads, params.stages * sizeof(typename Kernel::Stage), stream, params);
  }
}

// Small tiles where large ones would be half empty or would not fill the GPU.
bool takes_small_tiles(const ContractProblem& problem) {
  const std::int64_t large = ceil_div(problem.sizes.n, kLargeSide);
  const std::int64_t small = ceil_div(problem.sizes.n, kSmallSide);
  const std::int64_t blocks = problem.channels * problem.sizes.batch * large * large;
  return small * small * 5 <= large * large * 4 * 3 || blocks < kLargeBlocks * multiprocessors();
}

template <Layout a_layout, Layout b_layout>
void launch_product(const ContractProblem& problem, CUstream_st* stream) {
  if (takes_small_tiles(problem)) {
    launch_tiles<a_layout, b_layout, kSmallSide, kSmallBlocks>(problem, stream);
  } else {
    launch_tiles<a_layout, b_layout, kLargeSide, kLargeBlocks>(problem, stream);
  }
}

}  // namespace

void contract_sm80(const ContractProblem& problem, CUstream_st* stream) {
  switch (problem.product) {
    case Product::kNT:
      return launch_product<Layout::kAlong, Layout::kAlong>(problem, stream);
    case Product::kNN:
      return launch_product<Layout::kAlong, Layout::kAcross>(problem, stream);
    case Product::kTN:
      return launch_product<Layout::kAcross, Layout::kAcross>(problem, stream);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
