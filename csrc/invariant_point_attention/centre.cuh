// SPDX-License-Identifier: Apache-2.0
// The centre of a batch element's residues, which points are stored less: so that the rounding of
// their coordinates is that of a protein at the origin, wherever it lies.
//
// It starts as the mean over the residues that are there, taken relative to the first of them, and
// twice becomes the mean over those within three times the mean distance from it. So one residue
// far away (of more than six) does not count. Residues whose coordinates are not finite, or so
// large that squares would overflow, have no part in it.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/mask_bits.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "invariant_point_attention/invariant_point_attention.h"

namespace fused_ops::invariant_point_attention {

constexpr int kCentreThreads = 128;
constexpr int kCentreWarps = kCentreThreads / 32;
constexpr float kFarthest = 1e15f;  // coordinates of residues that count
constexpr float kNear = 3.0f;       // times the mean distance

struct CentreParams {
  Stored translations;
  std::int64_t batch_stride = 0;  // of them
  MaskBits mask;                  // where data is null, all are there
  int n = 0;
  Centre* centres = nullptr;
};

constexpr int kCentreKept = 8;  // residues of a thread that stay in shared memory

struct CentreShared {
  float kept[kCentreKept][3][kCentreThreads];  // NaN of those that do not count
  float sums[4][kCentreWarps];
  int first[kCentreWarps];
};

struct CentreOf {
  const CentreParams& params;
  std::int64_t batch;
  int thread;

  __device__ __forceinline__ bool is_present(int i) const {
    const MaskBits& mask = params.mask;
    return !mask.data ||
           is_there(mask.data, mask.bytes, mask.shift, batch * mask.outer_stride + i * mask.stride);
  }

  __device__ __forceinline__ void load(int i, float (&to)[3]) const {
    const std::int64_t at = batch * params.batch_stride + std::int64_t{i} * 3;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      to[c] = load_number(params.translations.data, params.translations.type, at + c);
    }
  }

  // False also of NaN.
  static __device__ __forceinline__ bool is_near(const float (&t)[3]) {
    return fabsf(t[0]) < kFarthest && fabsf(t[1]) < kFarthest && fabsf(t[2]) < kFarthest;
  }

  // Calls with(translation) for the thread's residues that count.
  template <class With>
  __device__ __forceinline__ void each(With with) const {
    const auto& shared = shared_memory<CentreShared>();
#pragma unroll
    for (int r = 0; r < kCentreKept; ++r) {
      const auto& kept = shared.kept[r];
      const float t[3] = {kept[0][thread], kept[1][thread], kept[2][thread]};
      if (is_near(t)) with(t);
    }
    for (int i = kCentreKept * kCentreThreads + thread; i < params.n; i += kCentreThreads) {
      float t[3];
      load(i, t);
      if (is_present(i) && is_near(t)) with(t);
    }
  }

  // Over all threads, in an order that is always the same.
  __device__ __forceinline__ void add_up(float (&sums)[4]) const {
    auto& shared = shared_memory<CentreShared>();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float sum = warp_sum(sums[k]);
      if (thread % 32 == 0) shared.sums[k][thread / 32] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      sums[k] = 0.0f;
#pragma unroll
      for (int w = 0; w < kCentreWarps; ++w) sums[k] += shared.sums[k][w];
    }
    __syncthreads();
  }

  // Keeps what fits; gives the number of residues that are there, and the first that counts or n.
  __device__ __forceinline__ void begin(float* all_present, int* first) const {
    auto& shared = shared_memory<CentreShared>();
    float present = 0.0f;
    int mine = params.n;
#pragma unroll
    for (int r = 0; r < kCentreKept; ++r) {
      const int i = r * kCentreThreads + thread;
      // Loaded whether it is there or not: one wait for all.
      float t[3] = {};
      if (i < params.n) load(i, t);
      const bool is_here = i < params.n && is_present(i);
      const bool counts = is_here && is_near(t);
      present += is_here ? 1.0f : 0.0f;
      if (counts) mine = min(mine, i);
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        shared.kept[r][c][thread] = counts ? t[c] : __int_as_float(0x7fffffff);
      }
    }
    for (int i = kCentreKept * kCentreThreads + thread; i < params.n; i += kCentreThreads) {
      if (!is_present(i)) continue;
      present += 1.0f;
      float t[3];
      load(i, t);
      if (is_near(t)) mine = min(mine, i);
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      mine = min(mine, __shfl_xor_sync(0xffffffffu, mine, other));
    }
    if (thread % 32 == 0) shared.first[thread / 32] = mine;
    float sums[4] = {present};
    add_up(sums);  // waits for it too
    *all_present = sums[0];
    *first = shared.first[0];
#pragma unroll
    for (int w = 1; w < kCentreWarps; ++w) *first = min(*first, shared.first[w]);
  }

  static __device__ __forceinline__ float distance(const float (&t)[3], const float (&from)[3]) {
    const float x = t[0] - from[0], y = t[1] - from[1], z = t[2] - from[2];
    return sqrtf(fmaf(x, x, fmaf(y, y, z * z)));
  }

  // To the mean over residues that are at most `limit` from it.
  __device__ __forceinline__ void move(float limit, float (&centre)[3]) const {
    float sums[4] = {};
    each([&](const float (&t)[3]) {
      if (distance(t, centre) > limit) return;
#pragma unroll
      for (int c = 0; c < 3; ++c) sums[c] += t[c] - centre[c];
      sums[3] += 1.0f;
    });
    add_up(sums);
#pragma unroll
    for (int c = 0; c < 3; ++c) centre[c] += sums[3] > 0.0f ? sums[c] / sums[3] : 0.0f;
  }

  __device__ __forceinline__ float mean_distance(const float (&centre)[3]) const {
    float sums[4] = {};
    each([&](const float (&t)[3]) {
      sums[0] += distance(t, centre);
      sums[1] += 1.0f;
    });
    add_up(sums);
    return sums[0] / sums[1];
  }

  __device__ __forceinline__ void run() const {
    float present, centre[3] = {};
    int first;
    begin(&present, &first);
    if (first < params.n) {  // the same for all threads
      load(first, centre);
      move(__int_as_float(0x7f800000), centre);
#pragma unroll 1
      for (int round = 0; round < 2; ++round) move(kNear * mean_distance(centre), centre);
    }
    if (thread == 0) {
      params.centres[batch] = Centre{{centre[0], centre[1], centre[2]}, present};
    }
  }
};

}  // namespace fused_ops::invariant_point_attention
