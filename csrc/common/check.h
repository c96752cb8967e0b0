// SPDX-License-Identifier: Apache-2.0
// Errors, in one wording: "op: argument must ..., got ...".
//
// What a kernel registered through torch's stable ABI throws reaches Python by pybind11's table of
// standard exceptions: std::invalid_argument as ValueError, std::runtime_error as RuntimeError, the
// text unchanged. No standard exception becomes TypeError, so a wrong dtype is a ValueError here.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fused_ops {

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// A list of sizes as Python prints a tuple: "(2, 3)".
template <class Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string text = "(";
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + (sizes.size() == 1 ? ",)" : ")");
}

}  // namespace fused_ops

// The text is built only on failure; give its parts separated by commas.
#define FO_CHECK_AS(Exception, condition, ...)                           \
  do {                                                                   \
    if (!(condition)) throw Exception(::fused_ops::concat(__VA_ARGS__)); \
  } while (0)

#define FO_CHECK_VALUE(condition, ...) FO_CHECK_AS(std::invalid_argument, condition, __VA_ARGS__)
#define FO_CHECK_RUNTIME(condition, ...) FO_CHECK_AS(std::runtime_error, condition, __VA_ARGS__)
