// SPDX-License-Identifier: Apache-2.0
// A warpgroup's product, right and with one fault at a time. The right one is also the test of what
// the instructions compute, in the words of PTX's tables.
#include <cstdint>
#include <map>
#include <string>

#include "common/cuda/sm90a/instructions.cuh"
#include "emulation/driver.h"

namespace {

using namespace fused_ops;
using namespace fused_ops::sm90a;

enum class Planted {
  kNone,
  kMissingBegin,
  kNeverWaited,
  kEarlyRead,
  kTouchedSums,
  kOtherSums,
  kEarlyWrite,
  kMissingBarrier,
  kUnalignedLines,
  kPiecesInOrder,
  kOtherDescriptor,
  kOutside,
};

const std::map<std::string, Planted> kPlanted = {
    {"nothing", Planted::kNone},
    {"missing_begin", Planted::kMissingBegin},
    {"never_waited", Planted::kNeverWaited},
    {"early_read", Planted::kEarlyRead},
    {"touched_sums", Planted::kTouchedSums},
    {"other_sums", Planted::kOtherSums},
    {"early_write", Planted::kEarlyWrite},
    {"missing_barrier", Planted::kMissingBarrier},
    {"unaligned_lines", Planted::kUnalignedLines},
    {"pieces_in_order", Planted::kPiecesInOrder},
    {"other_descriptor", Planted::kOtherDescriptor},
    {"outside", Planted::kOutside},
};

constexpr int kRows = 64;
constexpr int kColumns = 128;
constexpr int kLine = 64;  // halves
constexpr int kThreads = 128;

struct alignas(1024) Shared {
  std::uint16_t a[kRows * kLine];
  std::uint16_t b[kColumns * kLine];
};

struct Params {
  const std::uint16_t* a;  // fp16 (64, inner)
  const std::uint16_t* b;  // fp16 (128, inner)
  float* d;                // (64, 128) = A B^T
  int inner;               // a multiple of 64
  Planted planted;
};

__device__ void fill(std::uint16_t* lines, const std::uint16_t* from, int count, const Params& p,
                     int first) {
  for (int i = threadIdx.x; i < count * kLine; i += kThreads) {
    const int line = i / kLine;
    const int piece = i % kLine / 8;
    const int place = p.planted == Planted::kPiecesInOrder ? piece : piece ^ line % 8;
    lines[line * kLine + place * 8 + i % 8] = from[line * p.inner + first + i % kLine];
  }
}

__global__ void product_kernel(const Params p) {
  auto& shared = shared_memory<Shared>();
  const int thread = threadIdx.x;
  const auto is = [&](Planted planted) { return p.planted == planted; };
  float sums[16][4];
  float others[16][4];
  float early[16][4];
  for (int first = 0; first < p.inner; first += kLine) {
    fill(shared.a, p.a, kRows, p, first);
    fill(shared.b, p.b, kColumns, p, first);
    fence_async();
    if (!is(Planted::kMissingBarrier)) __syncthreads();
    const int a_offset = is(Planted::kUnalignedLines) ? kLine : 0;
    const int b_offset = is(Planted::kOutside) ? kLine * 64 : 0;
    const auto a = matrix_descriptor(sm80::shared_address(shared.a + a_offset));
    auto b = matrix_descriptor(sm80::shared_address(shared.b + b_offset));
    if (is(Planted::kOtherDescriptor) && thread % 32 == 5) b += 2;
    if (!is(Planted::kMissingBegin)) wgmma_begin();
    for (int slice = 0; slice < 4; ++slice) {  // 32 bytes of the lines, in units of 16
      if (first == 0 && slice == 0) {
        wgmma_f16_zero(sums, a, b);
      } else {
        wgmma_f16(sums, a + slice * 2, b + slice * 2);
      }
      if (is(Planted::kOtherSums)) wgmma_f16_zero(others, a, b);
    }
    if (is(Planted::kEarlyRead)) {
      for (int i = 0; i < 64; ++i) early[i / 4][i % 4] = sums[i / 4][i % 4];
    }
    if (is(Planted::kTouchedSums)) sums[3][1] = 0.0f;
    if (is(Planted::kEarlyWrite)) shared.a[thread] = 0;
    if (is(Planted::kNeverWaited)) return;
    wgmma_wait(sums);
    if (!is(Planted::kMissingBarrier)) __syncthreads();
  }
  const auto& result = is(Planted::kEarlyRead) ? early : sums;
  for (int j = 0; j < 16; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 * 8;
      p.d[row * kColumns + j * 8 + thread % 4 * 2 + i % 2] = result[j][i];
    }
  }
}

// Both operands the other way: 16 lines, one k each, for every 64 rows or columns.
constexpr int kGroup = 16 * kLine;

struct alignas(1024) SharedAcross {
  std::uint16_t a[kRows / 64 * kGroup];
  std::uint16_t b[kColumns / 64 * kGroup];
};

struct AcrossParams {
  const std::uint16_t* a;  // fp16 (16, 64)
  const std::uint16_t* b;  // fp16 (16, 128)
  float* d;                // (64, 128) = A^T B
  int offset;              // of A's lines, in bytes
};

__global__ void product_across_kernel(const AcrossParams p) {
  auto& shared = shared_memory<SharedAcross>();
  const int thread = threadIdx.x;
  const auto fill = [&](std::uint16_t* lines, const std::uint16_t* from, int places) {
    for (int i = thread; i < 16 * places; i += kThreads) {
      const int k = i / places;
      const int place = i % places;
      const int piece = place % 64 / 8 ^ k % 8;
      lines[place / 64 * kGroup + k * kLine + piece * 8 + place % 8] = from[i];
    }
  };
  fill(shared.a, p.a, kRows);
  fill(shared.b, p.b, kColumns);
  fence_async();
  __syncthreads();
  float sums[16][4];
  wgmma_begin();
  wgmma_f16_zero<true, true>(
      sums, matrix_descriptor_across(sm80::shared_address(shared.a) + p.offset, kGroup * 2),
      matrix_descriptor_across(sm80::shared_address(shared.b), kGroup * 2));
  wgmma_wait(sums);
  for (int j = 0; j < 16; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 * 8;
      p.d[row * kColumns + j * 8 + thread % 4 * 2 + i % 2] = sums[j][i];
    }
  }
}

const emulation::Kernel across("across", [](emulation::Request& request) {
  AcrossParams p;
  p.a = request.input<std::uint16_t>("a");
  p.b = request.input<std::uint16_t>("b");
  p.d = request.output<float>("d", kRows * kColumns);
  p.offset = static_cast<int>(request.integer("offset", 0));
  emulation::launch(product_across_kernel, 1, kThreads, sizeof(SharedAcross), p);
});

const bool registered = [] {
  for (const auto& [name, planted] : kPlanted) {
    emulation::Kernel(name.c_str(), [](emulation::Request& request) {
      Params p;
      p.a = request.input<std::uint16_t>("a");
      p.b = request.input<std::uint16_t>("b");
      p.d = request.output<float>("d", kRows * kColumns);
      p.inner = static_cast<int>(request.integer("inner"));
      p.planted = kPlanted.at(request.kernel());
      emulation::launch(product_kernel, 1, kThreads, sizeof(Shared), p);
    });
  }
  return true;
}();

}  // namespace
