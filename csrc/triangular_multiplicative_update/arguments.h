// SPDX-License-Identifier: Apache-2.0
// From torch's tensors to the room's plain structs, with all checks. For the room's host ops.
#pragma once

#include "common/arguments.h"
#include "common/launch.h"
#include "triangular_multiplicative_update/plan.h"

namespace fused_ops::triangular_multiplicative_update {

constexpr const char* kOp = "triangular_multiplicative_update";

// The parameters in the order of the schema.
struct Parameters {
  Tensor norm_in_weight, norm_in_bias;
  Tensor proj_a_weight;
  MaybeTensor proj_a_bias;
  Tensor gate_a_weight;
  MaybeTensor gate_a_bias;
  Tensor proj_b_weight;
  MaybeTensor proj_b_bias;
  Tensor gate_b_weight;
  MaybeTensor gate_b_bias;
  Tensor norm_out_weight, norm_out_bias;
  Tensor out_proj_weight;
  MaybeTensor out_proj_bias;
  Tensor out_gate_weight;
  MaybeTensor out_gate_bias;
};

inline Weights weights_of(const Parameters& p, std::int64_t channels, std::int64_t hidden,
                          const Storer& store) {
  Weights w;
  w.norm_in_weight = store(p.norm_in_weight, "layer_norm_in_weight", channels);
  w.norm_in_bias = store(p.norm_in_bias, "layer_norm_in_bias", channels);
  w.proj_a = {store(p.proj_a_weight, "proj_a_weight", hidden, channels),
              store(p.proj_a_bias, "proj_a_bias", hidden)};
  w.gate_a = {store(p.gate_a_weight, "gate_a_weight", hidden, channels),
              store(p.gate_a_bias, "gate_a_bias", hidden)};
  w.proj_b = {store(p.proj_b_weight, "proj_b_weight", hidden, channels),
              store(p.proj_b_bias, "proj_b_bias", hidden)};
  w.gate_b = {store(p.gate_b_weight, "gate_b_weight", hidden, channels),
              store(p.gate_b_bias, "gate_b_bias", hidden)};
  w.norm_out_weight = store(p.norm_out_weight, "layer_norm_out_weight", hidden);
  w.norm_out_bias = store(p.norm_out_bias, "layer_norm_out_bias", hidden);
  w.out_proj = {store(p.out_proj_weight, "out_proj_weight", channels, hidden),
                store(p.out_proj_bias, "out_proj_bias", channels)};
  w.out_gate = {store(p.out_gate_weight, "out_gate_weight", channels, channels),
                store(p.out_gate_bias, "out_gate_bias", channels)};
  return w;
}

// A tensor of pairs; `kept` becomes a contiguous copy where strides are beyond what kernels walk.
inline Pairs pairs_of(const Tensor& tensor, const std::vector<std::int64_t>& lead, Tensor* kept) {
  Pairs pairs;
  *kept = tensor;
  const std::int64_t channels = tensor.size(-1);
  if ((channels > 1 && tensor.stride(-1) != 1) ||
      !merge_lead(tensor, lead, 3, &pairs.batch_stride)) {
    const auto sizes = tensor.sizes();
    *kept = copy_of(tensor, {sizes.begin(), sizes.end()});
    merge_lead(*kept, lead, 3, &pairs.batch_stride);
  }
  pairs.data = kept->const_data_ptr();
  pairs.type = dtype_of(kept->scalar_type());
  pairs.i_stride = kept->stride(-3);
  pairs.j_stride = kept->stride(-2);
  return pairs;
}

// A mask (..., n, n) whose leading axes broadcast to `lead`.
inline Mask mask_of(const MaybeTensor& tensor, const Tensor& pair,
                    const std::vector<std::int64_t>& lead, std::int64_t n, Tensor* kept) {
  Mask mask;
  if (!tensor) return mask;
  const std::int64_t axes = tensor->dim() - 2;
  bool fits = axes >= 0 && axes <= static_cast<std::int64_t>(lead.size()) &&
              tensor->size(-1) == n && tensor->size(-2) == n;
  for (std::int64_t i = 0; fits && i < axes; ++i) {
    const std::int64_t size = tensor->size(i);
    fits = size == 1 || size == lead[lead.size() - static_cast<std::size_t>(axes - i)];
  }
  FO_CHECK_VALUE(fits, kOp,
                 ": mask must have shape (..., N, N) and leading axes that broadcast to ",
                 "those of pair, got ", shape_text(tensor->sizes()));
  FO_CHECK_RUNTIME(same_device(pair, *tensor), kOp,
                   ": mask must be on the device of pair, expected ", device_text(pair), ", got ",
                   device_text(*tensor));
  *kept = *tensor;
  MaskType type = MaskType::kUInt8;
  std::int64_t batch_stride = 0;
  const bool walks = merge_lead(*tensor, lead, 2, &batch_stride);
  if (!walks || !mask_type(tensor->scalar_type(), &type)) {
    std::vector<std::int64_t> sizes = lead;
    sizes.push_back(n);
    sizes.push_back(n);
    const ScalarType copied = walks ? ScalarType::Float : tensor->scalar_type();
    const Tensor copy = empty(pair, sizes, mask_type(copied, &type) ? copied : ScalarType::Float);
    *kept = call_operator("aten::copy_", copy, *tensor, false);
    mask_type(kept->scalar_type(), &type);
    merge_lead(*kept, lead, 2, &batch_stride);
  }
  mask.data = kept->const_data_ptr();
  mask.type = type;
  mask.batch_stride = batch_stride;
  mask.i_stride = kept->stride(-2);
  mask.j_stride = kept->stride(-1);
  return mask;
}

}  // namespace fused_ops::triangular_multiplicative_update
