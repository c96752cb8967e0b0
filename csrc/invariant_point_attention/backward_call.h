// SPDX-License-Identifier: Apache-2.0
// What the parts of the backward's host op share: the wanted gradients, and where they come from.
#pragma once

#include <algorithm>
#include <vector>

#include "common/gradients.h"
#include "invariant_point_attention/stages.h"

namespace fused_ops::invariant_point_attention {

// The differentiable ones, in the order of the op's `needs`.
enum Input {
  kNode,
  kPair,
  kTranslations,
  kRotations,
  kPairValue,
  kNormWeight,
  kNormBias,
  kQWeight,
  kQBias,
  kKWeight,
  kKBias,
  kVWeight,
  kVBias,
  kQPointsWeight,
  kQPointsBias,
  kKPointsWeight,
  kKPointsBias,
  kVPointsWeight,
  kVPointsBias,
  kPairBiasWeight,
  kPairBiasBias,
  kHeadWeights,
  kOutWeight,
  kOutBias,
  kInputs
};

// What they are the gradients of. Those of frames come in fp32 for each batch element; the caller
// reduces them to what they belong to.
struct Differentiable {
  MaybeTensor inputs[kInputs];

  Differentiable(const Call& call, const std::vector<bool>& needs) {
    FO_CHECK_VALUE(needs.size() == kInputs, kOp, ": needs must have ", int{kInputs},
                   " entries, got ", needs.size());
    const Inputs& in = call.inputs;
    const MaybeTensor all[kInputs] = {in.node,
                                      in.pair,
                                      in.translations,
                                      in.rotations,
                                      in.pair_value,
                                      in.layer_norm_weight,
                                      in.layer_norm_bias,
                                      in.q_proj_weight,
                                      in.q_proj_bias,
                                      in.k_proj_weight,
                                      in.k_proj_bias,
                                      in.v_proj_weight,
                                      in.v_proj_bias,
                                      in.q_pts_weight,
                                      in.q_pts_bias,
                                      in.k_pts_weight,
                                      in.k_pts_bias,
                                      in.v_pts_weight,
                                      in.v_pts_bias,
                                      in.pair_bias_weight,
                                      in.pair_bias_bias,
                                      in.head_weights,
                                      in.out_proj_weight,
                                      in.out_proj_bias};
    const std::int64_t n = call.sizes().n;
    for (int i = 0; i < kInputs; ++i) {
      if (!needs[static_cast<std::size_t>(i)]) continue;
      FO_CHECK_VALUE(all[i].has_value(), kOp, ": an argument that is None has no gradient");
      inputs[i] = all[i];
      if (i == kTranslations) inputs[i] = empty(in.node, call.lead.with({n, 3}), ScalarType::Float);
      if (i == kRotations) {
        inputs[i] = empty(in.node, call.lead.with({n, 3, 3}), ScalarType::Float);
      }
    }
  }
};

// The gradient of a pair tensor, contiguous. Where batch elements share it, it is a sum: then they
// are taken one by one, and what is 16-bit is summed up in fp32 first.
class PairGradient {
 public:
  PairGradient(const Call& call, const Tensor& source, const MaybeTensor& grad)
      : call_(call), grad_(grad) {
    if (!grad) return;
    const auto& lead = call.lead.sizes;
    elements_ = 1;
    for (std::int64_t i = 0; i + 3 < source.dim(); ++i) elements_ *= source.size(i);
    shared_ = elements_ != call.lead.batch;
    element_size_ = source.size(-1) * source.size(-2) * source.size(-3);
    type_ = dtype_of(source.scalar_type());
    if (!shared_) return;
    // Strides, in elements, of the source's leading axes.
    steps_.assign(lead.size(), 0);
    std::int64_t step = 1;
    for (std::int64_t i = source.dim() - 4, axis = static_cast<std::int64_t>(lead.size()) - 1;
         i >= 0; --i, --axis) {
      if (source.size(i) != 1) steps_[static_cast<std::size_t>(axis)] = step;
      step *= source.size(i);
    }
    seen_.assign(static_cast<std::size_t>(elements_), {});
    if (type_ != DType::kFloat32) {
      const auto shape = source.sizes();
      sum_ = empty(source, {shape.begin(), shape.end()}, ScalarType::Float);
      type_ = DType::kFloat32;
    }
  }

  bool wanted() const { return grad_.has_value(); }
  bool is_shared() const { return shared_; }
  DType type() const { return type_; }

  // Where the gradient of batch elements from `batch` on is.
  void* data(std::int64_t batch) const {
    const Tensor& to = sum_ ? *sum_ : *grad_;
    return further(to.mutable_data_ptr(), type_, element(batch) * element_size_);
  }

  // Whether these rows of the element have a sum already; from now on they have.
  bool accumulates(std::int64_t batch, std::int64_t row) {
    if (!shared_) return false;
    std::vector<std::int64_t>& rows = seen_[static_cast<std::size_t>(element(batch))];
    if (std::find(rows.begin(), rows.end(), row) != rows.end()) return true;
    rows.push_back(row);
    return false;
  }

  void finish() const {
    if (sum_) call_operator("aten::copy_", *grad_, *sum_, false);
  }

 private:
  std::int64_t element(std::int64_t batch) const {
    if (!shared_) return batch;
    std::int64_t at = 0;
    for (std::size_t i = steps_.size(); i-- > 0;) {
      const std::int64_t size = call_.lead.sizes[i];
      at += batch % size * steps_[i];
      batch /= size;
    }
    return at;
  }

  const Call& call_;
  MaybeTensor grad_, sum_;
  std::int64_t elements_ = 0, element_size_ = 0;
  bool shared_ = false;
  DType type_ = DType::kFloat32;
  std::vector<std::int64_t> steps_;
  std::vector<std::vector<std::int64_t>> seen_;
};

}  // namespace fused_ops::invariant_point_attention
