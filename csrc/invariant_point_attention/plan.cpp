// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/plan.h"

namespace fused_ops::invariant_point_attention {

Plan plan() {
  return composition("fused-ops " + build_info().version +
                     " has no CUDA kernel for invariant_point_attention yet");
}

namespace {

Plan answer(const Query& query) {
  query.shape("node", 2);
  query.shape("pair", 3);
  return query.device ? plan() : composition("CPU tensors");
}

const Registration registration("invariant_point_attention", &answer);

}  // namespace
}  // namespace fused_ops::invariant_point_attention
