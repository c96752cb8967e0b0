// SPDX-License-Identifier: Apache-2.0
// The only file that includes torch's headers, and of those only the stable ones: what is compiled
// against them runs with every torch from TORCH_TARGET_VERSION on. For `*_cuda.cpp` files alone.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/check.h"
#include "common/types.h"

// cudaStream_t
struct CUstream_st;

namespace fused_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

inline DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      return DType::kOther;
  }
}

// "float32", "Long": our own names for the dtypes we know, torch's for others.
inline const char* dtype_text(ScalarType type) {
  const DType dtype = dtype_of(type);
  return dtype == DType::kOther ? torch::headeronly::toString(type) : name(dtype);
}

inline std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  const std::string index = std::to_string(tensor.get_device_index());
  return tensor.is_cuda() ? "cuda:" + index : "another device type, index " + index;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && a.is_cpu() == b.is_cpu() &&
         a.get_device_index() == b.get_device_index();
}

// The precision argument of every op, "ieee" or "tf32".
inline Precision precision_from(const char* op, std::string_view text) {
  FO_CHECK_VALUE(text == "ieee" || text == "tf32", op,
                 ": precision must be 'ieee' or 'tf32', got '", text, "'");
  return text == "ieee" ? Precision::kIeee : Precision::kTf32;
}

// A function of a library that torch has loaded, or null. Symbols of libtorch_cuda, and those newer
// than our target, are found so at run time: thus the library also loads without them.
inline void* loaded_symbol(const char* library, const char* symbol) {
  void* handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  return handle ? dlsym(handle, symbol) : nullptr;
}

// Turns a failed call into torch's C ABI into std::runtime_error, with the original text where
// torch can tell it (2.13 and later; older ones have printed it on stderr).
inline void check_torch(AOTITorchError error, const char* what) {
  if (error == TORCH_SUCCESS) return;
  using Text = const char* (*)();
  static const auto text = reinterpret_cast<Text>(
      loaded_symbol("libtorch_cpu.so", "torch_exception_get_what_without_backtrace"));
  FO_CHECK_RUNTIME(false, what, " failed: ", text ? text() : "PyTorch's message stands on stderr");
}

inline CUstream_st* current_stream(const Tensor& tensor) {
  using Lookup = AOTITorchError (*)(std::int32_t, void**);
  static const auto lookup = reinterpret_cast<Lookup>(
      loaded_symbol("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"));
  FO_CHECK_RUNTIME(lookup != nullptr, "the current CUDA stream must come from libtorch_cuda.so, ",
                   "got a PyTorch without CUDA");
  void* stream = nullptr;
  check_torch(lookup(tensor.get_device_index(), &stream), "reading the current CUDA stream");
  return static_cast<CUstream_st*>(stream);
}

// An uninitialised contiguous tensor on the device of `like`.
inline Tensor empty(const Tensor& like, const std::vector<std::int64_t>& sizes, ScalarType type) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<std::int64_t>(sizes[i], 1);
  }
  std::int32_t device_type = 0;
  check_torch(aoti_torch_get_device_type(like.get(), &device_type), "reading a device type");
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                       strides.data(), to<std::int32_t>(from(type)), device_type,
                                       like.get_device_index(), &handle),
              "allocating the output");
  return Tensor(handle);
}

// Memory that somebody else owns, as a tensor on the device of `like`.
inline Tensor view_of(const Tensor& like, void* data, const std::vector<std::int64_t>& sizes,
                      const std::vector<std::int64_t>& strides, ScalarType type) {
  std::int32_t device_type = 0;
  check_torch(aoti_torch_get_device_type(like.get(), &device_type), "reading a device type");
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_create_tensor_from_blob(
                  data, static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), 0,
                  to<std::int32_t>(from(type)), device_type, like.get_device_index(), &handle),
              "making a view");
  return Tensor(handle);
}

// Calls another operator, by its full name, that returns one tensor. Errors raised inside arrive as
// RuntimeError whatever they were, so check the arguments first.
template <class... Arguments>
Tensor call_overload(const char* op, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  check_torch(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION), op);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

template <class... Arguments>
Tensor call_operator(const char* op, const Arguments&... arguments) {
  return call_overload(op, "", arguments...);
}

}  // namespace fused_ops
