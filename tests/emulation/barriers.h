// SPDX-License-Identifier: Apache-2.0
// Meetings of a part of a block: barriers in shared memory (mbarrier) and those with a number.
#pragma once

#include <cstdint>

#include "emulation/block.h"

namespace emulation {

// A barrier in shared memory: a phase ends with its last arrival, and the next one begins.
void mbarrier_init(std::uint64_t* barrier, int count, Site site);
void mbarrier_arrive(std::uint64_t* barrier, Site site);
void mbarrier_wait(std::uint64_t* barrier, int parity, Site site);

// bar.sync: `threads` threads of whole warps meet, wherever in the program they are.
void named_barrier(int barrier, int threads, Site site);

}  // namespace emulation
