// SPDX-License-Identifier: Apache-2.0
// 16-bit numbers and the arithmetic of tensor cores.
#pragma once

#include <cstdint>

namespace emulation {

// Rounded to nearest even; beyond the range infinite.
std::uint16_t f16_from(float x);
std::uint16_t bf16_from(float x);
float from_f16(std::uint16_t bits);
float from_bf16(std::uint16_t bits);

enum class Format { kF16, kBf16, kTf32 };

// Tensor cores multiply exactly, but do not round sums as IEEE 754 does: a group of products and
// the accumulator are shifted to the largest exponent among them, cut off below `extra_bits` more
// than fp32 has, added, and the sum is cut off to fp32. Emulated because long sums lose digits so.
struct Accumulator {
  int products;  // 16-bit ones in a group; of TF32 half as many
  int extra_bits;
};
inline constexpr Accumulator kSm80{8, 1};
inline constexpr Accumulator kSm90{16, 2};

// c (rows, columns) += a (rows, inner) b (columns, inner)^T, all contiguous; the operands as bits,
// 16 to an element or 32 for TF32, of which the low 13 are ignored.
void multiply_accumulate(Format format, Accumulator accumulator, int rows, int columns, int inner,
                         const std::uint32_t* a, const std::uint32_t* b, float* c);

// mma.sync: a warp multiplies 16 rows and 8 columns, with 256 bits of the inner axis.
struct Fragments {
  std::uint32_t a[4];
  std::uint32_t b[2];
  float d[4];
};
void multiply_fragments(Format format, Accumulator accumulator, Fragments* const* lanes);

}  // namespace emulation
