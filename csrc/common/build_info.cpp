// SPDX-License-Identifier: Apache-2.0
#include "common/build_info.h"

#include <algorithm>
#include <sstream>

namespace fused_ops {
namespace {

Arch parse(const std::string& name) {
  Arch arch;
  std::size_t end = 0;
  arch.number = std::stoi(name, &end);  // setup.py has checked the form
  arch.exact = name.compare(end, 1, "a") == 0;
  arch.ptx = name.find("+PTX") != std::string::npos;
  return arch;
}

BuildInfo read_facts() {
  BuildInfo info;
  info.version = FUSED_OPS_VERSION;
  info.cuda_version = FUSED_OPS_CUDA_VERSION;
  info.torch_target = FUSED_OPS_TORCH_TARGET;
#ifdef __clang__
  info.compiler = "clang " __clang_version__;
#else
  info.compiler = "g++ " __VERSION__;
#endif
  std::istringstream list(FUSED_OPS_CUDA_ARCHS);
  for (std::string name; std::getline(list, name, ';');) {
    info.arch_names.push_back(name);
    info.archs.push_back(parse(name));
  }
  return info;
}

int number(Capability device) {
  return device.major * 10 + device.minor;
}

}  // namespace

const BuildInfo& build_info() {
  static const BuildInfo info = read_facts();
  return info;
}

bool runs_on(const Arch& arch, Capability device) {
  if (arch.exact) return number(device) == arch.number;
  const bool machine_code = device.major == arch.number / 10 && device.minor >= arch.number % 10;
  return machine_code || (arch.ptx && number(device) >= arch.number);
}

bool build_runs_on(Capability device) {
  const auto& archs = build_info().archs;
  return std::any_of(archs.begin(), archs.end(),
                     [&](const Arch& arch) { return runs_on(arch, device); });
}

bool build_runs_sm90a_on(Capability device) {
  const auto& archs = build_info().archs;
  return number(device) == 90 && std::any_of(archs.begin(), archs.end(), [](const Arch& arch) {
           return arch.number == 90 && arch.exact;
         });
}

std::string build_reason(Capability device) {
  const BuildInfo& info = build_info();
  if (info.archs.empty()) return "this build of fused-ops has no CUDA library";
  std::string names;
  for (const std::string& name : info.arch_names) names += (names.empty() ? "" : ";") + name;
  return "this build of fused-ops has kernels for the architectures " + names +
         ", the device has compute capability " + std::to_string(device.major) + "." +
         std::to_string(device.minor);
}

}  // namespace fused_ops
