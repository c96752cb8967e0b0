// SPDX-License-Identifier: Apache-2.0
// From torch's tensors to plain structs, with checks: what the host ops of the rooms share.
#pragma once

#include <optional>
#include <vector>

#include "common/stable.h"
#include "common/stored.h"

namespace fused_ops {

using MaybeTensor = std::optional<Tensor>;

inline DType floating_type(const char* op, const Tensor& tensor, const char* name) {
  FO_CHECK_VALUE(tensor.defined(), op, ": ", name, " must be a tensor, got None");
  const DType type = dtype_of(tensor.scalar_type());
  FO_CHECK_VALUE(type != DType::kOther, op, ": ", name,
                 " must be float32, bfloat16, float16 or float64, got ",
                 dtype_text(tensor.scalar_type()));
  return type;
}

// A contiguous copy of a tensor, expanded to `sizes`.
inline Tensor copy_of(const Tensor& tensor, const std::vector<std::int64_t>& sizes) {
  const Tensor copy = empty(tensor, sizes, tensor.scalar_type());
  return call_operator("aten::copy_", copy, tensor, false);
}

// A contiguous parameter; `kept` holds copies of those that are not. `main`: the tensor, by the
// name `main_name`, whose device and dtype parameters go with.
class Storer {
 public:
  Storer(const char* op, const Tensor& main, const char* main_name, bool is_double,
         std::vector<Tensor>* kept)
      : op_(op), main_(main), main_name_(main_name), is_double_(is_double), kept_(kept) {}

  Stored operator()(const Tensor& tensor, const char* name, std::int64_t rows,
                    std::int64_t columns = -1) const {
    const DType type = floating_type(op_, tensor, name);
    const std::int64_t axes = columns < 0 ? 1 : 2;
    const bool fits =
        tensor.dim() == axes && tensor.size(0) == rows && (axes == 1 || tensor.size(1) == columns);
    FO_CHECK_VALUE(fits, op_, ": ", name, " must have shape ",
                   shape_text(columns < 0 ? std::vector{rows} : std::vector{rows, columns}),
                   ", got ", shape_text(tensor.sizes()));
    FO_CHECK_RUNTIME(same_device(main_, tensor), op_, ": ", name, " must be on the device of ",
                     main_name_, ", expected ", device_text(main_), ", got ", device_text(tensor));
    FO_CHECK_VALUE((type == DType::kFloat64) == is_double_, op_, ": ", name, " must be ",
                   is_double_ ? "float64" : "float32, bfloat16 or float16", " when ", main_name_,
                   " is ", dtype_text(main_.scalar_type()), ", got ",
                   dtype_text(tensor.scalar_type()));
    if (tensor.is_contiguous()) return {tensor.const_data_ptr(), type};
    kept_->push_back(copy_of(tensor, columns < 0 ? std::vector{rows} : std::vector{rows, columns}));
    return {kept_->back().const_data_ptr(), type};
  }

  Stored operator()(const MaybeTensor& tensor, const char* name, std::int64_t rows) const {
    return tensor ? (*this)(*tensor, name, rows) : Stored{};
  }

 private:
  const char* op_;
  const Tensor& main_;
  const char* main_name_;
  bool is_double_;
  std::vector<Tensor>* kept_;
};

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

// Axes [from, to) of sizes and strides as one; false where one stride cannot walk them.
inline bool merge_axes(const std::vector<std::int64_t>& sizes,
                       const std::vector<std::int64_t>& strides, std::size_t from, std::size_t to,
                       std::int64_t* stride) {
  *stride = 0;
  bool any = false;
  std::int64_t next = 0;
  for (std::size_t i = to; i-- > from;) {
    if (sizes[i] == 1) continue;
    if (!any) {
      *stride = strides[i];
    } else if (strides[i] != next) {
      return false;
    }
    any = true;
    next = strides[i] * sizes[i];
  }
  return true;
}

// Strides of a tensor whose leading axes broadcast to `sizes`; axes that it lacks have stride 0.
inline std::vector<std::int64_t> broadcast_strides(const Tensor& tensor,
                                                   const std::vector<std::int64_t>& sizes) {
  const std::size_t missing = sizes.size() - static_cast<std::size_t>(tensor.dim());
  std::vector<std::int64_t> strides(sizes.size(), 0);
  for (std::size_t i = missing; i < sizes.size(); ++i) {
    const auto axis = static_cast<std::int64_t>(i - missing);
    if (tensor.size(axis) != 1) strides[i] = tensor.stride(axis);
  }
  return strides;
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

}  // namespace fused_ops
