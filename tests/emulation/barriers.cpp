// SPDX-License-Identifier: Apache-2.0
#include "emulation/barriers.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace emulation {
namespace {

// What the barrier's own eight bytes hold, so that whoever overwrites them is found.
constexpr std::uint64_t kMark = 0x6d62617272696572;

struct MemoryBarrier {
  std::uint64_t block;  // for which it was initialised
  int count;
  int missing;  // arrivals in this phase
  std::uint64_t phase = 0;
  std::int64_t bytes = 0;  // that are still to come in this phase

  void end_if_complete(const void* barrier) {
    if (missing > 0 || bytes != 0) return;
    missing = count;
    ++phase;
    wake(barrier);
  }
};
std::map<const void*, MemoryBarrier> memory_barriers;

MemoryBarrier& find(const std::uint64_t* barrier, const char* name, Site site) {
  check_shared(barrier, 8, 8, name, site);
  const auto found = memory_barriers.find(barrier);
  if (found == memory_barriers.end() || found->second.block != block_number()) {
    fault(std::string(name) + ": the barrier has not been initialised", site);
  }
  if (*barrier != kMark) fault(std::string(name) + ": the barrier has been overwritten", site);
  return found->second;
}

struct BulkCopy {
  void* to;
  const void* from;
  int size;
  const void* barrier;
  Site site;
};
std::vector<BulkCopy> bulk_copies;

void deliver(const void* barrier, MemoryBarrier& state) {
  std::vector<BulkCopy> others;
  for (const BulkCopy& copy : bulk_copies) {
    if (copy.barrier != barrier) {
      others.push_back(copy);
      continue;
    }
    allow(copy.to, copy.size);
    std::memcpy(copy.to, copy.from, copy.size);
    state.bytes -= copy.size;
  }
  bulk_copies = others;
  state.end_if_complete(barrier);
}

struct NumberedBarrier {
  std::uint64_t block = 0;
  int threads = 0;
  int arrived = 0;
  std::uint64_t turn = 0;
};
NumberedBarrier numbered_barriers[16];

}  // namespace

void mbarrier_init(std::uint64_t* barrier, int count, Site site) {
  check_shared(barrier, 8, 8, "mbarrier_init", site);
  if (count < 1) fault("mbarrier_init: the count must be positive", site);
  *barrier = kMark;
  memory_barriers[barrier] = {block_number(), count, count};
}

void mbarrier_arrive(std::uint64_t* barrier, Site site) {
  MemoryBarrier& state = find(barrier, "mbarrier_arrive", site);
  if (state.missing == 0) fault("mbarrier_arrive: nobody is missing in this phase", site);
  --state.missing;
  state.end_if_complete(barrier);
  if (state.missing == 0) wake(barrier);  // to do the copies
}

void mbarrier_arrive_expect(std::uint64_t* barrier, int bytes, Site site) {
  find(barrier, "mbarrier_arrive_expect", site).bytes += bytes;
  mbarrier_arrive(barrier, site);
}

void bulk_copy(void* shared, const void* global, int bytes, std::uint64_t* barrier, Site site) {
  find(barrier, "bulk_copy", site);
  check_shared(shared, bytes, 16, "bulk_copy", site);
  if (bytes <= 0 || bytes % 16 != 0) fault("bulk_copy: copies multiples of 16 bytes", site);
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0) {
    fault("bulk_copy: the address in global memory is not aligned", site);
  }
  touch(global, bytes);
  forbid(shared, bytes);
  bulk_copies.push_back({shared, global, bytes, barrier, site});
}

void check_bulk_copies() {
  if (bulk_copies.empty()) return;
  const Site site = bulk_copies.front().site;
  fault("the block ends and nobody has waited for the bulk copy", site);
}

void abandon_bulk_copies() {
  for (const BulkCopy& copy : bulk_copies) allow(copy.to, copy.size);
  bulk_copies.clear();
}

void mbarrier_wait(std::uint64_t* barrier, int parity, Site site) {
  if (parity != 0 && parity != 1) fault("mbarrier_wait: a parity is 0 or 1", site);
  for (;;) {
    MemoryBarrier& state = find(barrier, "mbarrier_wait", site);
    if (static_cast<int>(state.phase % 2) == parity && state.missing == 0) deliver(barrier, state);
    if (static_cast<int>(state.phase % 2) != parity) return;
    wait_for(barrier, "mbarrier_wait", site);
  }
}

void named_barrier(int barrier, int threads, Site site) {
  // The hardware counts whole warps, wherever their lanes are.
  meet_warp("named_barrier", Aligned::kYes, 0xffffffff, nullptr, nullptr, site);
  NumberedBarrier& state = numbered_barriers[barrier];
  if (state.block != block_number()) state = {block_number(), threads, 0, 0};
  if (state.arrived == 0) state.threads = threads;
  if (state.threads != threads) {
    fault("named_barrier: others who wait there expect " + std::to_string(state.threads) +
              " threads, not " + std::to_string(threads),
          site);
  }
  const std::uint64_t turn = state.turn;
  if (++state.arrived == threads) {
    state.arrived = 0;
    ++state.turn;
    wake(&state);
  }
  while (state.turn == turn) wait_for(&state, "named_barrier", site);
}

}  // namespace emulation
