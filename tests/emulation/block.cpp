// SPDX-License-Identifier: Apache-2.0
#include "emulation/block.h"

#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <numeric>
#include <sstream>
#include <utility>

#include "emulation/barriers.h"
#include "emulation/cuda.h"
#include "emulation/fiber.h"
#include "emulation/warpgroup.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace emulation {
namespace {

std::string text_of(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

bool same(const char* a, const char* b) {
  return a == b || std::strcmp(a, b) == 0;
}
bool same(Site a, Site b) {
  return a.line == b.line && same(a.file, b.file);
}

// Thrown out of the wait of a thread whose block has already failed, to clear its stack.
struct Cancelled {};

class Random {
 public:
  void seed(std::uint64_t seed) { state_ = seed * 0x9E3779B97F4A7C15u + 1; }
  unsigned below(unsigned bound) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>((state_ >> 32) * bound >> 32);
  }

 private:
  std::uint64_t state_ = 1;
};

struct Thread {
  explicit Thread(unsigned index);
  unsigned index;
  bool started = false;
  bool done = false;
  const char* waits_in = nullptr;  // the instruction
  Site site;
  const void* key = nullptr;  // of wait_for
  CopyQueue copies;
  WarpgroupQueue products;
  Fiber fiber;
};

struct Meeting {
  const char* name;
  Aligned aligned;
  std::uint32_t mask;
  std::uint32_t arrived;
  Combine combine;
  Site site;
  void* operands[kWarpSize];
};

struct Warp {
  std::uint32_t ready = 0;  // lanes that can run
  std::uint32_t done = 0;   // lanes that have returned, or do not exist
  bool upwards = true;      // the order in which its lanes get their turns
  std::vector<Meeting> meetings;
};

class Block {
 public:
  void run(unsigned threads, std::size_t shared_bytes, void* shared,
           const std::function<void()>& body);
  void wait(const char* name, Site site);
  void wait_for(const void* key, const char* name, Site site);
  void wake(const void* key);
  void meet_warp(const char* name, Aligned aligned, std::uint32_t mask, void* operands,
                 Combine combine, Site site);
  Votes meet_block(const char* name, bool vote, Site site);
  [[noreturn]] void live(Thread* thread);  // a fiber's life: one CUDA thread after another

  Thread* current = nullptr;
  std::uint64_t number = 0;
  Random random;
  char* shared = nullptr;
  std::size_t shared_bytes = 0;

 private:
  Thread* pick();
  bool choose_warp();
  void resume(Thread* thread);
  void hand_over(Fiber& from, Thread* next);
  void finish(Thread* thread);
  void open_barrier();
  std::string deadlock() const;

  std::vector<std::unique_ptr<Thread>> pool_;  // kept from block to block
  std::vector<Warp> warps_;
  std::vector<unsigned> candidates_;
  Fiber home_;  // of run()
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr error_;
  unsigned threads_ = 0;
  unsigned warp_ = 0;     // the one that has its turn
  unsigned starved_ = 0;  // the one that gets its turn last
  unsigned living_ = 0;
  // The barrier of __syncthreads.
  unsigned arrived_ = 0;
  const char* barrier_name_ = nullptr;
  Site barrier_site_;
  int votes_ = 0;
  Votes result_ = {};
};

Block block;

Thread::Thread(unsigned index)
    : index(index),
      fiber([](void* self) { block.live(static_cast<Thread*>(self)); }, this, index) {}

unsigned lane_of(const Thread* thread) {
  return thread->index % kWarpSize;
}

// A warp at random, but the starved one only if no other can run: so each warp falls behind the
// others for a while, as far as the barriers let it. Then another one is starved.
bool Block::choose_warp() {
  const auto count = static_cast<unsigned>(warps_.size());
  candidates_.clear();
  for (unsigned i = 0; i < count; ++i) {
    if (warps_[i].ready != 0 && i != starved_) candidates_.push_back(i);
  }
  if (!candidates_.empty()) {
    warp_ = candidates_[random.below(static_cast<unsigned>(candidates_.size()))];
  } else if (warps_[starved_].ready != 0) {
    warp_ = starved_;
    starved_ = random.below(count);
  } else {
    return false;
  }
  warps_[warp_].upwards = random.below(2) == 0;
  return true;
}

// Who runs next: a lane of the same warp as long as there is one, else a warp at random.
Thread* Block::pick() {
  if (error_) {  // everybody who is in the middle of something leaves it
    for (unsigned i = 0; i < threads_; ++i) {
      if (pool_[i]->started && !pool_[i]->done) return pool_[i].get();
    }
    return nullptr;
  }
  if (warps_[warp_].ready == 0 && !choose_warp()) return nullptr;
  const Warp& warp = warps_[warp_];
  const unsigned from = current ? lane_of(current) : 0;
  const std::uint32_t above = warp.ready & ~((std::uint64_t{2} << from) - 1);
  const std::uint32_t below = warp.ready & ((std::uint32_t{1} << from) - 1);
  std::uint32_t first = warp.upwards ? above : below;
  if (first == 0) first = warp.ready;
  const int lane = warp.upwards ? __builtin_ctz(first) : 31 - __builtin_clz(first);
  return pool_[warp_ * kWarpSize + lane].get();
}

void Block::resume(Thread* thread) {
  current = thread;
  if (thread == nullptr) return;
  thread->started = true;
  thread->waits_in = nullptr;
  threadIdx = {thread->index, 0, 0};
}

void Block::hand_over(Fiber& from, Thread* next) {
  resume(next);
  from.hand_over_to(next ? next->fiber : home_);
}

void Block::wait(const char* name, Site site) {
  Thread* self = current;
  self->waits_in = name;
  self->site = site;
  Thread* next = pick();
  if (next == self) {
    resume(self);
  } else {
    hand_over(self->fiber, next);
  }
  if (error_) throw Cancelled();
}

void Block::wait_for(const void* key, const char* name, Site site) {
  current->key = key;
  warps_[warp_].ready &= ~(std::uint32_t{1} << lane_of(current));
  wait(name, site);
}

void Block::wake(const void* key) {
  for (unsigned i = 0; i < threads_; ++i) {
    Thread& thread = *pool_[i];
    if (thread.key != key) continue;
    thread.key = nullptr;
    warps_[i / kWarpSize].ready |= std::uint32_t{1} << i % kWarpSize;
  }
}

void Block::meet_warp(const char* name, Aligned aligned, std::uint32_t mask, void* operands,
                      Combine combine, Site site) {
  Warp& warp = warps_[warp_];
  const unsigned self = lane_of(current);
  const std::uint32_t bit = std::uint32_t{1} << self;
  if ((mask & bit) == 0) fault(std::string(name) + ": the mask does not name the lane", site);
  if ((mask & warp.done) != 0) {
    fault(std::string(name) + ": the mask names lanes that have returned", site);
  }
  std::size_t at = 0;
  while (at < warp.meetings.size() && (warp.meetings[at].mask & mask) == 0) ++at;
  if (at == warp.meetings.size()) {
    warp.meetings.push_back({name, aligned, mask, 0, combine, site, {}});
  }
  Meeting& meeting = warp.meetings[at];
  if (!same(meeting.name, name) || meeting.mask != mask || meeting.combine != combine ||
      (aligned == Aligned::kYes && !same(meeting.site, site))) {
    fault("divergent warp: one lane is in " + std::string(name) + ", another in " + meeting.name +
              " at " + text_of(meeting.site) + (meeting.mask == mask ? "" : " with another mask"),
          site);
  }
  meeting.operands[self] = operands;
  meeting.arrived |= bit;
  warp.ready &= ~bit;
  if (meeting.arrived == mask) {
    if (combine) combine(meeting.operands, mask);
    warp.ready |= mask;
    if (at + 1 != warp.meetings.size()) meeting = warp.meetings.back();
    warp.meetings.pop_back();
    return;
  }
  wait(name, site);
}

void Block::open_barrier() {
  result_ = {votes_, static_cast<int>(arrived_)};
  arrived_ = 0;
  votes_ = 0;
  for (Warp& warp : warps_) warp.ready = ~warp.done;
}

Votes Block::meet_block(const char* name, bool vote, Site site) {
  if (arrived_ == 0) {
    barrier_name_ = name;
    barrier_site_ = site;
  } else if (!same(barrier_site_, site) || !same(barrier_name_, name)) {
    fault("divergent block: one thread is in " + std::string(name) + ", another in " +
              barrier_name_ + " at " + text_of(barrier_site_),
          site);
  }
  warps_[warp_].ready &= ~(std::uint32_t{1} << lane_of(current));
  ++arrived_;
  votes_ += vote;
  if (arrived_ == living_) {
    open_barrier();
    choose_warp();
  }
  wait(name, site);
  return result_;
}

void Block::finish(Thread* thread) {
  const std::uint32_t bit = std::uint32_t{1} << lane_of(thread);
  Warp& warp = warps_[thread->index / kWarpSize];
  thread->done = true;
  warp.ready &= ~bit;
  warp.done |= bit;
  --living_;
  if (error_) return;
  for (const Meeting& meeting : warp.meetings) {
    if ((meeting.mask & bit) != 0) {
      error_ = std::make_exception_ptr(Fault(text_of(meeting.site) + ": " + meeting.name +
                                             ": thread " + std::to_string(thread->index) +
                                             " has returned, its mask names it"));
      return;
    }
  }
  if (arrived_ > 0 && arrived_ == living_) open_barrier();
}

void Block::live(Thread* thread) {
  for (;;) {
    try {
      (*body_)();
      thread->copies.check_empty();
      thread->products.check_empty();
    } catch (const Cancelled&) {
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
    finish(thread);
    hand_over(thread->fiber, pick());
  }
}

std::string Block::deadlock() const {
  std::ostringstream text;
  text << "deadlock in block " << blockIdx.x << ":";
  for (unsigned i = 0; i < threads_;) {
    const Thread& first = *pool_[i];
    unsigned last = i;
    const auto like = [&](const Thread& other) {
      return other.done == first.done &&
             (first.done || (same(other.waits_in, first.waits_in) && same(other.site, first.site)));
    };
    while (last + 1 < threads_ && like(*pool_[last + 1])) ++last;
    text << (i > 0 ? ", " : " ") << "threads " << i << " to " << last;
    if (first.done) {
      text << " have returned";
    } else {
      text << " wait in " << first.waits_in << " at " << text_of(first.site);
    }
    i = last + 1;
  }
  return text.str();
}

void Block::run(unsigned threads, std::size_t bytes, void* memory,
                const std::function<void()>& body) {
  ++number;
  threads_ = living_ = threads;
  shared = static_cast<char*>(memory);
  shared_bytes = bytes;
  body_ = &body;
  error_ = nullptr;
  arrived_ = 0;
  votes_ = 0;
  warps_.assign((threads + kWarpSize - 1) / kWarpSize, Warp());
  while (pool_.size() < threads) {
    pool_.push_back(std::make_unique<Thread>(static_cast<unsigned>(pool_.size())));
  }
  for (unsigned i = 0; i < threads; ++i) {
    pool_[i]->started = pool_[i]->done = false;
    pool_[i]->key = nullptr;
    pool_[i]->copies.abandon();
    pool_[i]->products.abandon();
    warps_[i / kWarpSize].ready |= std::uint32_t{1} << i % kWarpSize;
  }
  for (Warp& warp : warps_) warp.done = ~warp.ready;
  starved_ = random.below(static_cast<unsigned>(warps_.size()));
  choose_warp();

  hand_over(home_, pick());
  if (!error_ && living_ > 0) error_ = std::make_exception_ptr(Fault(deadlock()));
  if (!error_) {
    try {
      check_bulk_copies();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  if (error_) {
    Thread* next = pick();
    if (next) hand_over(home_, next);
    for (unsigned i = 0; i < threads; ++i) {
      pool_[i]->copies.abandon();
      pool_[i]->products.abandon();
    }
    abandon_bulk_copies();
    std::rethrow_exception(error_);
  }
}

}  // namespace

void fault(const std::string& text, Site site) {
  std::ostringstream all;
  all << text_of(site) << ": block " << blockIdx.x << ", thread " << threadIdx.x << ": " << text;
  throw Fault(all.str());
}

void set_seed(std::uint64_t seed) {
  block.random.seed(seed);
}

void poison(void* memory, std::size_t bytes) {
  auto* byte = static_cast<unsigned char*>(memory);
  for (std::size_t i = 0; i < bytes; ++i) byte[i] = i % 2 == 0 ? 0xCD : 0xFF;
}

unsigned lane() {
  return threadIdx.x % kWarpSize;
}

void* shared_memory(std::size_t bytes) {
  if (bytes > block.shared_bytes) {
    throw Fault("the kernel uses " + std::to_string(bytes) +
                " bytes of shared memory, the launch " + "gave " +
                std::to_string(block.shared_bytes));
  }
  return block.shared;
}

void check_shared(const void* address, std::size_t bytes, std::size_t alignment, const char* name,
                  Site site) {
  const auto begin = reinterpret_cast<std::uintptr_t>(block.shared);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (at < begin || at + bytes > begin + block.shared_bytes) {
    fault(std::string(name) + ": the address lies outside of shared memory", site);
  }
  if (at % alignment != 0) {
    fault(std::string(name) + ": the address in shared memory is not aligned to " +
              std::to_string(alignment) + " bytes",
          site);
  }
}

// Devices keep the first KiB for themselves.
constexpr std::uint32_t kFirstAddress = 1024;

std::uint32_t shared_address(const void* pointer) {
  return kFirstAddress +
         static_cast<std::uint32_t>(static_cast<const char*>(pointer) - block.shared);
}

const void* shared_pointer(std::uint32_t address) {
  return block.shared + (static_cast<std::int64_t>(address) - kFirstAddress);
}

void wait_for(const void* key, const char* name, Site site) {
  block.wait_for(key, name, site);
}
void wake(const void* key) {
  block.wake(key);
}
std::uint64_t block_number() {
  return block.number;
}

void meet_warp(const char* name, Aligned aligned, std::uint32_t mask, void* operands,
               Combine combine, Site site) {
  block.meet_warp(name, aligned, mask, operands, combine, site);
}

Votes meet_block(const char* name, bool vote, Site site) {
  return block.meet_block(name, vote, site);
}

CopyQueue& copies() {
  return block.current->copies;
}

WarpgroupQueue& warpgroup() {
  return block.current->products;
}

void run(unsigned grid_x, unsigned threads, std::size_t shared_bytes,
         const std::function<void()>& body) {
  if (threads == 0 || threads > 1024) throw Fault("a block has 1 to 1024 threads");
  gridDim = dim3(grid_x);
  blockDim = dim3(threads);
  std::vector<unsigned> order(grid_x);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned i = grid_x; i > 1; --i) std::swap(order[i - 1], order[block.random.below(i)]);
  // Of the exact size, so that AddressSanitizer sees an access behind it.
  const std::align_val_t alignment{1024};
  struct Free {
    std::align_val_t alignment;
    void operator()(void* memory) const { ::operator delete(memory, alignment); }
  };
  const std::unique_ptr<void, Free> shared(::operator new(shared_bytes, alignment), {alignment});
  for (unsigned index : order) {
    blockIdx = {index, 0, 0};
    poison(shared.get(), shared_bytes);
    block.run(threads, shared_bytes, shared.get(), body);
  }
}

}  // namespace emulation
