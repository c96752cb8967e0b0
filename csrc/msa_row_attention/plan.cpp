// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/plan.h"

namespace fused_ops::msa_row_attention {

Plan plan() {
  return composition("fused-ops " + build_info().version +
                     " has no CUDA kernel for msa_row_attention yet");
}

namespace {

Plan answer(const Query& query) {
  query.shape("msa", 3);
  query.shape("pair", 3);
  return query.device ? plan() : composition("CPU tensors");
}

const Registration registration("msa_row_attention", &answer);

}  // namespace
}  // namespace fused_ops::msa_row_attention
