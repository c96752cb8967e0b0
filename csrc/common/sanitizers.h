// SPDX-License-Identifier: Apache-2.0
// What host code does for tools of compute-sanitizer, which do not see everything.
#pragma once

#include <cstdlib>

namespace fused_ops {

// For racecheck: whether every thread of a warp arrives at barriers, where else one does for all;
// warp_arrives() of common/cuda/sm80/ring.cuh says why.
inline bool every_thread_arrives() {
  static const bool wanted = std::getenv("FUSED_OPS_RACECHECK") != nullptr;
  return wanted;
}

// For initcheck, which does not see what cuBLAS writes by the copy engine: whether its results are
// filled before it writes them.
inline bool fills_products() {
  static const bool wanted = std::getenv("FUSED_OPS_INITCHECK") != nullptr;
  return wanted;
}

}  // namespace fused_ops
