// SPDX-License-Identifier: Apache-2.0
// What kernels for small problems, whose time is latency, are made of: reading tensors of any type,
// all at once and as early as possible, LayerNorm of lines in registers, products with lines of
// weights.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/instructions.cuh"
#include "common/stored.h"

namespace fused_ops {

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
template <bool plain, class Index>
__device__ __forceinline__ float load_one(const Source& from, Index index) {
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

// Whether a mask has a number there that is not zero, by its bits: what is tiny is not zero either.
__device__ inline bool is_present(const void* mask, MaskType type, std::int64_t at) {
  switch (type) {
    case MaskType::kUInt8:
    case MaskType::kInt8:
      return __ldg(static_cast<const unsigned char*>(mask) + at) != 0;
    case MaskType::kInt16:
      return __ldg(static_cast<const unsigned short*>(mask) + at) != 0;
    case MaskType::kFloat16:
    case MaskType::kBFloat16:
      return (__ldg(static_cast<const unsigned short*>(mask) + at) & 0x7fff) != 0;
    case MaskType::kInt32:
      return __ldg(static_cast<const unsigned*>(mask) + at) != 0;
    case MaskType::kFloat32:
      return __ldg(static_cast<const unsigned*>(mask) + at) << 1 != 0;
    case MaskType::kInt64:
      return __ldg(static_cast<const unsigned long long*>(mask) + at) != 0;
    case MaskType::kFloat64:
      return __ldg(static_cast<const unsigned long long*>(mask) + at) << 1 != 0;
  }
  return true;
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

__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));  // 0 of a large -x, where the divisor is infinite
}

// Lines of weights in registers ------------------------------------------------------------------

// Four lanes whose numbers differ in bits `first` and `second` have parts of four sums; afterwards
// the lane with bits (b, c) has the whole sum b + 2 * c.
template <int first, int second>
__device__ __forceinline__ float fold_four(const float (&sum)[4], int lane) {
  const bool odd = lane & first, high = lane & second;
  const float low_pair =
      (odd ? sum[1] : sum[0]) + __shfl_xor_sync(kWholeWarp, odd ? sum[0] : sum[1], first);
  const float high_pair =
      (odd ? sum[3] : sum[2]) + __shfl_xor_sync(kWholeWarp, odd ? sum[2] : sum[3], first);
  return (high ? high_pair : low_pair) +
         __shfl_xor_sync(kWholeWarp, high ? low_pair : high_pair, second);
}

// Keeps the compiler from putting reads off until others have come.
template <int fours>
__device__ __forceinline__ void read_now(uint4 (&raw)[fours]) {
#pragma unroll
  for (int i = 0; i < fours; ++i) {
    raw[i].x = static_cast<unsigned>(sm80::opaque(static_cast<int>(raw[i].x)));
  }
}

// A line of up to `most` weights, a quarter of it: every fourth four. The lanes of a warp have
// eight lines (lane % 8): so those that read the same numbers of x are neighbours.
template <int most, bool plain>
struct WeightPart {
  static constexpr int kFours = most / 16;

  float4 number[kFours];

  __device__ __forceinline__ void load(const Source& weight, int line, int count, int length,
                                       int part) {
    uint4 raw[kFours];
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int column = 4 * (part + 4 * i);
      raw[i] = load_four<plain>(weight, line * length + column, count - column);
    }
#pragma unroll
    for (int i = 0; i < kFours; ++i) number[i] = converted<plain>(raw[i], weight.type);
  }

  // Products with four lines in shared memory that are `pitch` apart, whose sums four lanes share.
  template <int pitch>
  __device__ __forceinline__ void multiply(float (&sum)[4], const float* x, int length, int part) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (most > 64 && 16 * i >= length) break;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float4 v = *reinterpret_cast<const float4*>(x + r * pitch + 4 * (part + 4 * i));
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[r] = fmaf(element(v, e), element(number[i], e), sum[r]);
      }
    }
  }
};

// For launchers ----------------------------------------------------------------------------------

// Lines of `length` numbers whose strides are multiples of `step`.
inline Source source_of(const void* data, DType type, std::int64_t length, std::int64_t step) {
  Source result;
  result.data = data;
  result.type = type;
  const std::uintptr_t bytes = type == DType::kFloat32 ? 16 : 8;
  result.vector =
      reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && length % 4 == 0 && step % 4 == 0;
  return result;
}

inline Source source_of(const Stored& stored, std::int64_t length) {
  return source_of(stored.data, stored.type, length, length);
}

inline Norm norm_of(const Stored& weight, const Stored& bias, int length, float eps) {
  Norm result;
  result.weight = source_of(weight, length);
  result.bias = source_of(bias, length);
  result.length = length;
  result.share = 1.0f / static_cast<float>(length);
  result.eps = eps;
  return result;
}

// Whether the `plain` kernel may read them: line by line; one by one.
template <class... Sources>
bool plain_vectors(const Sources&... sources) {
  return ((sources.vector && sources.type == DType::kFloat32) && ...);
}

template <class... Sources>
bool plain_numbers(const Sources&... sources) {
  return ((sources.data == nullptr || sources.type == DType::kFloat32) && ...);
}

}  // namespace fused_ops
