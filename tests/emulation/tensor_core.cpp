// SPDX-License-Identifier: Apache-2.0
#include "emulation/tensor_core.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace emulation {
namespace {

std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

double power_of_two(int exponent) {  // -1022 to 1023
  const std::uint64_t bits = static_cast<std::uint64_t>(exponent + 1023) << 52;
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

double cut_below(double x, double unit) {
  return static_cast<double>(static_cast<std::int64_t>(x / unit)) * unit;
}

// To fp32, towards zero.
float cut_off(double x) {
  if (std::abs(x) < 0x1p-126) return static_cast<float>(cut_below(x, 0x1p-149));
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= ~std::uint64_t{0x1fffffff};
  std::memcpy(&x, &bits, sizeof x);
  return static_cast<float>(x);
}

// The exponent by which the hardware shifts; subnormal numbers have that of the smallest normal.
constexpr std::int16_t kZero = -8192;  // so low that it is never the largest
template <int kExponentBits>
std::int16_t exponent_of(std::uint32_t field, bool zero) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  if (zero) return kZero;
  return static_cast<std::int16_t>(field == 0 ? 1 - kBias : static_cast<int>(field) - kBias);
}

std::int16_t exponent_of(float x) {
  return exponent_of<8>(bits_of(x) >> 23 & 0xffu, x == 0.0f);
}

constexpr int kMaxInner = 16;

struct Operand {  // a row of A or a column of B
  double value[kMaxInner];
  std::int16_t exponent[kMaxInner];
  bool finite;
};

Operand decode(Format format, const std::uint32_t* bits, int inner) {
  Operand operand;
  operand.finite = true;
  for (int l = 0; l < inner; ++l) {
    const std::uint32_t element = bits[l];
    float x;
    if (format == Format::kF16) {
      x = from_f16(static_cast<std::uint16_t>(element));
      operand.exponent[l] = exponent_of<5>(element >> 10 & 0x1fu, x == 0.0f);
    } else {
      x = format == Format::kBf16 ? float_of(element << 16) : float_of(element & ~0x1fffu);
      operand.exponent[l] = exponent_of(x);
    }
    operand.value[l] = x;
    operand.finite &= std::isfinite(x);
  }
  return operand;
}

// c + the sum of a[l] b[l] over one group.
template <int kProducts>
float add_products(float c, const Operand& a, const Operand& b, int l, int extra_bits) {
  std::int16_t largest = exponent_of(c);
  for (int i = 0; i < kProducts; ++i) {
    const auto exponent = static_cast<std::int16_t>(a.exponent[l + i] + b.exponent[l + i]);
    largest = std::max(largest, exponent);
  }
  if (largest <= kZero / 2) return 0.0f;  // nothing but zeros
  // A product is below 4 * 2^largest, so that 32 bits hold what is left of it.
  const int unit = largest - 23 - extra_bits;
  const double scale = power_of_two(-unit);
  double sum = static_cast<std::int32_t>(c * scale);
  for (int i = 0; i < kProducts; ++i) {
    sum += static_cast<std::int32_t>(a.value[l + i] * b.value[l + i] * scale);
  }
  return cut_off(sum * power_of_two(unit));
}

template <int kProducts>
float multiply_finite(float c, const Operand& a, const Operand& b, int inner, int extra_bits) {
  for (int l = 0; l < inner && std::isfinite(c); l += kProducts) {
    c = add_products<kProducts>(c, a, b, l, extra_bits);
  }
  return c;
}

// Only the kind of the result matters: which infinity, or NaN.
float multiply_special(float c, const Operand& a, const Operand& b, int inner) {
  double sum = c;
  for (int l = 0; l < inner; ++l) sum += a.value[l] * b.value[l];
  return std::isnan(sum) ? float_of(0x7fffffffu) : static_cast<float>(sum);
}

}  // namespace

std::uint16_t f16_from(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 2^16
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  if (exponent < -25) return static_cast<std::uint16_t>(sign);
  // Of the 24 bits of the significand `drop` go, more where the result is subnormal.
  const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const int drop = exponent < -14 ? 13 + (-14 - exponent) : 13;
  std::uint32_t kept = significand >> drop;
  const std::uint32_t rest = significand & ((1u << drop) - 1);
  const std::uint32_t half = 1u << (drop - 1);
  kept += rest > half || (rest == half && (kept & 1));
  // The leading bit, and a carry out of the fraction, add to the exponent as they should.
  const std::uint32_t field = exponent < -14 ? 0 : static_cast<std::uint32_t>(exponent + 14) << 10;
  return static_cast<std::uint16_t>(sign | (field + kept));
}

float from_f16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half} << 16 & 0x80000000u;
  const std::uint32_t field = half >> 10 & 0x1fu;
  const std::uint32_t fraction = half & 0x3ffu;
  if (field == 0x1f) return float_of(sign | 0x7f800000u | fraction << 13);
  if (field != 0) return float_of(sign | (field + 112) << 23 | fraction << 13);
  const float x = static_cast<float>(fraction) * 0x1p-24f;
  return sign != 0 ? -x : x;
}

std::uint16_t bf16_from(float x) {
  const std::uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float from_bf16(std::uint16_t bits) {
  return float_of(std::uint32_t{bits} << 16);
}

void multiply_accumulate(Format format, Accumulator accumulator, int rows, int columns, int inner,
                         const std::uint32_t* a, const std::uint32_t* b, float* c) {
  const int products = format == Format::kTf32 ? accumulator.products / 2 : accumulator.products;
  const auto multiply = products == 4   ? &multiply_finite<4>
                        : products == 8 ? &multiply_finite<8>
                                        : &multiply_finite<16>;
  Operand columns_of_b[256];
  for (int j = 0; j < columns; ++j) columns_of_b[j] = decode(format, b + j * inner, inner);
  for (int i = 0; i < rows; ++i) {
    const Operand row = decode(format, a + i * inner, inner);
    for (int j = 0; j < columns; ++j) {
      const Operand& column = columns_of_b[j];
      float& sum = c[i * columns + j];
      sum = row.finite && column.finite && std::isfinite(sum)
                ? multiply(sum, row, column, inner, accumulator.extra_bits)
                : multiply_special(sum, row, column, inner);
    }
  }
}

// Accumulators: rows l/4 and l/4 + 8, columns 2 (l%4) and the next. A register of an operand holds
// two 16-bit elements or one TF32, of row or column l/4 (a's second and fourth register: l/4 + 8);
// the later registers belong to the second half of the inner axis.
void multiply_fragments(Format format, Accumulator accumulator, Fragments* const* lanes) {
  const int per_register = format == Format::kTf32 ? 1 : 2;
  const int inner = 8 * per_register;
  const auto element = [&](std::uint32_t word, int i) {
    return per_register == 1 ? word : word >> 16 * i & 0xffffu;
  };
  std::uint32_t a[16 * kMaxInner];
  std::uint32_t b[8 * kMaxInner];
  float c[16 * 8];
  for (int lane = 0; lane < 32; ++lane) {
    const Fragments& mine = *lanes[lane];
    const int group = lane / 4;
    const int member = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < per_register; ++i) {
        const int l = half * inner / 2 + member * per_register + i;
        a[group * inner + l] = element(mine.a[2 * half], i);
        a[(group + 8) * inner + l] = element(mine.a[2 * half + 1], i);
        b[group * inner + l] = element(mine.b[half], i);
      }
    }
    for (int i = 0; i < 4; ++i) c[(group + i / 2 * 8) * 8 + 2 * member + i % 2] = mine.d[i];
  }
  multiply_accumulate(format, accumulator, 16, 8, inner, a, b, c);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      lanes[lane]->d[i] = c[(lane / 4 + i / 2 * 8) * 8 + 2 * (lane % 4) + i % 2];
    }
  }
}

}  // namespace emulation
