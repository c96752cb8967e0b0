// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup (wgmma). Each warp computes its 16 rows by itself, which is as late and
// as early as the hardware may be.
#pragma once

#include <cstdint>
#include <vector>

#include "emulation/block.h"
#include "emulation/tensor_core.h"

namespace emulation {

constexpr int kWarpgroupColumns = 128;                 // at most
constexpr int kWarpgroupSums = kWarpgroupColumns / 2;  // of a thread, at most

struct WarpgroupProduct {
  std::uint64_t a;
  std::uint64_t b;
  bool a_across;  // lines run across k, not along
  bool b_across;
  bool zero;  // the sums start at 0
  int columns;
  Format format;
  Site site;
};

// Asynchronous means late: what a thread has asked for is computed by the wait, and until then its
// accumulators are NaN.
class WarpgroupQueue {
 public:
  void begin() { begun_ = true; }
  void add(const char* name, float* sums, const WarpgroupProduct& product);
  void wait(float* sums, Site site);
  void check_empty();  // at a thread's end
  void abandon() { *this = {}; }

 private:
  static void compute(void* const* lanes, std::uint32_t);

  bool begun_ = false;
  float* sums_ = nullptr;  // where they belong
  int columns_ = 0;
  float values_[kWarpgroupSums];
  std::vector<WarpgroupProduct> products_;
};
WarpgroupQueue& warpgroup();

}  // namespace emulation
