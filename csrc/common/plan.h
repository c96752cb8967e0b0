// SPDX-License-Identifier: Apache-2.0
// The planner: which code would run for given shapes, dtypes and device, or why no kernel would.
//
// Each room answers in its plan.cpp, by a typed function that its launcher calls on every run; it
// must be cheap, so a Plan allocates nothing unless there are reasons to tell. The same room also
// registers a by-name front to that function for `fused_ops._C.plan`, which serves people.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/build_info.h"
#include "common/types.h"

namespace fused_ops {

enum class Path : std::uint8_t {
  kKernel,       // a kernel of this library
  kCublas,       // PyTorch's own matmul, by choice: nothing of ours would be better
  kComposition,  // the PyTorch composition, because no kernel fits; `reasons` says why
};

constexpr const char* name(Path path) {
  switch (path) {
    case Path::kKernel:
      return "kernel";
    case Path::kCublas:
      return "cublas";
    case Path::kComposition:
      break;
  }
  return "composition";
}

struct Plan {
  Path path = Path::kKernel;
  std::string kernel;         // e.g. "forward_sm80"
  std::array<int, 3> tile{};  // e.g. {128, 128, 16}; the room says what each is, 0 is unused
  int launches = 0;           // of our kernels
  std::int64_t workspace_bytes = 0;
  std::vector<std::string> reasons;  // all of them at once; empty unless `path` is kComposition
};

// The plan of a room that has no kernel for the case yet.
inline Plan composition(std::string reason) {
  Plan plan;
  plan.path = Path::kComposition;
  plan.reasons.push_back(std::move(reason));
  return plan;
}

// What `_C.plan` was asked, by name.
struct Query {
  std::string op;
  std::map<std::string, std::vector<std::int64_t>> shapes;
  std::map<std::string, std::vector<std::int64_t>> strides;  // absent names are contiguous
  DType dtype = DType::kFloat32;
  Precision precision = Precision::kIeee;
  std::optional<Capability> device;  // none: CPU tensors
  bool backward = false;

  // The shape of one argument; invalid_argument when it is missing or has too few axes.
  const std::vector<std::int64_t>& shape(const char* argument, std::size_t least_axes) const;
  // Its strides, in elements.
  std::vector<std::int64_t> strides_of(const char* argument) const;
};

using Planner = Plan (*)(const Query&);

// A room's plan.cpp holds one static Registration; nothing else needs to know the room.
struct Registration {
  Registration(const char* op, Planner planner);
};

// invalid_argument for an unknown op, naming the known ones.
Plan plan(const Query& query);

}  // namespace fused_ops
