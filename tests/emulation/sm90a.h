// SPDX-License-Identifier: Apache-2.0
// The meaning of the wrappers in csrc/common/cuda/sm90a/instructions.cuh.
#pragma once

#include "emulation/sm80.h"
#include "emulation/warpgroup.h"

namespace fused_ops::sm90a {

// The compiler's business, but a warp's lanes must be together.
template <int registers>
void give_registers(emulation::Site site = emulation::Site::here()) {
  static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0);
  emulation::meet_warp("give_registers", emulation::Aligned::kYes, 0xffffffff, nullptr, nullptr,
                       site);
}

template <int registers>
void take_registers(emulation::Site site = emulation::Site::here()) {
  static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0);
  emulation::meet_warp("take_registers", emulation::Aligned::kYes, 0xffffffff, nullptr, nullptr,
                       site);
}

inline void mbarrier_arrive_expect(std::uint64_t* barrier, int bytes,
                                   emulation::Site site = emulation::Site::here()) {
  emulation::mbarrier_arrive_expect(barrier, bytes, site);
}

inline void bulk_copy(void* shared, const void* global, int bytes, std::uint64_t* barrier,
                      emulation::Site site = emulation::Site::here()) {
  emulation::bulk_copy(shared, global, bytes, barrier, site);
}

inline void fence_async() {}  // in here everybody sees what was written

using MatrixDescriptor = std::uint64_t;

inline MatrixDescriptor matrix_descriptor(sm80::SharedAddress address) {
  return std::uint64_t{1} << 62 | std::uint64_t{1024 >> 4} << 32 | (address & 0x3ffff) >> 4;
}

inline MatrixDescriptor matrix_descriptor_across(sm80::SharedAddress address, int group_bytes) {
  return matrix_descriptor(address) | static_cast<std::uint64_t>(group_bytes >> 4) << 16;
}

inline void wgmma_begin() {
  emulation::warpgroup().begin();
}

// Of 8 * kTiles columns.
template <int kTiles>
void wgmma_wait(float (&d)[kTiles][4], emulation::Site site = emulation::Site::here()) {
  emulation::warpgroup().wait(d[0], site);
}

template <bool a_across = false, bool b_across = false, int kTiles>
void wgmma_f16(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b,
               emulation::Site site = emulation::Site::here()) {
  emulation::warpgroup().add(
      "wgmma_f16", d[0],
      {a, b, a_across, b_across, false, 8 * kTiles, emulation::Format::kF16, site});
}

template <bool a_across = false, bool b_across = false, int kTiles>
void wgmma_f16_zero(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b,
                    emulation::Site site = emulation::Site::here()) {
  emulation::warpgroup().add(
      "wgmma_f16_zero", d[0],
      {a, b, a_across, b_across, true, 8 * kTiles, emulation::Format::kF16, site});
}

template <bool a_across = false, bool b_across = false, int kTiles>
void wgmma_bf16(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b,
                emulation::Site site = emulation::Site::here()) {
  emulation::warpgroup().add(
      "wgmma_bf16", d[0],
      {a, b, a_across, b_across, false, 8 * kTiles, emulation::Format::kBf16, site});
}

template <bool a_across = false, bool b_across = false, int kTiles>
void wgmma_bf16_zero(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b,
                     emulation::Site site = emulation::Site::here()) {
  emulation::warpgroup().add(
      "wgmma_bf16_zero", d[0],
      {a, b, a_across, b_across, true, 8 * kTiles, emulation::Format::kBf16, site});
}

inline void stmatrix_x4(sm80::SharedAddress shared, const std::uint32_t (&d)[4],
                        emulation::Site site = emulation::Site::here()) {
  emulation::store_matrix<false>("stmatrix_x4", d, shared, site);
}

inline void stmatrix_x4_trans(sm80::SharedAddress shared, const std::uint32_t (&d)[4],
                              emulation::Site site = emulation::Site::here()) {
  emulation::store_matrix<true>("stmatrix_x4_trans", d, shared, site);
}

}  // namespace fused_ops::sm90a
