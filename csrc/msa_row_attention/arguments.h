// SPDX-License-Identifier: Apache-2.0
// From torch's tensors to the room's plain structs, with all checks. For the room's host ops.
#pragma once

#include <algorithm>
#include <vector>

#include "common/arguments.h"
#include "common/launch.h"
#include "msa_row_attention/plan.h"

namespace fused_ops::msa_row_attention {

constexpr const char* kOp = "msa_row_attention";

// Leading axes of the MSA, and how they fall into groups and rows: those of the pair tensor first,
// then those that it lacks. Where they stand in another order, every lead index is a group of its
// own, and pair tensors may be groups several times.
struct Lead {
  std::vector<std::int64_t> sizes;
  std::size_t group_axes = 0;  // the first so many
  std::int64_t groups = 1;
  std::int64_t rows_of_lead = 1;  // a group has so many times S rows
};

inline Lead lead_of(const Tensor& msa, const Tensor& pair) {
  Lead lead;
  const auto axes = static_cast<std::size_t>(msa.dim() - 3);
  const auto own = static_cast<std::size_t>(std::max<std::int64_t>(pair.dim() - 3, 0));
  FO_CHECK_VALUE(own <= axes, kOp, ": pair must have no more leading axes than msa, got ",
                 shape_text(pair.sizes()), " for ", shape_text(msa.sizes()));
  std::size_t last_group = 0;  // behind the last axis that the pair tensor has
  std::size_t first_row = axes;
  for (std::size_t i = 0; i < axes; ++i) {
    const std::int64_t size = msa.size(static_cast<std::int64_t>(i));
    lead.sizes.push_back(size);
    const std::int64_t of_pair =
        i < axes - own ? 1 : pair.size(static_cast<std::int64_t>(i - (axes - own)));
    FO_CHECK_VALUE(of_pair == 1 || of_pair == size, kOp,
                   ": the leading axes of pair must be those of msa or 1, got ",
                   shape_text(pair.sizes()), " for ", shape_text(msa.sizes()));
    if (size == 1) continue;
    if (of_pair == size) {
      last_group = i + 1;
    } else {
      first_row = std::min(first_row, i);
    }
  }
  lead.group_axes = last_group <= first_row ? last_group : axes;
  for (std::size_t i = 0; i < axes; ++i) {
    (i < lead.group_axes ? lead.groups : lead.rows_of_lead) *= lead.sizes[i];
  }
  return lead;
}

// Strides of a dense tensor (groups, rows, n) of lines; cheaper than a look at each axis.
template <class Strided>
bool walk_dense(const Tensor& tensor, std::int64_t groups, std::int64_t rows, std::int64_t n,
                std::int64_t line, std::int64_t Strided::* row_stride,
                std::int64_t Strided::* position_stride, Strided* to) {
  if (!tensor.is_contiguous() || tensor.numel() != groups * rows * n * line) return false;
  to->group_stride = rows * n * line;
  to->*row_stride = n * line;
  to->*position_stride = line;
  return true;
}

// `kept` becomes a contiguous copy where strides are beyond what kernels walk.
inline Msa msa_of(const Tensor& tensor, const Lead& lead, Tensor* kept) {
  Msa msa;
  *kept = tensor;
  msa.data = tensor.const_data_ptr();
  msa.type = dtype_of(tensor.scalar_type());
  if (walk_dense(tensor, lead.groups, lead.rows_of_lead * tensor.size(-3), tensor.size(-2),
                 tensor.size(-1), &Msa::row_stride, &Msa::position_stride, &msa)) {
    return msa;
  }
  std::vector<std::int64_t> sizes = lead.sizes;
  for (std::int64_t i = -3; i < 0; ++i) sizes.push_back(tensor.size(i));
  const std::size_t axes = lead.sizes.size();
  const auto walk = [&] {
    const auto strides = broadcast_strides(*kept, sizes);
    msa.position_stride = strides[axes + 1];
    return (sizes.back() == 1 || strides.back() == 1) &&
           merge_axes(sizes, strides, 0, lead.group_axes, &msa.group_stride) &&
           merge_axes(sizes, strides, lead.group_axes, axes + 1, &msa.row_stride);
  };
  if (!walk()) {
    *kept = copy_of(tensor, sizes);
    walk();
    msa.data = kept->const_data_ptr();
  }
  return msa;
}

inline Pairs pairs_of(const Tensor& tensor, const Lead& lead, Tensor* kept) {
  Pairs pairs;
  *kept = tensor;
  pairs.data = tensor.const_data_ptr();
  pairs.type = dtype_of(tensor.scalar_type());
  if (walk_dense(tensor, lead.groups, tensor.size(-3), tensor.size(-2), tensor.size(-1),
                 &Pairs::i_stride, &Pairs::j_stride, &pairs)) {
    return pairs;
  }
  std::vector<std::int64_t> sizes(
      lead.sizes.begin(), lead.sizes.begin() + static_cast<std::ptrdiff_t>(lead.group_axes));
  std::vector<std::int64_t> shape;
  for (std::int64_t i = -3; i < 0; ++i) shape.push_back(tensor.size(i));
  // Axes behind the groups are 1 in the pair tensor.
  const auto walk = [&] {
    std::vector<std::int64_t> all = lead.sizes;
    all.insert(all.end(), shape.begin(), shape.end());
    const auto strides = broadcast_strides(*kept, all);
    const std::size_t axes = lead.sizes.size();
    pairs.i_stride = strides[axes];
    pairs.j_stride = strides[axes + 1];
    return (shape[2] == 1 || strides[axes + 2] == 1) &&
           merge_axes(all, strides, 0, lead.group_axes, &pairs.group_stride);
  };
  if (!walk()) {
    for (std::size_t i = lead.group_axes; i < lead.sizes.size(); ++i) sizes.push_back(1);
    sizes.insert(sizes.end(), shape.begin(), shape.end());
    *kept = copy_of(tensor, sizes);
    walk();
    pairs.data = kept->const_data_ptr();
  }
  return pairs;
}

// A mask (..., S, N) whose leading axes broadcast to those of the MSA.
inline Mask mask_of(const MaybeTensor& tensor, const Tensor& msa, const Lead& lead, Tensor* kept) {
  Mask mask;
  if (!tensor) return mask;
  const std::size_t axes = lead.sizes.size();
  std::vector<std::int64_t> sizes = lead.sizes;
  sizes.push_back(msa.size(-3));
  sizes.push_back(msa.size(-2));
  const std::int64_t own = tensor->dim();
  bool fits = own >= 2 && own <= static_cast<std::int64_t>(sizes.size()) &&
              tensor->size(-1) == msa.size(-2) && tensor->size(-2) == msa.size(-3);
  for (std::int64_t i = 0; fits && i + 2 < own; ++i) {
    const std::int64_t size = tensor->size(i);
    fits = size == 1 || size == sizes[sizes.size() - static_cast<std::size_t>(own - i)];
  }
  FO_CHECK_VALUE(fits, kOp,
                 ": mask must have shape (..., S, N) and leading axes that broadcast to those of "
                 "msa, got ",
                 shape_text(tensor->sizes()));
  FO_CHECK_RUNTIME(same_device(msa, *tensor), kOp, ": mask must be on the device of msa, expected ",
                   device_text(msa), ", got ", device_text(*tensor));
  const ScalarType stored = tensor->scalar_type();
  FO_CHECK_VALUE(stored != ScalarType::ComplexHalf && stored != ScalarType::ComplexFloat &&
                     stored != ScalarType::ComplexDouble,
                 kOp, ": mask must be bool, integer or floating, got ", dtype_text(stored));
  *kept = *tensor;
  mask.data = tensor->const_data_ptr();
  if (mask_type(stored, &mask.type) &&
      walk_dense(*tensor, lead.groups, lead.rows_of_lead * msa.size(-3), msa.size(-2), 1,
                 &Mask::row_stride, &Mask::position_stride, &mask)) {
    return mask;
  }
  const auto walk = [&] {
    const auto strides = broadcast_strides(*kept, sizes);
    mask.position_stride = strides[axes + 1];
    return mask_type(kept->scalar_type(), &mask.type) &&
           merge_axes(sizes, strides, 0, lead.group_axes, &mask.group_stride) &&
           merge_axes(sizes, strides, lead.group_axes, axes + 1, &mask.row_stride);
  };
  if (!walk()) {
    MaskType known = MaskType::kUInt8;
    const ScalarType type = mask_type(stored, &known) ? stored : ScalarType::Float;
    const Tensor copy = empty(msa, sizes, type);
    *kept = call_operator("aten::copy_", copy, *tensor, false);
    walk();
    mask.data = kept->const_data_ptr();
  }
  return mask;
}

}  // namespace fused_ops::msa_row_attention
