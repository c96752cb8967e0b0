// SPDX-License-Identifier: Apache-2.0
// fused_ops._C: the planner and the build's facts, for people and for fused_ops.explain(). Host
// code only; knows neither torch nor CUDA.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "common/check.h"
#include "common/plan.h"

namespace py = pybind11;
using namespace fused_ops;

namespace {

using Sizes = std::map<std::string, std::vector<std::int64_t>>;

py::dict build_info_dict() {
  const BuildInfo& info = build_info();
  py::dict facts;
  facts["version"] = info.version;
  facts["cuda_version"] =
      info.cuda_version.empty() ? py::object(py::none()) : py::object(py::str(info.cuda_version));
  facts["archs"] = info.arch_names;
  facts["torch_target"] = info.torch_target;
  facts["compiler"] = info.compiler;
  return facts;
}

py::dict plan_dict(std::string op, Sizes shapes, const std::string& dtype,
                   const std::string& precision, std::optional<std::pair<int, int>> capability,
                   std::optional<Sizes> strides, bool backward) {
  Query query;
  query.op = std::move(op);
  query.shapes = std::move(shapes);
  query.strides = std::move(strides).value_or(Sizes{});
  query.dtype = dtype_from_name(dtype);
  FO_CHECK_VALUE(query.dtype != DType::kOther, query.op,
                 ": dtype must be float32, float64, float16 or bfloat16, got ", dtype);
  FO_CHECK_VALUE(precision == "ieee" || precision == "tf32", query.op,
                 ": precision must be 'ieee' or 'tf32', got '", precision, "'");
  query.precision = precision == "ieee" ? Precision::kIeee : Precision::kTf32;
  if (capability) query.device = Capability{capability->first, capability->second};
  query.backward = backward;

  const Plan plan = fused_ops::plan(query);
  py::dict answer;  // kernel and tile are None unless a kernel of ours would run
  answer["path"] = name(plan.path);
  answer["kernel"] =
      !plan.kernel.empty() ? py::object(py::str(plan.kernel)) : py::object(py::none());
  answer["tile"] = plan.tile[0] ? py::object(py::cast(plan.tile)) : py::object(py::none());
  answer["launches"] = plan.launches;
  answer["workspace_bytes"] = plan.workspace_bytes;
  answer["reasons"] = plan.reasons;
  return answer;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The kernel planner and facts about this build of fused_ops.";
  m.def("build_info", &build_info_dict,
        "Version, CUDA version (None without the CUDA library), architectures, the oldest torch "
        "that the binaries run with, and the compiler.");
  m.def("plan", &plan_dict, py::arg("op"), py::arg("shapes"), py::arg("dtype"),
        py::arg("precision"), py::arg("capability"), py::arg("strides") = py::none(),
        py::arg("backward") = false,
        "Which code would run: path ('kernel', 'cublas' or 'composition'), kernel, tile, launches, "
        "workspace_bytes and, where no kernel fits, the reasons. capability None means CPU "
        "tensors; strides (in elements) of arguments that are not contiguous.");
}
