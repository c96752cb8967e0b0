// SPDX-License-Identifier: Apache-2.0
// The keys of dropout's hash: 64 bits for each row of the call, head and query.
#pragma once

#include "common/cuda/device.h"
#include "msa_row_attention/dropout.h"

namespace fused_ops::msa_row_attention {

constexpr int kDropoutKeysThreads = 256;

struct DropoutKeysParams {
  const std::int64_t* seed = nullptr;
  std::uint64_t first_map = 0;  // of the whole call's rows and heads
  std::int64_t count = 0;       // of keys
  unsigned n = 0;
  std::uint64_t* keys = nullptr;
};

// MurmurHash3's fmix64.
__device__ __forceinline__ std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 33) * 0xFF51AFD7ED558CCDu;
  x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53u;
  return x ^ x >> 33;
}

__global__ void __launch_bounds__(kDropoutKeysThreads)
    dropout_keys_kernel(const __grid_constant__ DropoutKeysParams p) {
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const std::int64_t at = std::int64_t{blockIdx.x} * kDropoutKeysThreads + thread_index();
  if (at >= p.count) return;
  const std::int64_t map = at / p.n;
  const auto query = static_cast<std::uint64_t>(at - map * p.n);
  const std::uint64_t seed = mix(static_cast<std::uint64_t>(*p.seed));
  const std::uint64_t of_map =
      mix((p.first_map + static_cast<std::uint64_t>(map)) * kGolden + seed);
  p.keys[at] = mix(of_map + query * kGolden);
}

}  // namespace fused_ops::msa_row_attention
