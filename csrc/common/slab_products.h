// SPDX-License-Identifier: Apache-2.0
// Sums over rows, in parts that are added at the end (parameters.h). For host ops.
#pragma once

#include <optional>
#include <string>

#include "common/sanitizers.h"
#include "common/workspace.h"

namespace fused_ops {

// Sums of products over rows, in fp32: (slabs, lines, columns), to be added.
class SlabProducts {
 public:
  SlabProducts(std::int64_t lines, std::int64_t columns) : lines_(lines), columns_(columns) {}

  // At most so many slabs come of a part of so many rows.
  std::int64_t slabs_of(std::int64_t rows) const { return cuts_of(rows) + 1; }
  std::int64_t size() const { return lines_ * columns_; }
  void set(float* to) { to_ = to; }

  // left^T * right, of (rows, lines) and (rows, columns), contiguous and of `type`.
  void add(const Tensor& like, DType type, const std::string& precision, void* left, void* right,
           std::int64_t rows) {
    if (type == DType::kFloat32) {
      const ScalarType scalar = ScalarType::Float;
      const Tensor a = view_of(like, left, {rows, lines_}, {lines_, 1}, scalar);
      const Tensor b = view_of(like, right, {rows, columns_}, {columns_, 1}, scalar);
      const Tensor product = call_operator("fused_ops::tensor_matmul_reduce", a, b, precision,
                                           std::optional<ScalarType>());
      call_operator("aten::copy_",
                    view_of(like, to_ + used_ * size(), {lines_, columns_}, {columns_, 1}, scalar),
                    product, false);
      ++used_;
      return;
    }
    const std::int64_t cuts = cuts_of(rows), length = rows / cuts / 8 * 8;
    if (length > 0) multiply(like, type, left, right, 0, cuts, length);
    const std::int64_t done = cuts * length;
    if (done < rows) multiply(like, type, left, right, done, 1, rows - done);
  }

  std::int64_t used() const { return used_; }
  const float* data() const { return to_; }

 private:
  // One product of few results would leave most of the GPU idle.
  std::int64_t cuts_of(std::int64_t rows) const {
    const std::int64_t tiles = ceil_div(lines_, 128) * ceil_div(columns_, 128);
    std::int64_t cuts = 64;
    while (cuts > 1 && (cuts * tiles > 256 || rows / cuts < 256)) cuts /= 2;
    return cuts;
  }

  void multiply(const Tensor& like, DType type, void* left, void* right, std::int64_t first,
                std::int64_t cuts, std::int64_t length) {
    const ScalarType scalar = scalar_type_of(type);
    const Tensor a = view_of(like, further(left, type, first * lines_), {cuts, lines_, length},
                             {length * lines_, 1, lines_}, scalar);
    const Tensor b = view_of(like, further(right, type, first * columns_), {cuts, length, columns_},
                             {length * columns_, columns_, 1}, scalar);
    const Tensor out = view_of(like, to_ + used_ * size(), {cuts, lines_, columns_},
                               {size(), columns_, 1}, ScalarType::Float);
    if (fills_products()) call_operator("aten::zero_", out);
    call_overload("aten::bmm", "dtype_out", a, b, ScalarType::Float, out);
    used_ += cuts;
  }

  std::int64_t lines_, columns_;
  float* to_ = nullptr;
  std::int64_t used_ = 0;
};

// Sums of a matrix's columns, in parts, over one part of the rows after the other.
struct ColumnParts {
  std::int64_t columns = 0;
  int kinds = 1;
  int parts = 1;
  float* to = nullptr;
  std::int64_t used = 0;

  std::int64_t size(std::int64_t times) const { return times * parts * kinds * columns; }

  // Where the next part of the rows has its sums.
  float* next() {
    float* sums = to + used * kinds * columns;
    used += parts;
    return sums;
  }
};

}  // namespace fused_ops
