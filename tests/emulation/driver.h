// SPDX-License-Identifier: Apache-2.0
// A driver is a program that runs one kernel once: it reads the name, settings and tensors from its
// standard input and writes the results to its standard output. build.py talks to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "emulation/block.h"

namespace emulation {

// Memory as cudaMalloc gives it, but with nothing behind it that one may read.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<char*>(::operator new(bytes, kAlignment))) {}
  char* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::size_t bytes_;
  std::unique_ptr<char, Free> data_;
};

class Request {
 public:
  void read();   // of standard input
  void write();  // to standard output

  const std::string& kernel() const { return kernel_; }
  std::int64_t integer(const std::string& name) const;
  std::int64_t integer(const std::string& name, std::int64_t otherwise) const;

  template <class T>
  const T* input(const std::string& name) const {
    return reinterpret_cast<const T*>(find(name).data());
  }
  template <class T>
  std::int64_t size(const std::string& name) const {
    return static_cast<std::int64_t>(find(name).bytes() / sizeof(T));
  }
  // Filled with 0xFF bytes, which as floating numbers are NaN.
  template <class T>
  T* output(const std::string& name, std::int64_t size) {
    outputs_.emplace_back(name, Buffer(static_cast<std::size_t>(size) * sizeof(T)));
    const Buffer& buffer = outputs_.back().second;
    std::memset(buffer.data(), 0xff, buffer.bytes());
    return reinterpret_cast<T*>(buffer.data());
  }

 private:
  const Buffer& find(const std::string& name) const;

  std::string kernel_;
  std::map<std::string, std::int64_t> settings_;
  std::map<std::string, Buffer> inputs_;
  std::vector<std::pair<std::string, Buffer>> outputs_;
};

// At namespace scope: static Kernel forward("forward", [](Request& request) { ... });
struct Kernel {
  Kernel(const char* name, void (*run)(Request&));
};

}  // namespace emulation
