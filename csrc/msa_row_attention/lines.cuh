// SPDX-License-Identifier: Apache-2.0
// What the attention kernels for 16-bit types share: numbers as words, and lines of a head's
// numbers in shared memory.
#pragma once

#include "common/cuda/sm80/stored.cuh"
#include "msa_row_attention/config.h"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

constexpr int kKeys = 64;  // of a tile: as many as a word of the mask has bits

template <Mode mode>
__device__ __forceinline__ float2 unpack_16(std::uint32_t word) {
  return mode == Mode::kBFloat16 ? sm80::unpack_bf16(word) : sm80::unpack_f16(word);
}

template <Mode mode>
__device__ __forceinline__ std::uint32_t pack_16(float low, float high) {
  return mode == Mode::kBFloat16 ? sm80::pack_bf16(low, high) : sm80::pack_f16(low, high);
}

template <Mode mode>
__device__ __forceinline__ void multiply_16(float (&d)[4], const std::uint32_t (&a)[4],
                                            const std::uint32_t (&b)[2]) {
  mode == Mode::kBFloat16 ? sm80::mma_bf16(d, a, b) : sm80::mma_f16(d, a, b);
}

__device__ __forceinline__ float sigmoid(float x) {
  return sm80::reciprocal_approx(1.0f + sm80::exp2_approx(-kLog2E * x));
}

// Of `width` numbers of 16 bits, a multiple of 16.
template <int width>
struct Lines {
  static constexpr int kPitch = width == 48 ? 112 : width * 2;  // in bytes
  static constexpr int kPieces = width / 8;                     // of 16 bytes
  // Of so many threads each has one piece of a line, or none.
  static constexpr int kPieceRoom = kPieces <= 2 ? 2 : kPieces <= 4 ? 4 : kPieces <= 8 ? 8 : 16;

  // Whether pieces are in the same order in lines so far apart.
  static constexpr bool repeats_after(int lines) { return width == 48 || lines % 8 == 0; }

  // Where a piece of a line is: pieces of eight lines, one below the other, lie in different banks.
  static __device__ __forceinline__ unsigned piece_at(unsigned line, unsigned piece) {
    constexpr int kLines = width >= 64 ? 1 : 64 / width;  // of 128 bytes
    if (width != 48) piece ^= line / kLines % (kPieces < 8 ? kPieces : 8);
    return line * kPitch + piece * 16;
  }

  // From a piece to one further on, an even number of them.
  static __device__ __forceinline__ sm80::SharedAddress further(sm80::SharedAddress at,
                                                                int pieces) {
    return width == 48 ? at + pieces * 16 : at ^ (pieces * 16);
  }
};

}  // namespace fused_ops::msa_row_attention
