// SPDX-License-Identifier: Apache-2.0
// The wanted gradients of a host op's call: their tensors, the products and sums that give them,
// and how the parameters' ones follow from sums at the end. For host ops.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "common/parameters.h"
#include "common/products.h"
#include "common/slab_products.h"
#include "common/workspace.h"

namespace fused_ops {

class Gradients {
 public:
  // `inputs`: the differentiable ones, as many as `wanted`; numbers below count them. Products are
  // of `type`, on the device of `like`.
  Gradients(const Tensor& like, DType type, const std::string& precision, const MaybeTensor* inputs,
            const std::vector<bool>& wanted)
      : stream(current_stream(like)),
        like_(like),
        type_(type),
        precision_(precision),
        needs_(wanted),
        grads_(wanted.size()) {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (!wanted[i]) continue;
      const auto shape = inputs[i]->sizes();
      grads_[i] = empty(like, {shape.begin(), shape.end()}, inputs[i]->scalar_type());
    }
  }

  bool needs(int input) const { return needs_[static_cast<std::size_t>(input)]; }
  bool needs_any(std::initializer_list<int> inputs) const {
    return std::any_of(inputs.begin(), inputs.end(), [&](int i) { return needs(i); });
  }

  const Tensor& grad(int input) const { return *grads_[static_cast<std::size_t>(input)]; }
  std::vector<Tensor> grads() const {
    std::vector<Tensor> wanted;
    for (const MaybeTensor& grad : grads_) {
      if (grad) wanted.push_back(*grad);
    }
    return wanted;
  }

  Tensor matrix(void* data, std::int64_t rows, std::int64_t columns) const {
    return view_of(like_, data, {rows, columns}, {columns, 1}, scalar_type_of(type_));
  }

  // a * b. Of 16 bits it is written to `to`; of fp32 it is a tensor of its own.
  Tensor multiply(const Tensor& a, const Tensor& b, void* to) const {
    if (type_ == DType::kFloat32) return multiply_fp32(a, b, precision_);
    const Tensor out = matrix(to, a.size(0), b.size(1));
    if (fills_products()) call_operator("aten::zero_", out);
    call_overload("aten::mm", "out", a, b, out);
    return out;
  }

  // left^T * right, of (rows, lines) and (rows, columns), contiguous.
  void add_product(SlabProducts& products, void* left, void* right, std::int64_t rows) const {
    products.add(like_, type_, precision_, left, right, rows);
  }

  void sum_columns(ColumnParts& parts, std::int64_t rows, const void* grad,
                   std::int64_t stride) const {
    ColumnSumsProblem p;
    p.rows = rows;
    p.columns = static_cast<int>(parts.columns);
    p.grad = grad;
    p.grad_type = type_;
    p.grad_stride = stride;
    p.parts = parts.parts;
    p.sums = parts.next();
    column_sums_sm80(p, stream);
  }

  // Reserves memory for the sums over so many parts of the rows, of at most so many.
  std::int64_t reserve_columns(ColumnParts* parts, std::int64_t columns, int kinds,
                               std::int64_t rows, std::int64_t times, bool wanted) {
    parts->columns = columns;
    parts->kinds = kinds;
    parts->parts =
        kinds == 2 ? norm_sum_parts(rows) : column_sum_parts(rows, static_cast<int>(columns));
    return memory.take(wanted ? parts->size(times) * 4 : 0);
  }

  // One of the sums of columns, of the parameter's gradient.
  void add_columns(FinishProblem* finish, int input, const ColumnParts& from, int kind,
                   std::int64_t chunk, std::int64_t filled) const {
    add(finish, input, from.to + kind * from.columns, from.used, from.kinds * from.columns, chunk,
        filled);
  }

  // A parameter's gradient: of each `chunk` of the sum of slabs the first `filled` numbers, times
  // `factor`.
  void add(FinishProblem* finish, int input, const float* from, std::int64_t slabs,
           std::int64_t stride, std::int64_t chunk, std::int64_t filled,
           float factor = 1.0f) const {
    if (!needs(input)) return;
    const Tensor& to = grad(input);
    Summand& s = finish->summands[finish->count++];
    s.from = from;
    s.slabs = slabs;
    s.slab_stride = stride;
    s.count = to.numel();
    s.chunk = chunk;
    s.filled = filled;
    s.factor = factor;
    s.result = {to.mutable_data_ptr(), dtype_of(to.scalar_type())};
  }

  CUstream_st* const stream;
  Workspace memory;

 private:
  const Tensor& like_;
  const DType type_;
  const std::string& precision_;
  const std::vector<bool>& needs_;
  std::vector<MaybeTensor> grads_;
};

}  // namespace fused_ops
