// SPDX-License-Identifier: Apache-2.0
// CUDA's language, as far as the kernels use it, for a plain C++ compiler.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulation/block.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__  // the C++ library uses the word as an attribute too: empty is valid there
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// __shared__ has no meaning on purpose: kernels take their shared memory from shared_memory().

// Vectors ----------------------------------------------------------------------------------------

#define EMULATION_VECTORS(name, type)                                     \
  struct alignas(2 * sizeof(type)) name##2 {                              \
    type x, y;                                                            \
  };                                                                      \
  struct name##3 {                                                        \
    type x, y, z;                                                         \
  };                                                                      \
  struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { \
    type x, y, z, w;                                                      \
  };                                                                      \
  inline name##2 make_##name##2(type x, type y) {                         \
    return {x, y};                                                        \
  }                                                                       \
  inline name##3 make_##name##3(type x, type y, type z) {                 \
    return {x, y, z};                                                     \
  }                                                                       \
  inline name##4 make_##name##4(type x, type y, type z, type w) {         \
    return {x, y, z, w};                                                  \
  }

EMULATION_VECTORS(float, float)
EMULATION_VECTORS(double, double)
EMULATION_VECTORS(int, int)
EMULATION_VECTORS(uint, unsigned)
EMULATION_VECTORS(short, short)
EMULATION_VECTORS(ushort, unsigned short)
EMULATION_VECTORS(uchar, unsigned char)
EMULATION_VECTORS(longlong, long long)
#undef EMULATION_VECTORS

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = emulation::kWarpSize;

// Barriers ---------------------------------------------------------------------------------------

inline void __syncthreads(emulation::Site site = emulation::Site::here()) {
  emulation::meet_block("__syncthreads", false, site);
}
inline int __syncthreads_or(int vote, emulation::Site site = emulation::Site::here()) {
  return emulation::meet_block("__syncthreads_or", vote != 0, site).yes > 0;
}
inline int __syncthreads_and(int vote, emulation::Site site = emulation::Site::here()) {
  const emulation::Votes votes = emulation::meet_block("__syncthreads_and", vote != 0, site);
  return votes.yes == votes.all;
}
inline int __syncthreads_count(int vote, emulation::Site site = emulation::Site::here()) {
  return emulation::meet_block("__syncthreads_count", vote != 0, site).yes;
}

inline void __syncwarp(unsigned mask = 0xffffffff, emulation::Site site = emulation::Site::here()) {
  emulation::meet_warp("__syncwarp", emulation::Aligned::kNo, mask, nullptr, nullptr, site);
}

// Blocks run one after another, fibers one at a time.
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}

[[noreturn]] inline void __trap(emulation::Site site = emulation::Site::here()) {
  emulation::fault("__trap", site);
}

// Votes and shuffles -----------------------------------------------------------------------------

namespace emulation {

struct Ballot {
  bool vote;
  unsigned result;
};

inline unsigned ballot(const char* name, unsigned mask, bool vote, Site site) {
  Ballot mine{vote, 0};
  meet_warp(
      name, Aligned::kNo, mask, &mine,
      [](void* const* lanes, std::uint32_t mask) {
        unsigned result = 0;
        for (int i = 0; i < kWarpSize; ++i) {
          if (mask >> i & 1) result |= unsigned{static_cast<Ballot*>(lanes[i])->vote} << i;
        }
        for (int i = 0; i < kWarpSize; ++i) {
          if (mask >> i & 1) static_cast<Ballot*>(lanes[i])->result = result;
        }
      },
      site);
  return mine.result;
}

template <class T>
struct Shuffle {
  T value;
  int source;
  T result;
  bool found;
};

template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, Site site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  Shuffle<T> mine{value, source, value, true};
  meet_warp(
      name, Aligned::kNo, mask, &mine,
      [](void* const* lanes, std::uint32_t mask) {
        for (int i = 0; i < kWarpSize; ++i) {
          if ((mask >> i & 1) == 0) continue;
          auto& lane = *static_cast<Shuffle<T>*>(lanes[i]);
          lane.found = mask >> lane.source & 1;
          if (lane.found) lane.result = static_cast<Shuffle<T>*>(lanes[lane.source])->value;
        }
      },
      site);
  if (!mine.found) fault(std::string(name) + ": reads from a lane outside of the mask", site);
  return mine.result;
}

template <class T, class Operation>
T reduce(const char* name, unsigned mask, T value, Operation, Site site) {
  T mine = value;
  meet_warp(
      name, Aligned::kNo, mask, &mine,
      [](void* const* lanes, std::uint32_t mask) {
        T all = *static_cast<T*>(lanes[__builtin_ctz(mask)]);
        for (int i = __builtin_ctz(mask) + 1; i < kWarpSize; ++i) {
          if (mask >> i & 1) all = Operation()(all, *static_cast<T*>(lanes[i]));
        }
        for (int i = 0; i < kWarpSize; ++i) {
          if (mask >> i & 1) *static_cast<T*>(lanes[i]) = all;
        }
      },
      site);
  return mine;
}

}  // namespace emulation

inline unsigned __ballot_sync(unsigned mask, int vote,
                              emulation::Site site = emulation::Site::here()) {
  return emulation::ballot("__ballot_sync", mask, vote != 0, site);
}
inline int __any_sync(unsigned mask, int vote, emulation::Site site = emulation::Site::here()) {
  return emulation::ballot("__any_sync", mask, vote != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int vote, emulation::Site site = emulation::Site::here()) {
  return emulation::ballot("__all_sync", mask, vote != 0, site) == mask;
}

// A lane's neighbours are those of its segment of `width` lanes.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
              emulation::Site site = emulation::Site::here()) {
  const int segment = static_cast<int>(emulation::lane()) & ~(width - 1);
  return emulation::shuffle("__shfl_sync", mask, value, segment + (source & (width - 1)), site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = warpSize,
                 emulation::Site site = emulation::Site::here()) {
  const int self = static_cast<int>(emulation::lane());
  const int source = self - static_cast<int>(distance);
  const bool inside = source >= (self & ~(width - 1));
  return emulation::shuffle("__shfl_up_sync", mask, value, inside ? source : self, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = warpSize,
                   emulation::Site site = emulation::Site::here()) {
  const int self = static_cast<int>(emulation::lane());
  const int source = self + static_cast<int>(distance);
  const bool inside = source < (self & ~(width - 1)) + width;
  return emulation::shuffle("__shfl_down_sync", mask, value, inside ? source : self, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize,
                  emulation::Site site = emulation::Site::here()) {
  const int self = static_cast<int>(emulation::lane());
  const int source = self ^ bits;
  const bool inside = source < (self & ~(width - 1)) + width;
  return emulation::shuffle("__shfl_xor_sync", mask, value, inside ? source : self, site);
}

#define EMULATION_REDUCE(name, expression)                                         \
  template <class T>                                                               \
  T name(unsigned mask, T value, emulation::Site site = emulation::Site::here()) { \
    static_assert(std::is_integral_v<T> && sizeof(T) == 4);                        \
    struct Operation {                                                             \
      T operator()(T a, T b) const { return expression; }                          \
    };                                                                             \
    return emulation::reduce(#name, mask, value, Operation(), site);               \
  }
EMULATION_REDUCE(__reduce_add_sync, static_cast<T>(static_cast<unsigned>(a) + b))
EMULATION_REDUCE(__reduce_min_sync, a < b ? a : b)
EMULATION_REDUCE(__reduce_max_sync, a > b ? a : b)
EMULATION_REDUCE(__reduce_and_sync, a& b)
EMULATION_REDUCE(__reduce_or_sync, a | b)
EMULATION_REDUCE(__reduce_xor_sync, a ^ b)
#undef EMULATION_REDUCE

// Memory -----------------------------------------------------------------------------------------

#define EMULATION_LOAD(name) \
  template <class T>         \
  T name(const T* address) { \
    return *address;         \
  }
#define EMULATION_STORE(name)      \
  template <class T>               \
  void name(T* address, T value) { \
    *address = value;              \
  }
EMULATION_LOAD(__ldg)
EMULATION_LOAD(__ldca)
EMULATION_LOAD(__ldcg)
EMULATION_LOAD(__ldcs)
EMULATION_LOAD(__ldlu)
EMULATION_LOAD(__ldcv)
EMULATION_STORE(__stwb)
EMULATION_STORE(__stcg)
EMULATION_STORE(__stcs)
EMULATION_STORE(__stwt)
#undef EMULATION_LOAD
#undef EMULATION_STORE

// Nothing else runs meanwhile. The second type is that of the address, as in CUDA.
#define EMULATION_ATOMIC(name, expression)          \
  template <class T>                                \
  T name(T* address, std::common_type_t<T> value) { \
    const T old = *address;                         \
    *address = expression;                          \
    return old;                                     \
  }
EMULATION_ATOMIC(atomicAdd, static_cast<T>(old + value))
EMULATION_ATOMIC(atomicSub, static_cast<T>(old - value))
EMULATION_ATOMIC(atomicMin, value < old ? value : old)
EMULATION_ATOMIC(atomicMax, value > old ? value : old)
EMULATION_ATOMIC(atomicAnd, old& value)
EMULATION_ATOMIC(atomicOr, old | value)
EMULATION_ATOMIC(atomicXor, old ^ value)
EMULATION_ATOMIC(atomicExch, value)
#undef EMULATION_ATOMIC

template <class T>
T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
  const T old = *address;
  if (old == compare) *address = value;
  return old;
}

// Numbers ----------------------------------------------------------------------------------------

namespace emulation {

template <class To, class From>
To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

}  // namespace emulation

inline unsigned __float_as_uint(float x) {
  return emulation::bits<unsigned>(x);
}
inline int __float_as_int(float x) {
  return emulation::bits<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return emulation::bits<float>(x);
}
inline float __int_as_float(int x) {
  return emulation::bits<float>(x);
}

// Of integers as CUDA has them; of floating numbers, the one that is not NaN.
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  const T x = static_cast<T>(a), y = static_cast<T>(b);
  return y < x || x != x ? y : x;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  const T x = static_cast<T>(a), y = static_cast<T>(b);
  return y > x || x != x ? y : x;
}

inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __exp10f(float x) {
  return std::pow(10.0f, x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __log2f(float x) {
  return std::log2(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __saturatef(float x) {
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float __fsub_rn(float x, float y) {
  return x - y;
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fdiv_rn(float x, float y) {
  return x / y;
}
inline float __fmaf_rn(float x, float y, float z) {
  return std::fma(x, y, z);
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
inline float __frsqrt_rn(float x) {
  return rsqrtf(x);
}
inline int __float2int_rn(float x) {
  return static_cast<int>(std::nearbyint(x));
}

// Byte i of the result is that byte of y:x whose number is in bits 4i to 4i+2 of the selector.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t both = std::uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
  return __builtin_popcountll(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
  return result;
}
