// SPDX-License-Identifier: Apache-2.0
// The instructions of compute capability 9.0 that CUDA C++ has no name for, one thin wrapper each.
// Under a plain C++ compiler the emulation gives the same names the same meaning.
#pragma once

#include "common/cuda/sm80/instructions.cuh"

#ifndef __CUDACC__
#include "emulation/sm90a.h"
#else

#include <cstdint>

namespace fused_ops::sm90a {

// The accumulators d[16][4], or d[8][4], as operands of an asm statement.
#define FUSED_OPS_SUMS_4(kind, d) kind((d)[0]), kind((d)[1]), kind((d)[2]), kind((d)[3])
#define FUSED_OPS_SUMS_16(kind, d)                                                                \
  FUSED_OPS_SUMS_4(kind, (d)[0]), FUSED_OPS_SUMS_4(kind, (d)[1]), FUSED_OPS_SUMS_4(kind, (d)[2]), \
      FUSED_OPS_SUMS_4(kind, (d)[3])
#define FUSED_OPS_SUMS_32(kind, d) FUSED_OPS_SUMS_16(kind, (d)), FUSED_OPS_SUMS_16(kind, (d) + 4)
#define FUSED_OPS_SUMS(kind, d)                                   \
  FUSED_OPS_SUMS_16(kind, (d)), FUSED_OPS_SUMS_16(kind, (d) + 4), \
      FUSED_OPS_SUMS_16(kind, (d) + 8), FUSED_OPS_SUMS_16(kind, (d) + 12)

// Changes how many registers each thread of a warpgroup has; all four warps call it.
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// A copy from global to shared memory by the copy engine, asynchronous; both addresses and `bytes`
// are multiples of 16. The barrier's phase does not end before it, if somebody told the barrier to
// expect its bytes.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(sm80::shared_address(shared)),
      "l"(global), "r"(bytes), "r"(sm80::shared_address(barrier))
      : "memory");
}

// Arrives, and says that bulk copies will bring so many bytes in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(sm80::shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// What this thread has written to shared memory before (barriers that it has initialised, too),
// wgmma and bulk copies see after a barrier that both sides pass.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A matrix in shared memory whose lines (rows of the left operand, columns of the right one) are
// 128 bytes, with 16-byte pieces in the order piece ^ (line % 8); every eight lines begin at a
// multiple of 1024. A product takes 32 bytes of each line, from `address` on.
using MatrixDescriptor = std::uint64_t;

__device__ __forceinline__ MatrixDescriptor matrix_descriptor(sm80::SharedAddress address) {
  constexpr std::uint64_t kEightLines = std::uint64_t{1024 >> 4} << 32;
  constexpr std::uint64_t kOrder = std::uint64_t{1} << 62;  // of 128-byte lines
  return kOrder | kEightLines | (address & 0x3ffff) >> 4;
}

// A matrix in the other order: a line is one k and runs over 64 rows (columns), pieces in the order
// piece ^ (line % 8), 16 lines from `address` on, a multiple of 1024, for a product. What more rows
// (columns) it takes stand `group_bytes` further, 64 at a time.
__device__ __forceinline__ MatrixDescriptor matrix_descriptor_across(sm80::SharedAddress address,
                                                                     int group_bytes) {
  return matrix_descriptor(address) | static_cast<std::uint64_t>(group_bytes >> 4) << 16;
}

// Products of a warpgroup, asynchronous: between wgmma_begin() and wgmma_wait() nobody touches the
// accumulators and nobody writes the operands.
__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of products and waits for all.
__device__ __forceinline__ void wgmma_wait(float (&d)[16][4]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  // The accumulators are named, so that the compiler does not read them before.
  asm volatile("wgmma.wait_group.sync.aligned 0;" : FUSED_OPS_SUMS("+f", d) : : "memory");
}

__device__ __forceinline__ void wgmma_wait(float (&d)[4][4]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : FUSED_OPS_SUMS_16("+f", d) : : "memory");
}

__device__ __forceinline__ void wgmma_wait(float (&d)[8][4]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : FUSED_OPS_SUMS_32("+f", d) : : "memory");
}

// Products on 64x16 by 16x128 (accumulators d[16][4]), 16x64 (d[8][4]) or 16x32 numbers (d[4][4])
// of 16 bits, with fp32 accumulators. Of each 8 columns warp w of the warpgroup holds rows 16w to
// 16w+15, distributed as mma_f16 has it. a_across, b_across: of which of the two kinds the
// descriptors are.
#define FUSED_OPS_WGMMA_128(name, numbers, accumulates, sums)                        \
  template <bool a_across = false, bool b_across = false>                            \
  __device__ __forceinline__ void name(float (&d)[16][4], MatrixDescriptor a,        \
                                       MatrixDescriptor b) {                         \
    asm volatile("{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, " accumulates \
                 ", 0;\n"                                                            \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." numbers "." numbers  \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, "                                \
                 "%8, %9, %10, %11, %12, %13, %14, %15, "                            \
                 "%16, %17, %18, %19, %20, %21, %22, %23, "                          \
                 "%24, %25, %26, %27, %28, %29, %30, %31, "                          \
                 "%32, %33, %34, %35, %36, %37, %38, %39, "                          \
                 "%40, %41, %42, %43, %44, %45, %46, %47, "                          \
                 "%48, %49, %50, %51, %52, %53, %54, %55, "                          \
                 "%56, %57, %58, %59, %60, %61, %62, %63}, "                         \
                 "%64, %65, accumulates, 1, 1, %66, %67;\n}"                         \
                 : FUSED_OPS_SUMS(sums, d)                                           \
                 : "l"(a), "l"(b), "n"(static_cast<int>(a_across)),                  \
                   "n"(static_cast<int>(b_across)));                                 \
  }
#define FUSED_OPS_WGMMA_64(name, numbers, accumulates, sums)                                       \
  template <bool a_across = false, bool b_across = false>                                          \
  __device__ __forceinline__ void name(float (&d)[8][4], MatrixDescriptor a, MatrixDescriptor b) { \
    asm volatile("{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, " accumulates               \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." numbers "." numbers                 \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, "                                              \
                 "%8, %9, %10, %11, %12, %13, %14, %15, "                                          \
                 "%16, %17, %18, %19, %20, %21, %22, %23, "                                        \
                 "%24, %25, %26, %27, %28, %29, %30, %31}, "                                       \
                 "%32, %33, accumulates, 1, 1, %34, %35;\n}"                                       \
                 : FUSED_OPS_SUMS_32(sums, d)                                                      \
                 : "l"(a), "l"(b), "n"(static_cast<int>(a_across)),                                \
                   "n"(static_cast<int>(b_across)));                                               \
  }
#define FUSED_OPS_WGMMA_32(name, numbers, accumulates, sums)                                       \
  template <bool a_across = false, bool b_across = false>                                          \
  __device__ __forceinline__ void name(float (&d)[4][4], MatrixDescriptor a, MatrixDescriptor b) { \
    asm volatile("{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, " accumulates               \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." numbers "." numbers                 \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, "                                              \
                 "%8, %9, %10, %11, %12, %13, %14, %15}, "                                         \
                 "%16, %17, accumulates, 1, 1, %18, %19;\n}"                                       \
                 : FUSED_OPS_SUMS_16(sums, d)                                                      \
                 : "l"(a), "l"(b), "n"(static_cast<int>(a_across)),                                \
                   "n"(static_cast<int>(b_across)));                                               \
  }
#define FUSED_OPS_WGMMA(name, numbers, accumulates, sums) \
  FUSED_OPS_WGMMA_128(name, numbers, accumulates, sums)   \
  FUSED_OPS_WGMMA_64(name, numbers, accumulates, sums)    \
  FUSED_OPS_WGMMA_32(name, numbers, accumulates, sums)

FUSED_OPS_WGMMA(wgmma_f16, "f16", "1", "+f")        // d += a * b
FUSED_OPS_WGMMA(wgmma_f16_zero, "f16", "0", "=&f")  // d = a * b
FUSED_OPS_WGMMA(wgmma_bf16, "bf16", "1", "+f")
FUSED_OPS_WGMMA(wgmma_bf16_zero, "bf16", "0", "=&f")

#undef FUSED_OPS_WGMMA
#undef FUSED_OPS_WGMMA_32
#undef FUSED_OPS_WGMMA_64
#undef FUSED_OPS_WGMMA_128

// Stores four 8x8 matrices of 16-bit numbers: lane l holds, of each, numbers 2 * (l % 4) and the
// next of row l / 4, and the address of row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void stmatrix_x4(sm80::SharedAddress shared,
                                            const std::uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}

// The same of transposed matrices: lane l holds numbers l / 4 of rows 2 * (l % 4) and the next.
__device__ __forceinline__ void stmatrix_x4_trans(sm80::SharedAddress shared,
                                                  const std::uint32_t (&d)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
      : "memory");
}

#undef FUSED_OPS_SUMS
#undef FUSED_OPS_SUMS_32
#undef FUSED_OPS_SUMS_16
#undef FUSED_OPS_SUMS_4

}  // namespace fused_ops::sm90a

#endif  // __CUDACC__
