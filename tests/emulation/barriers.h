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

// The phase also waits for so many bytes, which bulk copies bring. Those are as late as can be:
// done by a thread that waits for the phase, when nothing else is missing.
void mbarrier_arrive_expect(std::uint64_t* barrier, int bytes, Site site);
void bulk_copy(void* shared, const void* global, int bytes, std::uint64_t* barrier, Site site);
void check_bulk_copies();  // at a block's end
void abandon_bulk_copies();

// bar.sync: `threads` threads of whole warps meet, wherever in the program they are.
void named_barrier(int barrier, int threads, Site site);

}  // namespace emulation
