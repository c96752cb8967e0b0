// SPDX-License-Identifier: Apache-2.0
#include "emulation/warpgroup.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "emulation/cuda.h"
#include "emulation/tensor_core.h"

namespace emulation {
namespace {

constexpr int kRows = 16;  // of a warp
constexpr int kInner = 16;
constexpr int kLine = 128;
constexpr int kEight = 8 * kLine;

// Reads `count` lines of kInner halves from line `first` on. A descriptor: bits 0 to 13 the address
// and bits 32 to 45 the distance of groups of eight lines, both without their low four bits; the
// top two bits 1 for lines of 128 bytes with XORed pieces. The XOR takes address bits 7 to 9, so
// that groups begin at multiples of 1024.
void read_lines(std::uint64_t descriptor, int first, int count, std::uint32_t* to, Site site) {
  const auto start = static_cast<std::uint32_t>(descriptor & 0x3fff) << 4;
  const auto distance = static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1 || distance != kEight) {
    fault("wgmma: not the descriptor of lines of 128 bytes that lie together", site);
  }
  if (start % kEight >= kLine) fault("wgmma: lines must begin at a multiple of 1024 bytes", site);
  for (int i = 0; i < count; ++i) {
    for (int piece = 0; piece < 2; ++piece) {
      const int line = first + i;
      std::uint32_t address = start + line * kLine + piece * 16;
      address ^= (address >> 7 & 7) << 4;
      const void* from = shared_pointer(address);
      check_shared(from, 16, 16, "wgmma", site);
      std::uint16_t halves[8];
      std::memcpy(halves, from, 16);
      std::copy(halves, halves + 8, to + i * kInner + piece * 8);
    }
  }
}

// The same of lines that are one k each and run over 64 places. Bits 16 to 29 are the distance from
// one such group to the next, bits 32 to 45 that from 8 lines to the next.
void read_across(std::uint64_t descriptor, int first, int count, std::uint32_t* to, Site site) {
  const auto start = static_cast<std::uint32_t>(descriptor & 0x3fff) << 4;
  const auto group = static_cast<std::uint32_t>(descriptor >> 16 & 0x3fff) << 4;
  const auto eight = static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1 || eight != kEight) {
    fault("wgmma: not the descriptor of lines of 128 bytes that lie together", site);
  }
  if (start % kEight != 0 || group % kEight != 0) {
    fault("wgmma: lines across must begin at a multiple of 1024 bytes", site);
  }
  constexpr int kPlaces = kLine / 2;  // of a line
  for (int place = first; place < first + count; place += 8) {
    for (int k = 0; k < kInner; ++k) {
      std::uint32_t address =
          start + place / kPlaces * group + k / 8 * eight + k % 8 * kLine + place % kPlaces * 2;
      address ^= (address >> 7 & 7) << 4;
      const void* from = shared_pointer(address);
      check_shared(from, 16, 16, "wgmma", site);
      std::uint16_t halves[8];
      std::memcpy(halves, from, 16);
      for (int i = 0; i < 8; ++i) to[(place - first + i) * kInner + k] = halves[i];
    }
  }
}

struct Operands {
  const char* name;
  std::uint64_t a;
  std::uint64_t b;
  Site site;
};

void compare(void* const* lanes, std::uint32_t) {
  const Operands& first = *static_cast<Operands*>(lanes[0]);
  for (int i = 1; i < kWarpSize; ++i) {
    const Operands& other = *static_cast<Operands*>(lanes[i]);
    if (other.a != first.a || other.b != first.b) {
      fault(std::string(first.name) + ": lanes have different descriptors", first.site);
    }
  }
}

struct Waiting {
  WarpgroupQueue* queue;
  int warp;
};

}  // namespace

void WarpgroupQueue::add(const char* name, float* sums, const WarpgroupProduct& product) {
  Operands mine{name, product.a, product.b, product.site};
  meet_warp(name, Aligned::kYes, 0xffffffff, &mine, compare, product.site);
  if (!begun_) fault(std::string(name) + ": wgmma_begin() is missing", product.site);
  if (sums_ == nullptr) {
    sums_ = sums;
    columns_ = product.columns;
    std::copy(sums, sums + columns_ / 2, values_);
  }
  if (sums_ != sums || columns_ != product.columns)
    fault(std::string(name) + ": other products are under way", product.site);
  poison(sums, columns_ / 2 * sizeof(float));
  products_.push_back(product);
}

// The queues of all lanes hold the same products.
void WarpgroupQueue::compute(void* const* lanes, std::uint32_t) {
  const auto queue = [&](int lane) -> WarpgroupQueue& {
    return *static_cast<Waiting*>(lanes[lane])->queue;
  };
  const int warp = static_cast<Waiting*>(lanes[0])->warp;
  const int columns = queue(0).columns_;
  const int count = columns / 2;  // of a lane
  static float sums[kRows * kWarpgroupColumns];
  static std::uint32_t a[kRows * kInner];
  static std::uint32_t b[kWarpgroupColumns * kInner];
  // Of 8 columns a lane holds, as of mma.sync's 16x8, two of row lane/4 and two 8 rows below.
  const auto place = [columns](int lane, int i) {
    const int row = lane / 4 + i / 2 % 2 * 8;
    return row * columns + i / 4 * 8 + lane % 4 * 2 + i % 2;
  };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < count; ++i) sums[place(lane, i)] = queue(lane).values_[i];
  }
  for (const WarpgroupProduct& product : queue(0).products_) {
    if (product.zero) std::fill(std::begin(sums), std::end(sums), 0.0f);
    const auto read_a = product.a_across ? read_across : read_lines;
    const auto read_b = product.b_across ? read_across : read_lines;
    read_a(product.a, warp % 4 * kRows, kRows, a, product.site);
    read_b(product.b, 0, columns, b, product.site);
    multiply_accumulate(product.format, kSm90, kRows, columns, kInner, a, b, sums);
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < count; ++i) queue(lane).values_[i] = sums[place(lane, i)];
  }
}

void WarpgroupQueue::wait(float* sums, Site site) {
  Waiting mine{this, static_cast<int>(threadIdx.x) / kWarpSize};
  if (blockDim.x % (4 * kWarpSize) != 0) fault("wgmma: a block needs whole warpgroups", site);
  meet_warp("wgmma_wait", Aligned::kYes, 0xffffffff, &mine, compute, site);
  if (sums_ != nullptr) {
    if (sums_ != sums) fault("wgmma_wait: the products' sums are others", site);
    float untouched[kWarpgroupSums];
    const std::size_t bytes = columns_ / 2 * sizeof(float);
    poison(untouched, bytes);
    if (std::memcmp(untouched, sums, bytes) != 0) {
      fault("wgmma_wait: the accumulators have been written to while products were under way",
            site);
    }
    std::copy(values_, values_ + columns_ / 2, sums);
  }
  abandon();
}

void WarpgroupQueue::check_empty() {
  if (products_.empty()) return;
  const Site site = products_.front().site;
  fault("the thread returns without having waited for the product", site);
}

}  // namespace emulation
