// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/dropout_keys_sm80.cuh"

#include <limits>

#include "common/launch.h"

namespace fused_ops::msa_row_attention {

void dropout_keys_sm80(const DropoutKeysProblem& problem, CUstream_st* stream) {
  constexpr const char* kKeysOf = "msa_row_attention: launching dropout_keys_sm80";
  DropoutKeysParams p;
  p.seed = problem.seed;
  p.first_map = static_cast<std::uint64_t>(problem.first_row * problem.heads);
  p.count = problem.rows * problem.heads * problem.n;
  p.n = static_cast<unsigned>(problem.n);
  p.keys = problem.keys;
  if (p.count == 0) return;
  const std::int64_t blocks = ceil_div(p.count, kDropoutKeysThreads);
  FO_CHECK_RUNTIME(blocks < std::numeric_limits<int>::max(), kKeysOf,
                   " must be given less at a time");
  launch(kKeysOf, dropout_keys_kernel, static_cast<unsigned>(blocks), kDropoutKeysThreads, 0,
         stream, p);
}

}  // namespace fused_ops::msa_row_attention
