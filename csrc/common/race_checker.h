// SPDX-License-Identifier: Apache-2.0
// What launchers do for compute-sanitizer's racecheck.
#pragma once

#include <cstdlib>

namespace fused_ops {

// Whether every thread of a warp arrives at barriers, where else one does for all: warp_arrives()
// of common/cuda/sm80/ring.cuh says why.
inline bool every_thread_arrives() {
  static const bool wanted = std::getenv("FUSED_OPS_RACECHECK") != nullptr;
  return wanted;
}

}  // namespace fused_ops
