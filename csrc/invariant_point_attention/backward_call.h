// SPDX-License-Identifier: Apache-2.0
// What the parts of the backward's host op share: the wanted gradients, and where they come from.
#pragma once

#include <initializer_list>

#include "common/column_sums.h"
#include "common/slab_products.h"
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

class Gradients {
 public:
  Gradients(const Call& call, const std::vector<bool>& needs) : needs_(needs) {
    const Inputs& in = call.inputs;
    const Tensor* const required[kInputs] = {
        &in.node,         &in.pair,     &in.translations, &in.rotations, nullptr,
        nullptr,          nullptr,      &in.q_proj_weight, nullptr,      &in.k_proj_weight,
        nullptr,          &in.v_proj_weight, nullptr,     &in.q_pts_weight, nullptr,
        &in.k_pts_weight, nullptr,      &in.v_pts_weight, nullptr,       &in.pair_bias_weight,
        nullptr,          &in.head_weights, &in.out_proj_weight, nullptr};
    const MaybeTensor* const optional[kInputs] = {
        nullptr,         nullptr,          nullptr,          nullptr,        &in.pair_value,
        &in.layer_norm_weight, &in.layer_norm_bias, nullptr, &in.q_proj_bias, nullptr,
        &in.k_proj_bias, nullptr,          &in.v_proj_bias,  nullptr,        &in.q_pts_bias,
        nullptr,         &in.k_pts_bias,   nullptr,          &in.v_pts_bias, nullptr,
        &in.pair_bias_bias, nullptr,       nullptr,          &in.out_proj_bias};
    FO_CHECK_VALUE(needs.size() == kInputs, kOp, ": needs must have ", int{kInputs},
                   " entries, got ", needs.size());
    for (int i = 0; i < kInputs; ++i) {
      if (!needs[i]) continue;
      FO_CHECK_VALUE(required[i] || *optional[i], kOp,
                     ": an argument that is None has no gradient");
      const Tensor& of = required[i] ? *required[i] : **optional[i];
      if (i == kTranslations || i == kRotations) {
        // Of all batch elements, in fp32; the caller reduces them to what they came from.
        grads_[i] = empty(in.node,
                          call.lead.with(i == kTranslations
                                             ? std::vector<std::int64_t>{call.sizes().n, 3}
                                             : std::vector<std::int64_t>{call.sizes().n, 3, 3}),
                          ScalarType::Float);
        continue;
      }
      const auto shape = of.sizes();
      grads_[i] = empty(in.node, {shape.begin(), shape.end()}, of.scalar_type());
    }
  }

  bool needs(Input input) const { return needs_[input]; }
  bool needs_any(std::initializer_list<Input> inputs) const {
    return std::any_of(inputs.begin(), inputs.end(), [&](Input i) { return needs_[i]; });
  }
  bool needs_range(Input first, Input last) const {
    for (int i = first; i <= last; ++i) {
      if (needs_[i]) return true;
    }
    return false;
  }
  const Tensor& of(Input input) const { return *grads_[input]; }

  std::vector<Tensor> wanted() const {
    std::vector<Tensor> all;
    for (const MaybeTensor& grad : grads_) {
      if (grad) all.push_back(*grad);
    }
    return all;
  }

  // A parameter's gradient: factor times, of each `chunk` of the sum of slabs, the first `filled`
  // numbers.
  void finish(FinishProblem* problem, Input input, const float* from, std::int64_t slabs,
              std::int64_t stride, std::int64_t chunk, std::int64_t filled,
              float factor = 1.0f) const {
    if (!needs(input)) return;
    const Tensor& to = of(input);
    Summand& s = problem->summands[problem->count++];
    s.from = from;
    s.slabs = slabs;
    s.slab_stride = stride;
    s.count = to.numel();
    s.chunk = chunk;
    s.filled = filled;
    s.factor = factor;
    s.result = {to.mutable_data_ptr(), dtype_of(to.scalar_type())};
  }

 private:
  const std::vector<bool>& needs_;
  MaybeTensor grads_[kInputs];
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
  const MaybeTensor& grad_;
  MaybeTensor sum_;
  std::int64_t elements_ = 0, element_size_ = 0;
  bool shared_ = false;
  DType type_ = DType::kFloat32;
  std::vector<std::int64_t> steps_;
  std::vector<std::vector<std::int64_t>> seen_;
};

}  // namespace fused_ops::invariant_point_attention
