// SPDX-License-Identifier: Apache-2.0
// From torch's tensors to the room's plain structs, with all checks. For the room's host ops.
#pragma once

#include "common/launch.h"
#include "common/stable.h"
#include "triangular_multiplicative_update/plan.h"

namespace fused_ops::triangular_multiplicative_update {

using MaybeTensor = std::optional<Tensor>;

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

inline DType floating_type(const Tensor& tensor, const char* name) {
  FO_CHECK_VALUE(tensor.defined(), kOp, ": ", name, " must be a tensor, got None");
  const DType type = dtype_of(tensor.scalar_type());
  FO_CHECK_VALUE(type != DType::kOther, kOp, ": ", name,
                 " must be float32, bfloat16, float16 or float64, got ",
                 dtype_text(tensor.scalar_type()));
  return type;
}

// A contiguous copy of a tensor, expanded to `sizes`.
inline Tensor copy_of(const Tensor& tensor, const std::vector<std::int64_t>& sizes) {
  const Tensor copy = empty(tensor, sizes, tensor.scalar_type());
  return call_operator("aten::copy_", copy, tensor, false);
}

// A contiguous parameter; `kept` holds copies of those that are not.
class Storer {
 public:
  Storer(const Tensor& pair, bool is_double, std::vector<Tensor>* kept)
      : pair_(pair), is_double_(is_double), kept_(kept) {}

  Stored operator()(const Tensor& tensor, const char* name, std::int64_t rows,
                    std::int64_t columns = -1) const {
    const DType type = floating_type(tensor, name);
    const std::vector<std::int64_t> sizes =
        tensor.dim() == 1   ? std::vector<std::int64_t>{tensor.size(0)}
        : tensor.dim() == 2 ? std::vector{tensor.size(0), tensor.size(1)}
                            : std::vector<std::int64_t>{};
    const bool fits = columns < 0 ? sizes.size() == 1 && sizes[0] == rows
                                  : sizes.size() == 2 && sizes[0] == rows && sizes[1] == columns;
    FO_CHECK_VALUE(fits, kOp, ": ", name, " must have shape ",
                   shape_text(columns < 0 ? std::vector{rows} : std::vector{rows, columns}),
                   ", got ", shape_text(tensor.sizes()));
    FO_CHECK_RUNTIME(same_device(pair_, tensor), kOp, ": ", name,
                     " must be on the device of pair, expected ", device_text(pair_), ", got ",
                     device_text(tensor));
    FO_CHECK_VALUE((type == DType::kFloat64) == is_double_, kOp, ": ", name, " must be ",
                   is_double_ ? "float64" : "float32, bfloat16 or float16", " when pair is ",
                   dtype_text(pair_.scalar_type()), ", got ", dtype_text(tensor.scalar_type()));
    if (tensor.is_contiguous()) return {tensor.const_data_ptr(), type};
    kept_->push_back(copy_of(tensor, sizes));
    return {kept_->back().const_data_ptr(), type};
  }

  Stored operator()(const MaybeTensor& tensor, const char* name, std::int64_t rows) const {
    return tensor ? (*this)(*tensor, name, rows) : Stored{};
  }

 private:
  const Tensor& pair_;
  bool is_double_;
  std::vector<Tensor>* kept_;
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

// The leading axes of a tensor as one, if one stride can walk them; `lead` is what they expand to.
inline bool merge_lead(const Tensor& tensor, const std::vector<std::int64_t>& lead, int tail,
                       std::int64_t* stride) {
  const auto own = static_cast<std::size_t>(tensor.dim() - tail);
  bool any = false;
  std::int64_t next = 0;  // the stride that the next axis outwards must have
  *stride = 0;
  for (std::size_t i = lead.size(); i-- > 0;) {
    if (lead[i] == 1) continue;
    const std::size_t missing = lead.size() - own;
    const bool expanded = i < missing || tensor.size(static_cast<std::int64_t>(i - missing)) == 1;
    const std::int64_t here = expanded ? 0 : tensor.stride(static_cast<std::int64_t>(i - missing));
    if (!any) {
      *stride = here;
    } else if (here != next) {
      return false;
    }
    any = true;
    next = here * lead[i];
  }
  return true;
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

inline bool mask_type(ScalarType type, MaskType* to) {
  switch (type) {
    case ScalarType::Bool:
    case ScalarType::Byte:
      *to = MaskType::kUInt8;
      return true;
    case ScalarType::Char:
      *to = MaskType::kInt8;
      return true;
    case ScalarType::Short:
      *to = MaskType::kInt16;
      return true;
    case ScalarType::Int:
      *to = MaskType::kInt32;
      return true;
    case ScalarType::Long:
      *to = MaskType::kInt64;
      return true;
    case ScalarType::Half:
      *to = MaskType::kFloat16;
      return true;
    case ScalarType::BFloat16:
      *to = MaskType::kBFloat16;
      return true;
    case ScalarType::Float:
      *to = MaskType::kFloat32;
      return true;
    case ScalarType::Double:
      *to = MaskType::kFloat64;
      return true;
    default:
      return false;
  }
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

inline ScalarType scalar_type_of(DType type) {
  switch (type) {
    case DType::kBFloat16:
      return ScalarType::BFloat16;
    case DType::kFloat16:
      return ScalarType::Half;
    case DType::kFloat64:
      return ScalarType::Double;
    default:
      return ScalarType::Float;
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
