// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/plan.h"

namespace fused_ops::triangular_multiplicative_update {

Plan plan() {
  return composition("fused-ops " + build_info().version +
                     " has no CUDA kernel for triangular_multiplicative_update yet");
}

namespace {

Plan answer(const Query& query) {
  query.shape("pair", 3);
  return query.device ? plan() : composition("CPU tensors");
}

const Registration registration("triangular_multiplicative_update", &answer);

}  // namespace
}  // namespace fused_ops::triangular_multiplicative_update
