// SPDX-License-Identifier: Apache-2.0
// Memory of a call, for its host op.
#pragma once

#include <type_traits>

#include "common/arguments.h"

namespace fused_ops {

// So many numbers behind `data`.
template <class T>
T* further(T* data, DType type, std::int64_t numbers) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Byte*>(data) + numbers * bytes_of(type);
}

// Pieces of one allocation, each at 256 bytes: an allocation costs as much time of the host as a
// launch.
class Workspace {
 public:
  // To be called for all pieces, then `allocate`.
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t begin = end_;
    end_ += ceil_div(bytes, 256) * 256;
    return begin;
  }
  void allocate(const Tensor& like) {
    tensor_ = empty(like, {end_}, ScalarType::Byte);
    memory_ = static_cast<unsigned char*>(tensor_->mutable_data_ptr());
  }
  template <class T = unsigned char>
  T* at(std::int64_t begin) const {
    return reinterpret_cast<T*>(memory_ + begin);
  }

 private:
  std::int64_t end_ = 0;
  MaybeTensor tensor_;
  unsigned char* memory_ = nullptr;
};

}  // namespace fused_ops
