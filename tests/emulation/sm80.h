// SPDX-License-Identifier: Apache-2.0
// The meaning of the wrappers in csrc/common/cuda/sm80/instructions.cuh.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulation/barriers.h"
#include "emulation/cuda.h"
#include "emulation/tensor_core.h"

namespace emulation {

// Loads and products of a warp's matrices
// -----------------------------------------------------------

struct LoadMatrix {
  std::uint32_t row[4];     // the one whose address the lane gave
  std::uint32_t result[4];  // of each matrix
};

template <bool trans>
void load_matrices(void* const* lanes, std::uint32_t) {
  const auto element = [&](int matrix, int row, int column) {
    const std::uint32_t* words = static_cast<LoadMatrix*>(lanes[8 * matrix + row])->row;
    return words[column / 2] >> 16 * (column % 2) & 0xffffu;
  };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int row = lane / 4;
    const int column = lane % 4 * 2;
    for (int matrix = 0; matrix < 4; ++matrix) {
      const std::uint32_t low = trans ? element(matrix, column, row) : element(matrix, row, column);
      const std::uint32_t high =
          trans ? element(matrix, column + 1, row) : element(matrix, row, column + 1);
      static_cast<LoadMatrix*>(lanes[lane])->result[matrix] = low | high << 16;
    }
  }
}

template <bool trans>
void load_matrix(const char* name, std::uint32_t (&d)[4], std::uint32_t address, Site site) {
  const void* shared = shared_pointer(address);
  check_shared(shared, 16, 16, name, site);
  LoadMatrix mine;
  std::memcpy(mine.row, shared, 16);  // at once: nothing says that other lanes' stores come first
  meet_warp(name, Aligned::kYes, 0xffffffff, &mine, load_matrices<trans>, site);
  std::memcpy(d, mine.result, sizeof(d));
}

struct StoreMatrix {
  std::uint32_t fragments[4];
  unsigned char* row;  // whose address the lane gave
};

template <bool trans>
void store_matrices(void* const* lanes, std::uint32_t) {
  for (int at = 0; at < kWarpSize; ++at) {
    const int matrix = at / 8;
    const int row = at % 8;
    std::uint16_t numbers[8];
    for (int column = 0; column < 8; ++column) {
      const int lane = trans ? column * 4 + row / 2 : row * 4 + column / 2;
      const int half = (trans ? row : column) % 2;
      const std::uint32_t word = static_cast<StoreMatrix*>(lanes[lane])->fragments[matrix];
      numbers[column] = static_cast<std::uint16_t>(word >> 16 * half);
    }
    std::memcpy(static_cast<StoreMatrix*>(lanes[at])->row, numbers, sizeof(numbers));
  }
}

template <bool trans>
void store_matrix(const char* name, const std::uint32_t (&d)[4], std::uint32_t address, Site site) {
  const void* shared = shared_pointer(address);
  check_shared(shared, 16, 16, name, site);
  StoreMatrix mine;
  std::memcpy(mine.fragments, d, sizeof(d));
  mine.row = static_cast<unsigned char*>(const_cast<void*>(shared));
  meet_warp(name, Aligned::kYes, 0xffffffff, &mine, store_matrices<trans>, site);
}

struct Word {
  std::uint32_t given, result;
};

inline void transpose_words(void* const* lanes, std::uint32_t) {
  const auto element = [&](int row, int column) {
    const std::uint32_t word = static_cast<Word*>(lanes[row * 4 + column / 2])->given;
    return word >> 16 * (column % 2) & 0xffffu;
  };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int row = lane / 4;
    const int column = lane % 4 * 2;
    static_cast<Word*>(lanes[lane])->result = element(column, row) | element(column + 1, row) << 16;
  }
}

template <Format format>
void multiply(const char* name, float (&d)[4], const std::uint32_t (&a)[4],
              const std::uint32_t (&b)[2], Site site) {
  Fragments mine;
  std::memcpy(mine.a, a, sizeof(a));
  std::memcpy(mine.b, b, sizeof(b));
  std::memcpy(mine.d, d, sizeof(d));
  meet_warp(
      name, Aligned::kYes, 0xffffffff, &mine,
      [](void* const* lanes, std::uint32_t) {
        Fragments* fragments[kWarpSize];
        for (int i = 0; i < kWarpSize; ++i) fragments[i] = static_cast<Fragments*>(lanes[i]);
        multiply_fragments(format, kSm80, fragments);
      },
      site);
  std::memcpy(d, mine.d, sizeof(d));
}

inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

template <int size>
void copy_async(const char* name, void* shared, const void* global, int bytes, Site site) {
  check_shared(shared, size, size, name, site);
  if (bytes < 0 || bytes > size) fault(std::string(name) + ": so many bytes it cannot read", site);
  if (reinterpret_cast<std::uintptr_t>(global) % size != 0) {
    fault(std::string(name) + ": the address in global memory is not aligned", site);
  }
  copies().add(shared, global, size, bytes, site);
}

}  // namespace emulation

namespace fused_ops::sm80 {

using SharedAddress = std::uint32_t;

inline SharedAddress shared_address(const void* pointer) {
  return emulation::shared_address(pointer);
}

inline void cp_async_16(void* shared, const void* global, int bytes,
                        emulation::Site site = emulation::Site::here()) {
  emulation::copy_async<16>("cp_async_16", shared, global, bytes, site);
}

inline void cp_async_16(SharedAddress shared, const void* global, int bytes,
                        emulation::Site site = emulation::Site::here()) {
  emulation::copy_async<16>("cp_async_16", const_cast<void*>(emulation::shared_pointer(shared)),
                            global, bytes, site);
}

inline void cp_async_16(void* shared, const void* global,
                        emulation::Site site = emulation::Site::here()) {
  emulation::copy_async<16>("cp_async_16", shared, global, 16, site);
}

inline void cp_async_4(void* shared, const void* global, int bytes,
                       emulation::Site site = emulation::Site::here()) {
  emulation::copy_async<4>("cp_async_4", shared, global, bytes, site);
}

inline void cp_async_4(SharedAddress shared, const void* global, int bytes,
                       emulation::Site site = emulation::Site::here()) {
  emulation::copy_async<4>("cp_async_4", const_cast<void*>(emulation::shared_pointer(shared)),
                           global, bytes, site);
}

inline uint2 load_shared_8(SharedAddress shared, emulation::Site site = emulation::Site::here()) {
  const void* pointer = emulation::shared_pointer(shared);
  emulation::check_shared(pointer, 8, 8, "load_shared_8", site);
  return *static_cast<const uint2*>(pointer);
}

inline uint4 load_shared_16(SharedAddress shared, emulation::Site site = emulation::Site::here()) {
  const void* pointer = emulation::shared_pointer(shared);
  emulation::check_shared(pointer, 16, 16, "load_shared_16", site);
  return *static_cast<const uint4*>(pointer);
}

inline void store_global_16(void* global, const uint4& words,
                            emulation::Site site = emulation::Site::here()) {
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0) {
    emulation::fault("store_global_16: the address is not aligned", site);
  }
  *static_cast<uint4*>(global) = words;
}

inline void cp_async_commit() {
  emulation::copies().commit();
}

template <int pending>
void cp_async_wait() {
  emulation::copies().wait(pending);
}

inline void ldmatrix_x4(std::uint32_t (&d)[4], SharedAddress shared,
                        emulation::Site site = emulation::Site::here()) {
  emulation::load_matrix<false>("ldmatrix_x4", d, shared, site);
}

inline void ldmatrix_x4_trans(std::uint32_t (&d)[4], SharedAddress shared,
                              emulation::Site site = emulation::Site::here()) {
  emulation::load_matrix<true>("ldmatrix_x4_trans", d, shared, site);
}

inline std::uint32_t transpose_8x8(std::uint32_t word,
                                   emulation::Site site = emulation::Site::here()) {
  emulation::Word mine{word, 0};
  emulation::meet_warp("transpose_8x8", emulation::Aligned::kYes, 0xffffffff, &mine,
                       emulation::transpose_words, site);
  return mine.result;
}

inline void mma_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                    emulation::Site site = emulation::Site::here()) {
  emulation::multiply<emulation::Format::kF16>("mma_f16", d, a, b, site);
}

inline void mma_f16_zero(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                         emulation::Site site = emulation::Site::here()) {
  for (float& x : d) x = 0.0f;
  emulation::multiply<emulation::Format::kF16>("mma_f16_zero", d, a, b, site);
}

inline void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                     emulation::Site site = emulation::Site::here()) {
  emulation::multiply<emulation::Format::kBf16>("mma_bf16", d, a, b, site);
}

inline void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                     emulation::Site site = emulation::Site::here()) {
  emulation::multiply<emulation::Format::kTf32>("mma_tf32", d, a, b, site);
}

inline std::uint32_t pack_f16(float low, float high) {
  return emulation::f16_from(low) | std::uint32_t{emulation::f16_from(high)} << 16;
}

inline std::uint32_t pack_bf16(float low, float high) {
  return emulation::bf16_from(low) | std::uint32_t{emulation::bf16_from(high)} << 16;
}

inline float2 unpack_f16(std::uint32_t packed) {
  return {emulation::from_f16(static_cast<std::uint16_t>(packed)),
          emulation::from_f16(static_cast<std::uint16_t>(packed >> 16))};
}

inline float2 unpack_bf16(std::uint32_t packed) {
  return {emulation::from_bf16(static_cast<std::uint16_t>(packed)),
          emulation::from_bf16(static_cast<std::uint16_t>(packed >> 16))};
}

// Without subnormal numbers, as .ftz has it.
inline float exp2_approx(float x) {
  return emulation::flushed(std::exp2(emulation::flushed(x)));
}

inline float reciprocal_approx(float x) {
  return emulation::flushed(1.0f / emulation::flushed(x));
}

inline int opaque(int x) {
  return x;
}

inline float max_nan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return __uint_as_float(0x7fffffffu);
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}

inline void mbarrier_init(std::uint64_t* barrier, int count,
                          emulation::Site site = emulation::Site::here()) {
  emulation::mbarrier_init(barrier, count, site);
}

inline void mbarrier_arrive(std::uint64_t* barrier,
                            emulation::Site site = emulation::Site::here()) {
  emulation::mbarrier_arrive(barrier, site);
}

inline void mbarrier_wait(std::uint64_t* barrier, int parity,
                          emulation::Site site = emulation::Site::here()) {
  emulation::mbarrier_wait(barrier, parity, site);
}

template <int barrier, int threads>
void named_barrier(emulation::Site site = emulation::Site::here()) {
  static_assert(barrier >= 1 && barrier <= 15 && threads % emulation::kWarpSize == 0);
  emulation::named_barrier(barrier, threads, site);
}

inline void named_barrier(int barrier, int threads,
                          emulation::Site site = emulation::Site::here()) {
  if (barrier < 1 || barrier > 15 || threads % emulation::kWarpSize != 0) {
    emulation::fault("named_barrier: there is no such barrier", site);
  }
  emulation::named_barrier(barrier, threads, site);
}

// Grids run one after another.
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

}  // namespace fused_ops::sm80
