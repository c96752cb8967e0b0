// SPDX-License-Identifier: Apache-2.0
// The backward takes some lines of pairs at a time; and what is summed over all of them. For the
// room's host ops.
#pragma once

#include <algorithm>
#include <utility>

#include "triangular_multiplicative_update/contraction.h"

namespace fused_ops::triangular_multiplicative_update {

// Some lines of pairs: whole blocks of rows, or up to the last line.
struct Chunk {
  std::int64_t first = 0;  // pair
  std::int64_t count = 0;
};

// Pairs at a time: their matrices are small beside the planes, and fill a GPU.
constexpr std::int64_t kChunkPairs = 1 << 18;
// Chunks are so many lines, that is, whole blocks of rows, or up to the last line.
constexpr std::int64_t kChunkLines = 16;

inline std::vector<Chunk> chunks_of(const Sizes& sizes) {
  const std::int64_t lines = sizes.batch * sizes.n;
  const std::int64_t step =
      std::max<std::int64_t>(1, kChunkPairs / sizes.pitch / kChunkLines) * kChunkLines;
  std::vector<Chunk> chunks;
  for (std::int64_t first = 0; first < lines; first += step) {
    chunks.push_back({first * sizes.pitch, std::min(step, lines - first) * sizes.pitch});
  }
  return chunks;
}

// Slabs of rows are a batch: one product of few results would leave most of the GPU idle. Rows are
// a multiple of 8.
inline std::int64_t slabs_of(std::int64_t rows, std::int64_t left, std::int64_t right) {
  const std::int64_t tiles = ceil_div(left, 128) * ceil_div(right, 128);
  for (const std::int64_t slabs : {128, 64, 32, 16}) {
    if (rows % slabs == 0 && slabs * tiles <= 256) return slabs;
  }
  return 8;
}

// Numbers `first` on of a tensor.
inline void* at(const Tensor& tensor, std::int64_t first) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + first * tensor.element_size();
}

// left^T * right of chunks of rows in fp32: slabs (slabs, left, right), to be added.
class SlabProducts {
 public:
  SlabProducts(std::vector<Chunk> chunks, const std::string& precision)
      : chunks_(std::move(chunks)), precision_(precision) {}

  // The product of the next chunk: left (count, lines) of any strides, right (count, inner).
  void add(const Tensor& left, const Tensor& right) {
    if (left.scalar_type() == ScalarType::Float) {
      parts_.push_back(call_operator("fused_ops::tensor_matmul_reduce", left, right, precision_,
                                     std::optional<ScalarType>()));
      return;
    }
    const std::int64_t count = left.size(0), lines = left.size(1), inner = right.size(1);
    if (parts_.empty()) {
      std::int64_t total = 0;
      for (const Chunk& chunk : chunks_) total += slabs_of(chunk.count, lines, inner);
      parts_.push_back(empty(left, {total, lines, inner}, ScalarType::Float));
    }
    const std::int64_t slabs = slabs_of(count, lines, inner), rows = count / slabs;
    const std::int64_t row = left.stride(0), column = left.stride(1);
    const ScalarType type = left.scalar_type();
    multiply_matrices(
        view_of(left, at(left, 0), {slabs, lines, rows}, {rows * row, column, row}, type),
        view_of(left, at(right, 0), {slabs, rows, inner}, {rows * inner, inner, 1}, type),
        view_of(left, at(parts_[0], used_ * lines * inner), {slabs, lines, inner},
                {lines * inner, inner, 1}, ScalarType::Float));
    used_ += slabs;
  }

  // What was added; none if nothing was.
  MaybeTensor slabs() const {
    if (parts_.empty()) return std::nullopt;
    if (parts_.size() == 1) return parts_[0];
    return call_operator("aten::stack", parts_, std::int64_t{0});
  }

 private:
  std::vector<Chunk> chunks_;
  std::string precision_;
  std::vector<Tensor> parts_;
  std::int64_t used_ = 0;
};

}  // namespace fused_ops::triangular_multiplicative_update
