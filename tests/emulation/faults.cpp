// SPDX-License-Identifier: Apache-2.0
// A kernel that is right, and the same kernel with one fault at a time, each of which must be
// found.
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/cuda/sm90a/instructions.cuh"
#include "emulation/driver.h"

namespace {

using namespace fused_ops;
using namespace fused_ops::sm80;

enum class Planted {
  kNone,
  kMissingWait,
  kNeverWaited,
  kMissingBarrierAfterWrite,
  kMissingBarrierBeforeReuse,
  kMissingSyncwarp,
  kMissingZeroFill,
  kLoadOutOfBounds,
  kStoreOutOfBounds,
  kSharedOverrun,
  kSharedNotGiven,
  kSwappedFragments,
  kWrongRowAddress,
  kNotTransposed,
  kUnalignedCopy,
  kUnalignedMatrix,
  kUnalignedLoad,
  kUnalignedShortLoad,
  kUnalignedStore,
  kDivergentBarrier,
  kDivergentWarp,
  kWrongMask,
  kReturnedLane,
  kDeadlock,
  kIndexOverflow,
  // In the ring.
  kRingMissingWaitForFull,
  kRingMissingWaitForEmpty,
  kRingMissingArrival,
  kRingWrongParity,
  kRingNotInitialised,
  kRingOverwritten,
  kRingMissingNamedBarrier,
  kRingWrongNamedBarrier,
  // Of bulk copies.
  kBulkMissingExpect,
  kBulkMissingWait,
  kBulkNeverWaited,
  kBulkExpectsMore,
  kBulkUnaligned,
  kBulkOutOfBounds,
};

const std::map<std::string, Planted> kPlanted = {
    {"nothing", Planted::kNone},
    {"missing_wait", Planted::kMissingWait},
    {"never_waited", Planted::kNeverWaited},
    {"missing_barrier_after_write", Planted::kMissingBarrierAfterWrite},
    {"missing_barrier_before_reuse", Planted::kMissingBarrierBeforeReuse},
    {"missing_syncwarp", Planted::kMissingSyncwarp},
    {"missing_zero_fill", Planted::kMissingZeroFill},
    {"load_out_of_bounds", Planted::kLoadOutOfBounds},
    {"store_out_of_bounds", Planted::kStoreOutOfBounds},
    {"shared_overrun", Planted::kSharedOverrun},
    {"shared_not_given", Planted::kSharedNotGiven},
    {"swapped_fragments", Planted::kSwappedFragments},
    {"wrong_row_address", Planted::kWrongRowAddress},
    {"not_transposed", Planted::kNotTransposed},
    {"unaligned_copy", Planted::kUnalignedCopy},
    {"unaligned_matrix", Planted::kUnalignedMatrix},
    {"unaligned_load", Planted::kUnalignedLoad},
    {"unaligned_short_load", Planted::kUnalignedShortLoad},
    {"unaligned_store", Planted::kUnalignedStore},
    {"divergent_barrier", Planted::kDivergentBarrier},
    {"divergent_warp", Planted::kDivergentWarp},
    {"wrong_mask", Planted::kWrongMask},
    {"returned_lane", Planted::kReturnedLane},
    {"deadlock", Planted::kDeadlock},
    {"index_overflow", Planted::kIndexOverflow},
};

const std::map<std::string, Planted> kRingPlanted = {
    {"ring_nothing", Planted::kNone},
    {"ring_missing_wait_for_full", Planted::kRingMissingWaitForFull},
    {"ring_missing_wait_for_empty", Planted::kRingMissingWaitForEmpty},
    {"ring_missing_arrival", Planted::kRingMissingArrival},
    {"ring_wrong_parity", Planted::kRingWrongParity},
    {"ring_not_initialised", Planted::kRingNotInitialised},
    {"ring_overwritten", Planted::kRingOverwritten},
    {"ring_missing_named_barrier", Planted::kRingMissingNamedBarrier},
    {"ring_wrong_named_barrier", Planted::kRingWrongNamedBarrier},
};

const std::map<std::string, Planted> kBulkPlanted = {
    {"bulk_nothing", Planted::kNone},
    {"bulk_missing_expect", Planted::kBulkMissingExpect},
    {"bulk_missing_wait", Planted::kBulkMissingWait},
    {"bulk_never_waited", Planted::kBulkNeverWaited},
    {"bulk_expects_more", Planted::kBulkExpectsMore},
    {"bulk_unaligned", Planted::kBulkUnaligned},
    {"bulk_out_of_bounds", Planted::kBulkOutOfBounds},
};

constexpr int kTile = 32;  // of rows, of columns, and of the inner axis
constexpr int kThreads = 128;

struct Shared {
  std::uint16_t a[2][kTile][kTile + 8];
  std::uint16_t b[2][kTile][kTile + 8];
  float c[4][16][17];
};

struct Params {
  const std::uint16_t* a;  // fp16 (rows, inner)
  const std::uint16_t* b;  // fp16 (inner, columns)
  float* c;                // (rows, columns); inner and columns are multiples of 8
  int rows;
  int inner;
  int columns;
  Planted planted;
};

// Starts copying a slice of the inner axis.
__device__ void load(Shared& shared, const Params& p, int stage, int slice, int first_row,
                     int first_column) {
  const int line = threadIdx.x / 4;
  const int piece = threadIdx.x % 4 * 8;
  bool exists = first_row + line < p.rows && slice + piece < p.inner;
  if (p.planted == Planted::kLoadOutOfBounds) exists = true;
  const std::uint16_t* from = exists ? p.a + (first_row + line) * p.inner + slice + piece : p.a;
  if (p.planted == Planted::kUnalignedCopy) from += 4;
  const bool fill = p.planted != Planted::kMissingZeroFill;
  if (exists || fill) cp_async_16(&shared.a[stage][line][piece], from, exists ? 16 : 0);
  exists = slice + line < p.inner && first_column + piece < p.columns;
  from = exists ? p.b + (slice + line) * p.columns + first_column + piece : p.b;
  if (exists || fill) cp_async_16(&shared.b[stage][line][piece], from, exists ? 16 : 0);
}

// One warp's 16x16 results of one slice.
__device__ void multiply(const Shared& shared, const Params& p, int stage, int warp, int lane,
                         float (&sum)[2][4]) {
  for (int l = 0; l < kTile; l += 16) {
    std::uint32_t a[4];
    std::uint32_t b[4];
    int row = lane % 16;
    int column = lane / 16 * 8;
    if (p.planted == Planted::kWrongRowAddress) row = lane / 16 + lane % 8 * 2;
    if (p.planted == Planted::kUnalignedMatrix) column += 4;
    if (p.planted == Planted::kUnalignedLoad) {
      load_shared_16(shared_address(&shared.a[stage][0][0]) + 4);
    }
    if (p.planted == Planted::kUnalignedShortLoad) {
      load_shared_8(shared_address(&shared.a[stage][0][0]) + 4);
    }
    ldmatrix_x4(a, shared_address(&shared.a[stage][warp / 2 * 16 + row][l + column]));
    const std::uint16_t* b_row = &shared.b[stage][l + lane % 16][warp % 2 * 16 + lane / 16 * 8];
    if (p.planted == Planted::kNotTransposed) {
      ldmatrix_x4(b, shared_address(b_row));
    } else {
      ldmatrix_x4_trans(b, shared_address(b_row));
    }
    if (p.planted == Planted::kSwappedFragments) std::swap(b[1], b[2]);
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t fragment[2] = {b[2 * half], b[2 * half + 1]};
      if (p.planted == Planted::kDivergentWarp && lane < 16) {
        mma_f16(sum[half], a, fragment);
        continue;
      }
      mma_f16(sum[half], a, fragment);
    }
  }
}

// Through shared memory, so that a lane stores neighbours.
__device__ void store(Shared& shared, const Params& p, int first_row, int first_column, int warp,
                      int lane, const float (&sum)[2][4]) {
  auto& c = shared.c[warp];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 4; ++i) {
      c[lane / 4 + i / 2 * 8][half * 8 + lane % 4 * 2 + i % 2] = sum[half][i];
    }
  }
  if (p.planted != Planted::kMissingSyncwarp) __syncwarp();
  const int row = first_row + warp / 2 * 16 + lane / 2;
  const int column = first_column + warp % 2 * 16 + lane % 2 * 8;
  const bool inside = row < p.rows && column < p.columns;
  if (!inside && p.planted != Planted::kStoreOutOfBounds) return;
  float* to = p.c + row * p.columns + column;
  if (p.planted == Planted::kUnalignedStore) ++to;
  for (int i = 0; i < 8; i += 2) {
    *reinterpret_cast<float2*>(to + i) =
        make_float2(c[lane / 2][lane % 2 * 8 + i], c[lane / 2][lane % 2 * 8 + i + 1]);
  }
}

__global__ void __launch_bounds__(kThreads) product_kernel(const Params p) {
  auto& shared = shared_memory<Shared>();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int column_tiles = (p.columns + kTile - 1) / kTile;
  const int first_row = blockIdx.x / column_tiles * kTile;
  const int first_column = blockIdx.x % column_tiles * kTile;

  if (p.planted == Planted::kReturnedLane && threadIdx.x == 77) return;
  if (p.planted == Planted::kDivergentBarrier && warp == 1) __syncthreads();
  if (p.planted == Planted::kDeadlock && lane < 16) __syncwarp();
  if (p.planted == Planted::kWrongMask) __syncwarp(lane < 16 ? 0x0000ffff : 0xffffffff);
  if (p.planted == Planted::kSharedOverrun) {
    reinterpret_cast<unsigned char*>(&shared)[sizeof(Shared) + warp] = 0;
  }
  if (p.planted == Planted::kIndexOverflow) {
    const int offset = (static_cast<int>(threadIdx.x) + 1) * 0x7fffff * 3;
    if (offset == 1) p.c[0] = 0.0f;
  }

  float sum[2][4] = {};
  int stage = 0;
  load(shared, p, stage, 0, first_row, first_column);
  cp_async_commit();
  for (int slice = 0; slice < p.inner; slice += kTile) {
    if (slice + kTile < p.inner || p.planted == Planted::kNeverWaited) {
      load(shared, p, stage ^ 1, slice + kTile, first_row, first_column);
    }
    cp_async_commit();
    if (p.planted != Planted::kMissingWait) cp_async_wait<1>();
    if (p.planted != Planted::kMissingBarrierAfterWrite) __syncthreads();
    multiply(shared, p, stage, warp, lane, sum);
    if (p.planted != Planted::kMissingBarrierBeforeReuse) __syncthreads();
    stage ^= 1;
  }
  store(shared, p, first_row, first_column, warp, lane, sum);
}

// Two warps hand numbers to two others through a ring of two stages: y[i] = x[i] + x[i ^ 63].
constexpr int kHalf = 64;

struct Ring {
  int stage[2][kHalf];
  int scratch[kHalf];
  std::uint64_t full[2];
  std::uint64_t empty[2];
};

__device__ void produce(Ring& ring, const int* x, int rounds, Planted planted) {
  const int thread = threadIdx.x;
  for (int i = 0; i < rounds; ++i) {
    ring.scratch[thread] = x[i * kHalf + thread];
    if (planted == Planted::kRingWrongNamedBarrier && thread >= 32) {
      named_barrier<1, 2 * kHalf>();
    } else if (planted != Planted::kRingMissingNamedBarrier) {
      named_barrier<1, kHalf>();
    }
    const int sum = ring.scratch[thread] + ring.scratch[thread ^ 63];
    named_barrier<2, kHalf>();
    if (planted != Planted::kRingMissingWaitForEmpty) {
      mbarrier_wait(&ring.empty[i % 2], i / 2 % 2 ^ 1);
    }
    ring.stage[i % 2][thread] = sum;
    __syncwarp();
    if (planted == Planted::kRingMissingArrival && thread == 32) continue;
    if (thread % 32 == 0) mbarrier_arrive(&ring.full[i % 2]);
  }
}

__device__ void consume(Ring& ring, int* y, int rounds, Planted planted) {
  const int thread = threadIdx.x - kHalf;
  for (int i = 0; i < rounds; ++i) {
    const int parity = i / 2 % 2 ^ (planted == Planted::kRingWrongParity ? 1 : 0);
    if (planted != Planted::kRingMissingWaitForFull) {
      mbarrier_wait(&ring.full[i % 2], parity);
    }
    y[i * kHalf + thread] = ring.stage[i % 2][thread];
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(&ring.empty[i % 2]);
  }
}

__global__ void ring_kernel(const int* x, int* y, int rounds, Planted planted) {
  auto& ring = shared_memory<Ring>();
  if (threadIdx.x < 2) {
    mbarrier_init(&ring.full[threadIdx.x], kHalf / 32);
    mbarrier_init(&ring.empty[threadIdx.x], kHalf / 32);
  }
  if (planted != Planted::kRingNotInitialised) __syncthreads();
  if (planted == Planted::kRingOverwritten && threadIdx.x == 5) ring.full[1] = 0;
  if (threadIdx.x < kHalf) {
    produce(ring, x, rounds, planted);
  } else {
    consume(ring, y, rounds, planted);
  }
}

void launch_ring(emulation::Request& request) {
  const auto size = request.size<int>("x");
  // Each block does the whole, under a schedule of its own.
  emulation::launch(ring_kernel, 4, 2 * kHalf, sizeof(Ring), request.input<int>("x"),
                    request.output<int>("y", size), static_cast<int>(size / kHalf),
                    kRingPlanted.at(request.kernel()));
}

// One thread asks for copies of 64 numbers, all read them.
struct alignas(16) Bulk {
  int stage[2][kHalf];
  std::uint64_t full[2];
};

__global__ void bulk_kernel(const int* x, int* y, int rounds, Planted planted) {
  auto& bulk = shared_memory<Bulk>();
  const int thread = threadIdx.x;
  if (thread < 2) mbarrier_init(&bulk.full[thread], 1);
  __syncthreads();
  const auto ask = [&](int i) {
    if (thread != 0 || i >= rounds) return;
    int bytes = sizeof(bulk.stage[0]);
    const int* from = x + i * kHalf;
    if (planted == Planted::kBulkUnaligned) ++from;
    if (planted == Planted::kBulkOutOfBounds) from += 4;
    if (planted == Planted::kBulkMissingExpect) {
      mbarrier_arrive(&bulk.full[i % 2]);
    } else {
      const int more = planted == Planted::kBulkExpectsMore ? 16 : 0;
      sm90a::mbarrier_arrive_expect(&bulk.full[i % 2], bytes + more);
    }
    sm90a::bulk_copy(bulk.stage[i % 2], from, bytes, &bulk.full[i % 2]);
  };
  ask(0);
  for (int i = 0; i < rounds; ++i) {
    ask(i + 1);
    if (planted == Planted::kBulkNeverWaited) return;
    if (planted != Planted::kBulkMissingWait) mbarrier_wait(&bulk.full[i % 2], i / 2 % 2);
    y[i * kHalf + thread] = bulk.stage[i % 2][thread];
    __syncthreads();
  }
}

void launch_bulk(emulation::Request& request) {
  const auto size = request.size<int>("x");
  emulation::launch(bulk_kernel, 2, kHalf, sizeof(Bulk), request.input<int>("x"),
                    request.output<int>("y", size), static_cast<int>(size / kHalf),
                    kBulkPlanted.at(request.kernel()));
}

Params params_of(emulation::Request& request) {
  Params p;
  p.a = request.input<std::uint16_t>("a");
  p.b = request.input<std::uint16_t>("b");
  p.rows = static_cast<int>(request.integer("rows"));
  p.inner = static_cast<int>(request.integer("inner"));
  p.columns = static_cast<int>(request.integer("columns"));
  p.c = request.output<float>("c", p.rows * p.columns);
  p.planted = Planted::kNone;
  return p;
}

void launch(const Params& p) {
  const int blocks = ((p.rows + kTile - 1) / kTile) * ((p.columns + kTile - 1) / kTile);
  const std::size_t shared = sizeof(Shared) - (p.planted == Planted::kSharedNotGiven ? 4 : 0);
  emulation::launch(product_kernel, blocks, kThreads, shared, p);
}

const bool registered = [] {
  for (const auto& [name, planted] : kPlanted) {
    emulation::Kernel(name.c_str(), [](emulation::Request& request) {
      Params p = params_of(request);
      p.planted = kPlanted.at(request.kernel());
      launch(p);
    });
  }
  for (const auto& [name, planted] : kRingPlanted) emulation::Kernel(name.c_str(), &launch_ring);
  for (const auto& [name, planted] : kBulkPlanted) emulation::Kernel(name.c_str(), &launch_bulk);
  return true;
}();

// A launch that fails leaves nothing behind: threads in the middle of a wait, copies under way.
const emulation::Kernel recovery("recovery", [](emulation::Request& request) {
  Params p = params_of(request);
  for (Planted planted : {Planted::kDeadlock, Planted::kNeverWaited, Planted::kDivergentWarp,
                          Planted::kReturnedLane, Planted::kSharedNotGiven}) {
    p.planted = planted;
    bool found = false;
    try {
      launch(p);
    } catch (const emulation::Fault&) {
      found = true;
    }
    if (!found) throw std::runtime_error("a planted fault was not found");
  }
  p.planted = Planted::kNone;
  launch(p);
});

}  // namespace
