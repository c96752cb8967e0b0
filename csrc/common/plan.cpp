// SPDX-License-Identifier: Apache-2.0
#include "common/plan.h"

#include "common/check.h"

namespace fused_ops {
namespace {

std::map<std::string, Planner>& planners() {
  static std::map<std::string, Planner> map;  // a function's own: rooms register at load time
  return map;
}

}  // namespace

Registration::Registration(const char* op, Planner planner) {
  planners()[op] = planner;
}

const std::vector<std::int64_t>& Query::shape(const char* argument, std::size_t least_axes) const {
  const auto found = shapes.find(argument);
  FO_CHECK_VALUE(found != shapes.end(), op, ": shapes must hold '", argument, "', got none");
  FO_CHECK_VALUE(found->second.size() >= least_axes, op, ": ", argument, " must have at least ",
                 least_axes, " axes, got ", shape_text(found->second));
  return found->second;
}

std::vector<std::int64_t> Query::strides_of(const char* argument) const {
  const auto& sizes = shape(argument, 0);
  const auto given = strides.find(argument);
  if (given != strides.end()) {
    FO_CHECK_VALUE(given->second.size() == sizes.size(), op, ": strides of ", argument,
                   " must have ", sizes.size(), " entries, got ", shape_text(given->second));
    return given->second;
  }
  std::vector<std::int64_t> contiguous(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) contiguous[i - 1] = contiguous[i] * sizes[i];
  return contiguous;
}

Plan plan(const Query& query) {
  const auto found = planners().find(query.op);
  if (found == planners().end()) {
    std::string known;
    for (const auto& entry : planners()) known += (known.empty() ? "" : ", ") + entry.first;
    FO_CHECK_VALUE(false, "plan: op must be one of ", known, ", got ", query.op);
  }
  return found->second(query);
}

}  // namespace fused_ops
