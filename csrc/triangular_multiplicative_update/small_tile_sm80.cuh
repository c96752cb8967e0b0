// SPDX-License-Identifier: Apache-2.0
// What both kernels for small problems are made of: reading tensors of any type, LayerNorm, and a
// block's product of fp32 numbers in shared memory.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/instructions.cuh"
#include "triangular_multiplicative_update/small.h"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kSmallThreads = 256;
constexpr unsigned kWholeWarp = 0xffffffff;

// x / divisor for x * divisor < 2^31, without a division.
struct Divisor {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = std::uint32_t{1} << 31;

  Divisor() = default;
  explicit Divisor(std::int64_t value)
      : divisor(static_cast<std::uint32_t>(value)),
        multiplier(static_cast<std::uint32_t>(((std::int64_t{1} << 31) + value - 1) / value)) {}

  __device__ __forceinline__ int divide(int x) const {
    return static_cast<int>(std::uint64_t{static_cast<std::uint32_t>(x)} * multiplier >> 31);
  }
  __device__ __forceinline__ int rest(int x, int quotient) const {
    return x - quotient * static_cast<int>(divisor);
  }
};

// Reading ----------------------------------------------------------------------------------------
// A kernel is compiled twice: `plain` where all tensors are fp32 and all reads 16 bytes, and for
// anything else, asked at run time. Numbers stay as they were read until all reads are under way.

struct Source {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  bool vector = false;  // four numbers from a multiple of four on are aligned to their size
};

// Four numbers from `first` on, of which `count` exist; the rest are zeros. 16-bit types fill x, y.
template <bool plain>
__device__ __forceinline__ uint4 load_four(const Source& from, std::int64_t first, int count) {
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (count <= 0) return raw;
  const auto* words = static_cast<const unsigned*>(from.data) + first;
  const auto* halves = static_cast<const unsigned short*>(from.data) + first;
  if (plain) {
    raw = __ldg(reinterpret_cast<const uint4*>(words));
  } else if (from.vector) {
    if (from.type == DType::kFloat32) {
      raw = __ldg(reinterpret_cast<const uint4*>(words));
    } else {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(halves));
      raw.x = two.x;
      raw.y = two.y;
    }
  } else if (from.type == DType::kFloat32) {
    raw.x = __ldg(words);
    if (count > 1) raw.y = __ldg(words + 1);
    if (count > 2) raw.z = __ldg(words + 2);
    if (count > 3) raw.w = __ldg(words + 3);
  } else {
    raw.x = __ldg(halves);
    if (count > 1) raw.x |= unsigned{__ldg(halves + 1)} << 16;
    if (count > 2) raw.y = __ldg(halves + 2);
    if (count > 3) raw.y |= unsigned{__ldg(halves + 3)} << 16;
  }
  return raw;
}

template <bool plain>
__device__ __forceinline__ float4 converted(const uint4& raw, DType type) {
  if (plain || type == DType::kFloat32) {
    return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                       __uint_as_float(raw.w));
  }
  const bool bf16 = type == DType::kBFloat16;
  const float2 low = bf16 ? sm80::unpack_bf16(raw.x) : sm80::unpack_f16(raw.x);
  const float2 high = bf16 ? sm80::unpack_bf16(raw.y) : sm80::unpack_f16(raw.y);
  return make_float4(low.x, low.y, high.x, high.y);
}

// One number, or 0 of a tensor that is missing.
template <bool plain>
__device__ __forceinline__ float load_one(const Source& from, int index) {
  if (from.data == nullptr) return 0.0f;
  if (plain || from.type == DType::kFloat32) {
    return __ldg(static_cast<const float*>(from.data) + index);
  }
  const unsigned half = __ldg(static_cast<const unsigned short*>(from.data) + index);
  return from.type == DType::kBFloat16 ? sm80::unpack_bf16(half).x : sm80::unpack_f16(half).x;
}

template <bool plain>
__device__ __forceinline__ void store_one(void* to, DType type, std::int64_t index, float value) {
  if (plain || type == DType::kFloat32) {
    static_cast<float*>(to)[index] = value;
  } else {
    const std::uint32_t packed =
        type == DType::kBFloat16 ? sm80::pack_bf16(value, 0.0f) : sm80::pack_f16(value, 0.0f);
    static_cast<std::uint16_t*>(to)[index] = static_cast<std::uint16_t>(packed);
  }
}

__device__ inline float load_mask(const Mask& mask, std::int64_t index) {
  const auto half = [&] {
    return std::uint32_t{__ldg(static_cast<const unsigned short*>(mask.data) + index)};
  };
  switch (mask.type) {
    case MaskType::kUInt8:
      return __ldg(static_cast<const unsigned char*>(mask.data) + index);
    case MaskType::kInt8:
      return __ldg(static_cast<const signed char*>(mask.data) + index);
    case MaskType::kInt16:
      return static_cast<std::int16_t>(half());
    case MaskType::kInt32:
      return static_cast<float>(__ldg(static_cast<const int*>(mask.data) + index));
    case MaskType::kInt64:
      return static_cast<float>(__ldg(static_cast<const long long*>(mask.data) + index));
    case MaskType::kFloat16:
      return sm80::unpack_f16(half()).x;
    case MaskType::kBFloat16:
      return sm80::unpack_bf16(half()).x;
    case MaskType::kFloat32:
      return __ldg(static_cast<const float*>(mask.data) + index);
    case MaskType::kFloat64:
      return static_cast<float>(__ldg(static_cast<const double*>(mask.data) + index));
  }
  return 0.0f;
}

// LayerNorm --------------------------------------------------------------------------------------

__device__ __forceinline__ float& element(float4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

struct Norm {
  Source weight;
  Source bias;
  int length = 0;
  float share = 0.0f;  // 1 / length
  float eps = 0.0f;
};

// A line lies in `lanes` neighbouring lanes: lane l has numbers 4 * (l + i * lanes) to + 3 in
// fours[i]. Numbers from `count` on are zeros, and stay so.
template <int lanes, int fours>
struct Line {
  float4 value[fours];

  static __device__ __forceinline__ int column(int lane, int i) { return 4 * (lane + i * lanes); }

  static __device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int bit = lanes / 2; bit > 0; bit /= 2) x += __shfl_xor_sync(kWholeWarp, x, bit);
    return x;
  }

  __device__ __forceinline__ void normalize(int lane, const Norm& norm) {
    const int count = norm.length;
    const float share = norm.share;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      sum += (value[i].x + value[i].y) + (value[i].z + value[i].w);
    }
    const float mean = sum_of_lanes(sum) * share;
    // What rounding left of the mean is taken out in the second pass: so equal numbers, also a
    // single one, give zeros.
    float rest = 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < fours; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = element(value[i], e);
        x = column(lane, i) + e < count ? x - mean : 0.0f;
        rest += x;
        squares = fmaf(x, x, squares);
      }
    }
    rest = sum_of_lanes(rest) * share;
    squares = sum_of_lanes(squares) * share;
    const float scale = rsqrtf(fmaxf(fmaf(-rest, rest, squares), 0.0f) + norm.eps);
#pragma unroll
    for (int i = 0; i < fours; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = element(value[i], e);
        x = column(lane, i) + e < count ? (x - rest) * scale : 0.0f;
      }
    }
  }

  // Weight and bias, read before.
  template <bool plain>
  __device__ __forceinline__ void scale(const Norm& norm, const uint4 (&weight)[fours],
                                        const uint4 (&bias)[fours]) {
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      scale_four(i, converted<plain>(weight[i], norm.weight.type),
                 converted<plain>(bias[i], norm.bias.type));
    }
  }

  // Weight and bias in shared memory.
  __device__ __forceinline__ void scale(const float* weight, const float* bias, int lane) {
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      scale_four(i, *reinterpret_cast<const float4*>(weight + column(lane, i)),
                 *reinterpret_cast<const float4*>(bias + column(lane, i)));
    }
  }

  template <bool plain>
  static __device__ __forceinline__ void load(uint4 (&raw)[fours], const Source& from,
                                              std::int64_t first, int lane, int count) {
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      raw[i] = load_four<plain>(from, first + column(lane, i), count - column(lane, i));
    }
  }

  template <bool plain>
  __device__ __forceinline__ void take(const uint4 (&raw)[fours], DType type) {
#pragma unroll
    for (int i = 0; i < fours; ++i) value[i] = converted<plain>(raw[i], type);
  }

  __device__ __forceinline__ void store(float* line, int lane) const {
#pragma unroll
    for (int i = 0; i < fours; ++i) *reinterpret_cast<float4*>(line + column(lane, i)) = value[i];
  }

 private:
  __device__ __forceinline__ void scale_four(int i, const float4& weight, const float4& bias) {
    value[i].x = fmaf(value[i].x, weight.x, bias.x);
    value[i].y = fmaf(value[i].y, weight.y, bias.y);
    value[i].z = fmaf(value[i].z, weight.z, bias.z);
    value[i].w = fmaf(value[i].w, weight.w, bias.w);
  }
};

// Products ---------------------------------------------------------------------------------------
// In shared memory a line of up to `most` numbers has most + 4 places, an odd number of 16 bytes:
// eight neighbouring lines read at one column lie in different banks. Lines end in zeros.
template <int most>
constexpr int kPitch = most + 4;

// A block's reading of a matrix (rows, columns) into `lines` lines of shared memory.
template <int most, int lines, bool plain>
struct WeightTile {
  static constexpr int kLanes = most / 4;
  static constexpr int kRows = kSmallThreads / kLanes;  // at a time
  static constexpr int kSteps = lines / kRows;
  static_assert(lines % kRows == 0);

  uint4 raw[kSteps];

  __device__ __forceinline__ void load(const Source& weight, int first_row, int rows, int columns,
                                       int thread) {
    const int column = thread % kLanes * 4;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = first_row + thread / kLanes + i * kRows;
      raw[i] = load_four<plain>(weight, row * columns + column, row < rows ? columns - column : 0);
    }
  }

  __device__ __forceinline__ void store(float (*to)[kPitch<most>], DType type, int thread) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float* line = to[thread / kLanes + i * kRows];
      *reinterpret_cast<float4*>(line + thread % kLanes * 4) = converted<plain>(raw[i], type);
    }
  }
};

// sum[p][r] += x[p * kPairStep] . w[r * row_step] over `inner` numbers, in steps of 16. Lanes of a
// warp hold 4 neighbouring lines of x (lane / 8) and 8 of w (lane % 8).
constexpr int kPairStep = 4;

template <int most, int row_step, int pairs, int rows>
__device__ __forceinline__ void multiply(float (&sum)[pairs][rows], const float* x, const float* w,
                                         int inner) {
#pragma unroll 1
  for (int first = 0; first < inner; first += 16) {
#pragma unroll
    for (int k = 0; k < 16; k += 4) {
      float4 left[pairs];
      float4 right[rows];
#pragma unroll
      for (int p = 0; p < pairs; ++p) {
        left[p] = *reinterpret_cast<const float4*>(x + first + k + p * kPairStep * kPitch<most>);
      }
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        right[r] = *reinterpret_cast<const float4*>(w + first + k + r * row_step * kPitch<most>);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int p = 0; p < pairs; ++p) {
#pragma unroll
          for (int r = 0; r < rows; ++r) {
            sum[p][r] = fmaf(element(left[p], e), element(right[r], e), sum[p][r]);
          }
        }
      }
    }
  }
}

__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));  // 0 of a large -x, where the divisor is infinite
}

}  // namespace fused_ops::triangular_multiplicative_update
