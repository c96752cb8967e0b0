// SPDX-License-Identifier: Apache-2.0
// The meaning of the wrappers in csrc/common/cuda/sm90a/instructions.cuh.
#pragma once

#include "emulation/sm80.h"

namespace fused_ops::sm90a {

// The compiler's business, but a warp's lanes must be together.
template <int registers>
void give_registers(emulation::Site site = emulation::Site::here()) {
  static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0);
  emulation::meet_warp("give_registers", emulation::Aligned::kYes, 0xffffffff, nullptr, nullptr,
                       site);
}

template <int registers>
void take_registers(emulation::Site site = emulation::Site::here()) {
  static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0);
  emulation::meet_warp("take_registers", emulation::Aligned::kYes, 0xffffffff, nullptr, nullptr,
                       site);
}

}  // namespace fused_ops::sm90a
