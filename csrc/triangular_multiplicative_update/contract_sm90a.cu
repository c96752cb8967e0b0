// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/contract_sm90a.cuh"

#include <algorithm>

#include "common/launch.h"
#include "common/sanitizers.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

constexpr int kWide = 256;
constexpr int kNarrow = 128;

template <Layout a_layout, Layout b_layout, int kColumns>
void launch_columns(const ContractProblem& problem, CUstream_st* stream) {
  using Kernel = ContractSpecialised<a_layout, b_layout, kColumns>;
  ContractParams params = contract_params(problem, Kernel::kRows, kColumns);
  params.every_thread_arrives = every_thread_arrives();
  if (params.end_tile == 0) return;
  launch("triangular_multiplicative_update: launching contract_sm90a",
         contract_specialised_kernel<a_layout, b_layout, kColumns>,
         static_cast<unsigned>(std::min<std::int64_t>(params.end_tile, multiprocessors())),
         Kernel::kThreads, sizeof(typename Kernel::Shared), stream, params);
}

// Wide tiles unless narrow ones, which take two thirds of their time, are done earlier. Half a wide
// tile is left out where it has no columns.
bool takes_wide_tiles(const ContractProblem& problem) {
  const std::int64_t narrow = contract_params(problem, 128, kNarrow).end_tile;
  const std::int64_t blocks = multiprocessors();
  return problem.sizes.n > kNarrow &&
         ceil_div(narrow, 2 * blocks) * 3 <= ceil_div(narrow, blocks) * 2;
}

template <Layout a_layout, Layout b_layout>
void launch_specialised(const ContractProblem& problem, CUstream_st* stream) {
  if (takes_wide_tiles(problem)) {
    launch_columns<a_layout, b_layout, kWide>(problem, stream);
  } else {
    launch_columns<a_layout, b_layout, kNarrow>(problem, stream);
  }
}

}  // namespace

void contract_sm90a(const ContractProblem& problem, CUstream_st* stream) {
  switch (problem.product) {
    case Product::kNT:
      return launch_specialised<Layout::kAlong, Layout::kAlong>(problem, stream);
    case Product::kNN:
      return launch_specialised<Layout::kAlong, Layout::kAcross>(problem, stream);
    case Product::kTN:
      return launch_specialised<Layout::kAcross, Layout::kAcross>(problem, stream);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
