// SPDX-License-Identifier: Apache-2.0
// What this build holds, and which devices can run it. The facts come from setup.py.
#pragma once

#include <string>
#include <vector>

namespace fused_ops {

struct Capability {
  int major = 0;
  int minor = 0;
};

// One entry of FUSED_OPS_CUDA_ARCHS: "80+PTX" is {80, false, true}, "90a" is {90, true, false}.
struct Arch {
  int number = 0;
  bool exact = false;  // an "a" variant: its instructions exist on this very architecture only
  bool ptx = false;    // carries PTX too, which the driver can compile for any later device
};

struct BuildInfo {
  std::string version;
  std::string cuda_version;  // empty without the CUDA library
  std::vector<std::string> arch_names;
  std::vector<Arch> archs;
  std::string torch_target;  // the oldest torch that the binaries run with
  std::string compiler;
};

const BuildInfo& build_info();

// Machine code for sm_XY runs on devices of major X and minor Y or higher; PTX on Y.X and all
// later.
bool runs_on(const Arch& arch, Capability device);

// Can the device run the kernels that are compiled for every architecture of the build (`_sm80`)?
bool build_runs_on(Capability device);

// Can it run those compiled for Hopper alone (`_sm90a`)?
bool build_runs_sm90a_on(Capability device);

// Why build_runs_on() said no.
std::string build_reason(Capability device);

}  // namespace fused_ops
