// SPDX-License-Identifier: Apache-2.0
// What the parts of the backward's host op share: the call, and the gradients that are wanted.
#pragma once

#include "common/gradients.h"
#include "common/launch.h"
#include "msa_row_attention/call.h"

namespace fused_ops::msa_row_attention {

// The differentiable ones, in the order of the op's `needs`.
enum Input {
  kMsa,
  kPair,
  kNormWeight,
  kNormBias,
  kQueryWeight,
  kKeyWeight,
  kValueWeight,
  kGateWeight,
  kGateBias,
  kPairNormWeight,
  kPairNormBias,
  kPairBiasWeight,
  kOutWeight,
  kOutBias,
  kInputs
};
using Inputs = MaybeTensor[kInputs];

class BackwardCall : public Gradients {
 public:
  BackwardCall(const Call& call_of_op, const Inputs& inputs, const std::vector<bool>& wanted)
      : Gradients(call_of_op.msa, call_of_op.type(), call_of_op.precision, inputs, wanted),
        call(call_of_op),
        sizes(call_of_op.sizes()) {}

  bool needs_pair_norm() const { return needs_any({kPairNormWeight, kPairNormBias}); }
  bool needs_pair() const { return needs(kPair) || needs(kPairBiasWeight) || needs_pair_norm(); }

  const Call& call;
  const Sizes& sizes;
};

}  // namespace fused_ops::msa_row_attention
