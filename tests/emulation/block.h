// SPDX-License-Identifier: Apache-2.0
// A thread block on the CPU: every CUDA thread is a fiber, and the warp that runs goes on until all
// its threads wait for others, so that a missing barrier lets it overtake them by a whole phase.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulation {

// A place in a kernel: as a default argument, the caller's.
struct Site {
  const char* file = "";
  int line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// What a kernel must not do. It ends the launch.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] void fault(const std::string& text, Site site);

// Of the choice of warps, lanes and blocks; the same seed gives the same run.
void set_seed(std::uint64_t seed);

constexpr int kWarpSize = 32;

// What memory holds that nobody has written: bytes 0xCD and 0xFF in turn. As a number of 16 or 32
// bits that is NaN, which no product with zero hides; as an integer far from all that is useful.
void poison(void* memory, std::size_t bytes);

// For instructions, of the thread that calls -----------------------------------------------------

unsigned lane();

void* shared_memory(std::size_t bytes);
void check_shared(const void* address, std::size_t bytes, std::size_t alignment, const char* name,
                  Site site);
// Shared memory's own addresses, 32 bits wide and not beginning at 0.
std::uint32_t shared_address(const void* pointer);
const void* shared_pointer(std::uint32_t address);

// A warp instruction: the lanes of `mask` meet, the last one computes for all of them.
// `operands[i]` is what lane i brought; null outside the mask. An aligned instruction must be the
// same one in the program for all lanes, any other only of the same kind.
using Combine = void (*)(void* const* operands, std::uint32_t mask);
enum class Aligned : bool { kNo, kYes };
void meet_warp(const char* name, Aligned aligned, std::uint32_t mask, void* operands,
               Combine combine, Site site);

// __syncthreads and its kin: the block's living threads meet.
struct Votes {
  int yes;
  int all;
};
Votes meet_block(const char* name, bool vote, Site site);

// For meetings of other kinds: the thread waits until somebody wakes all who wait for `key`. Being
// woken need not mean that what the thread waits for has come; it looks, and waits again.
void wait_for(const void* key, const char* name, Site site);
void wake(const void* key);
// Of blocks, as they run one after another: tells what belongs to an earlier one.
std::uint64_t block_number();

// Bytes that a copy is on its way to: whoever touches them has not waited, or was not waited for.
void forbid(void* memory, int size);
void allow(void* memory, int size);
// So that an address out of bounds is found where the copy is asked for.
void touch(const void* memory, int bytes);

// Asynchronous means late: a copy is queued, and done only by the wait that covers its group.
// Until then its destination must not be touched.
struct Copy {
  void* to;
  const void* from;
  int size;
  int bytes;  // so many of `size` are read, the rest become zeros
  Site site;
  std::uint64_t group;
};

class CopyQueue {
 public:
  void add(void* to, const void* from, int size, int bytes, Site site);
  void commit() { ++group_; }
  void wait(unsigned pending);
  void check_empty();  // at a thread's end
  void abandon();

 private:
  std::vector<Copy> copies_;
  std::uint64_t group_ = 0;  // the one that is open
};
CopyQueue& copies();

// For tests --------------------------------------------------------------------------------------

// Runs `body` as every thread of every block, one block after another.
void run(unsigned grid_x, unsigned threads, std::size_t shared_bytes,
         const std::function<void()>& body);

template <class Kernel, class... Params>
void launch(Kernel kernel, unsigned grid_x, unsigned threads, std::size_t shared_bytes,
            const Params&... params) {
  run(grid_x, threads, shared_bytes, [&] { kernel(params...); });
}

}  // namespace emulation
