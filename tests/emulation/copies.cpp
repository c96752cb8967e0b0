// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "emulation/block.h"
#include "emulation/fiber.h"

#if EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace emulation {

void forbid(void* memory, int size) {
  poison(memory, size);
#if EMULATION_ASAN
  __asan_poison_memory_region(memory, size);
#endif
}

void allow(void* memory, int size) {
#if EMULATION_ASAN
  __asan_unpoison_memory_region(memory, size);
#else
  (void)memory, (void)size;
#endif
}

void touch(const void* memory, int bytes) {
  char read[16];
  for (int i = 0; i < bytes; i += 16) {
    std::memcpy(read, static_cast<const char*>(memory) + i, std::min(bytes - i, 16));
    asm volatile("" ::"r"(read) : "memory");
  }
}

void CopyQueue::add(void* to, const void* from, int size, int bytes, Site site) {
  touch(from, bytes);
  forbid(to, size);
  copies_.push_back({to, from, size, bytes, site, group_});
}

void CopyQueue::wait(unsigned pending) {
  std::size_t done = 0;
  for (; done < copies_.size() && copies_[done].group + pending < group_; ++done) {
    const Copy& copy = copies_[done];
    allow(copy.to, copy.size);
    std::memcpy(copy.to, copy.from, copy.bytes);
    std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, copy.size - copy.bytes);
  }
  copies_.erase(copies_.begin(), copies_.begin() + done);
}

void CopyQueue::check_empty() {
  if (copies_.empty()) return;
  const Site site = copies_.front().site;
  fault("the thread returns without having waited for the asynchronous copy", site);
}

void CopyQueue::abandon() {
  for (const Copy& copy : copies_) allow(copy.to, copy.size);
  copies_.clear();
  group_ = 0;
}

}  // namespace emulation
