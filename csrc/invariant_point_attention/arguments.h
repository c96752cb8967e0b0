// SPDX-License-Identifier: Apache-2.0
// From torch's tensors to the room's plain structs, with checks. For the room's host ops.
#pragma once

#include <vector>

#include "common/arguments.h"
#include "common/launch.h"
#include "invariant_point_attention/plan.h"

namespace fused_ops::invariant_point_attention {

constexpr const char* kOp = "invariant_point_attention";

// Leading axes, all of which are one batch axis to the kernels.
struct Lead {
  std::vector<std::int64_t> sizes;
  std::int64_t batch = 1;

  explicit Lead(const Tensor& node) {
    for (std::int64_t i = 0; i + 2 < node.dim(); ++i) {
      sizes.push_back(node.size(i));
      batch *= node.size(i);
    }
  }

  std::vector<std::int64_t> with(const std::vector<std::int64_t>& tail) const {
    std::vector<std::int64_t> all = sizes;
    all.insert(all.end(), tail.begin(), tail.end());
    return all;
  }
};

// That a tensor (..., tail) has leading axes that broadcast, and lies where `node` does.
inline void check_of_node(const Tensor& tensor, const char* name, const Tensor& node,
                          const Lead& lead, const std::vector<std::int64_t>& tail) {
  const auto own = tensor.dim() - static_cast<std::int64_t>(tail.size());
  const auto axes = static_cast<std::int64_t>(lead.sizes.size());
  bool fits = own >= 0 && own <= axes;
  for (std::int64_t i = 0; fits && i < own; ++i) {
    const std::int64_t size = tensor.size(i);
    fits = size == 1 || size == lead.sizes[static_cast<std::size_t>(axes - own + i)];
  }
  for (std::size_t i = 0; fits && i < tail.size(); ++i) {
    fits = tensor.size(own + static_cast<std::int64_t>(i)) == tail[i];
  }
  FO_CHECK_VALUE(fits, kOp, ": ", name, " must have shape (..., ", shape_text(tail),
                 ") and leading axes that broadcast to those of node, got ",
                 shape_text(tensor.sizes()));
  FO_CHECK_RUNTIME(same_device(node, tensor), kOp, ": ", name,
                   " must be on the device of node, expected ", device_text(node), ", got ",
                   device_text(tensor));
}

// Tensors as kernels walk them; where they cannot, a contiguous copy is put into `kept`: of all
// batch elements if one stride cannot walk those that there are.
class Walker {
 public:
  Walker(const Lead& lead, std::vector<Tensor>* kept) : lead_(lead), kept_(kept) {}

  Nodes nodes(const Tensor& tensor) const {
    std::int64_t batch_stride = 0;
    const Tensor walked =
        walk(tensor, 2, tensor.stride(-1) == 1 || tensor.size(-1) == 1, &batch_stride);
    return {walked.const_data_ptr(), dtype_of(walked.scalar_type()), batch_stride,
            walked.stride(-2)};
  }

  Pairs pairs(const Tensor& tensor) const {
    std::int64_t batch_stride = 0;
    const Tensor walked =
        walk(tensor, 3, tensor.stride(-1) == 1 || tensor.size(-1) == 1, &batch_stride);
    return {walked.const_data_ptr(), dtype_of(walked.scalar_type()), batch_stride,
            walked.stride(-3), walked.stride(-2)};
  }

  Mask mask(const Tensor& tensor) const {
    MaskType type = MaskType::kUInt8;
    const ScalarType stored = tensor.scalar_type();
    FO_CHECK_VALUE(stored != ScalarType::ComplexHalf && stored != ScalarType::ComplexFloat &&
                       stored != ScalarType::ComplexDouble,
                   kOp, ": node_mask must be bool, integer or floating, got ", dtype_text(stored));
    Tensor known = tensor;
    if (!mask_type(stored, &type)) {
      const auto shape = tensor.sizes();
      const Tensor copy = empty(tensor, {shape.begin(), shape.end()}, ScalarType::Float);
      known = call_operator("aten::copy_", copy, tensor, false);
      type = MaskType::kFloat32;
      kept_->push_back(known);
    }
    std::int64_t batch_stride = 0;
    const Tensor walked = walk(known, 1, true, &batch_stride);
    return {walked.const_data_ptr(), type, batch_stride, walked.stride(-1)};
  }

  // Contiguous in a batch element.
  Stored frames(const Tensor& tensor, int tail, const char* name,
                std::int64_t* batch_stride) const {
    const DType type = floating_type(kOp, tensor, name);
    bool dense = true;
    std::int64_t next = 1;
    for (std::int64_t i = 1; i <= tail; ++i) {
      dense = dense && (tensor.size(-i) == 1 || tensor.stride(-i) == next);
      next *= tensor.size(-i);
    }
    return {walk(tensor, tail, dense, batch_stride).const_data_ptr(), type};
  }

 private:
  Tensor walk(const Tensor& tensor, int tail, bool fits, std::int64_t* batch_stride) const {
    Tensor walked = tensor;
    if (!fits) {  // batch elements that share the tensor share its copy, too
      const auto shape = tensor.sizes();
      walked = copy_of(tensor, {shape.begin(), shape.end()});
    }
    if (!merge_lead(walked, lead_.sizes, tail, batch_stride)) {
      std::vector<std::int64_t> sizes;
      for (std::int64_t i = tail; i > 0; --i) sizes.push_back(tensor.size(-i));
      walked = copy_of(tensor, lead_.with(sizes));
      fits = false;
      merge_lead(walked, lead_.sizes, tail, batch_stride);
    }
    if (!fits) kept_->push_back(walked);
    return walked;
  }

  const Lead& lead_;
  std::vector<Tensor>* kept_;
};

}  // namespace fused_ops::invariant_point_attention
