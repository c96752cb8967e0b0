// SPDX-License-Identifier: Apache-2.0
// What the parts of the backward's host op share: the wanted gradients, products, and sums over
// positions.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "common/launch.h"
#include "common/sanitizers.h"
#include "msa_row_attention/call.h"
#include "msa_row_attention/parameters.h"

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

// Sums of products over positions, in fp32: (slabs, lines, columns), to be added.
class SlabProducts {
 public:
  SlabProducts(std::int64_t lines, std::int64_t columns) : lines_(lines), columns_(columns) {}

  // At most so many slabs come of a part of so many positions.
  std::int64_t slabs_of(std::int64_t positions) const { return cuts_of(positions) + 1; }
  std::int64_t size() const { return lines_ * columns_; }
  void set(float* to) { to_ = to; }

  // left^T * right, of (positions, lines) and (positions, columns), contiguous.
  void add(const Call& call, void* left, void* right, std::int64_t positions) {
    const Tensor& like = call.msa;
    const ScalarType type = call.scalar();
    if (call.is_fp32()) {
      const Tensor a = view_of(like, left, {positions, lines_}, {lines_, 1}, type);
      const Tensor b = view_of(like, right, {positions, columns_}, {columns_, 1}, type);
      const Tensor product = call_operator("fused_ops::tensor_matmul_reduce", a, b, call.precision,
                                           std::optional<ScalarType>());
      call_operator("aten::copy_",
                    view_of(like, to_ + used_ * size(), {lines_, columns_}, {columns_, 1}, type),
                    product, false);
      ++used_;
      return;
    }
    const std::int64_t cuts = cuts_of(positions), length = positions / cuts / 8 * 8;
    if (length > 0) multiply(call, left, right, 0, cuts, length);
    const std::int64_t done = cuts * length;
    if (done < positions) multiply(call, left, right, done, 1, positions - done);
  }

  std::int64_t used() const { return used_; }
  const float* data() const { return to_; }

 private:
  // One product of few results would leave most of the GPU idle.
  std::int64_t cuts_of(std::int64_t positions) const {
    const std::int64_t tiles = ceil_div(lines_, 128) * ceil_div(columns_, 128);
    std::int64_t cuts = 64;
    while (cuts > 1 && (cuts * tiles > 256 || positions / cuts < 256)) cuts /= 2;
    return cuts;
  }

  void multiply(const Call& call, void* left, void* right, std::int64_t first, std::int64_t cuts,
                std::int64_t length) {
    const Tensor& like = call.msa;
    const Tensor a = view_of(like, further(left, call.type(), first * lines_),
                             {cuts, lines_, length}, {length * lines_, 1, lines_}, call.scalar());
    const Tensor b =
        view_of(like, further(right, call.type(), first * columns_), {cuts, length, columns_},
                {length * columns_, columns_, 1}, call.scalar());
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

// Sums of a matrix's columns, in parts, over one part of the positions after the other.
struct ColumnParts {
  std::int64_t columns = 0;
  int kinds = 1;
  int parts = 1;
  float* to = nullptr;
  std::int64_t used = 0;

  std::int64_t size(std::int64_t times) const { return times * parts * kinds * columns; }

  // Where the next part of the positions has its sums.
  float* next() {
    float* sums = to + used * kinds * columns;
    used += parts;
    return sums;
  }
};

class BackwardCall {
 public:
  BackwardCall(const Call& call_of_op, const Inputs& inputs, const std::vector<bool>& wanted)
      : call(call_of_op),
        sizes(call_of_op.sizes()),
        stream(current_stream(call_of_op.msa)),
        needs_(wanted) {
    for (int i = 0; i < kInputs; ++i) {
      if (!needs_[i]) continue;
      const auto shape = inputs[i]->sizes();
      grads_[i] = empty(call.msa, {shape.begin(), shape.end()}, inputs[i]->scalar_type());
    }
  }

  bool needs(Input input) const { return needs_[input]; }
  bool needs_any(std::initializer_list<Input> inputs) const {
    return std::any_of(inputs.begin(), inputs.end(), [&](Input i) { return needs_[i]; });
  }
  bool needs_pair_norm() const { return needs_any({kPairNormWeight, kPairNormBias}); }
  bool needs_pair() const { return needs(kPair) || needs(kPairBiasWeight) || needs_pair_norm(); }

  const Tensor& grad(Input input) const { return *grads_[input]; }
  std::vector<Tensor> grads() const {
    std::vector<Tensor> wanted;
    for (int i = 0; i < kInputs; ++i) {
      if (needs_[i]) wanted.push_back(*grads_[i]);
    }
    return wanted;
  }

  Tensor matrix(void* data, std::int64_t rows, std::int64_t columns) const {
    return view_of(call.msa, data, {rows, columns}, {columns, 1}, call.scalar());
  }

  // a * b. Of 16 bits it is written to `to`; of fp32 it is a tensor of its own.
  Tensor multiply(const Tensor& a, const Tensor& b, void* to) const {
    if (call.is_fp32()) return multiply_fp32(a, b, call.precision);
    const Tensor out = matrix(to, a.size(0), b.size(1));
    if (fills_products()) call_operator("aten::zero_", out);
    call_overload("aten::mm", "out", a, b, out);
    return out;
  }

  void sum_columns(ColumnParts& parts, const Sizes& part, const void* grad,
                   std::int64_t stride) const {
    ColumnSumsProblem p;
    p.sizes = part;
    p.columns = static_cast<int>(parts.columns);
    p.grad = grad;
    p.grad_type = call.type();
    p.grad_stride = stride;
    p.parts = parts.parts;
    p.sums = parts.next();
    column_sums_sm80(p, stream);
  }

  // Reserves memory for the sums over so many parts of the positions, of at most so many.
  std::int64_t reserve_columns(ColumnParts* parts, std::int64_t columns, int kinds,
                               std::int64_t positions, std::int64_t times, bool wanted) {
    parts->columns = columns;
    parts->kinds = kinds;
    parts->parts = kinds == 2 ? norm_sum_parts(positions)
                              : column_sum_parts(positions, static_cast<int>(columns));
    return memory.take(wanted ? parts->size(times) * 4 : 0);
  }

  // One of the sums of columns, of the parameter's gradient.
  void add_columns(FinishProblem* finish, Input input, const ColumnParts& from, int kind,
                   std::int64_t chunk, std::int64_t filled) const {
    add(finish, input, from.to + kind * from.columns, from.used, from.kinds * from.columns, chunk,
        filled);
  }

  // A parameter's gradient: of each `chunk` of the sum of slabs the first `filled` numbers.
  void add(FinishProblem* finish, Input input, const float* from, std::int64_t slabs,
           std::int64_t stride, std::int64_t chunk, std::int64_t filled) const {
    if (!needs(input)) return;
    const Tensor& to = grad(input);
    Summand& s = finish->summands[finish->count++];
    s.from = from;
    s.slabs = slabs;
    s.slab_stride = stride;
    s.count = to.numel();
    s.chunk = chunk;
    s.filled = filled;
    s.result = {to.mutable_data_ptr(), dtype_of(to.scalar_type())};
  }

  const Call& call;
  const Sizes& sizes;
  CUstream_st* const stream;
  Workspace memory;

 private:
  const std::vector<bool>& needs_;
  Inputs grads_;
};

}  // namespace fused_ops::msa_row_attention
