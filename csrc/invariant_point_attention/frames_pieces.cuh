// SPDX-License-Identifier: Apache-2.0
// Frames of residues, points through them, and numbers as two of 16 bits. In all kernels here a
// warp takes a head of a residue, and a lane one of its points.
#pragma once

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "invariant_point_attention/backward.h"
#include "invariant_point_attention/config.h"

namespace fused_ops::invariant_point_attention {

constexpr int kFrameWarps = 4;  // of a block, where no two warps share anything

// A head of a residue.
struct Place {
  std::int64_t batch, node, line;  // the line: of tensors (batch, heads, n)
  int residue, head;
};

__device__ __forceinline__ Place place_of(const Sizes& sizes, unsigned node, int head) {
  const unsigned n = static_cast<unsigned>(sizes.n);
  const unsigned batch = node / n;
  Place place;
  place.batch = batch;
  place.node = node;
  place.residue = static_cast<int>(node - batch * n);
  place.head = head;
  place.line = (place.batch * sizes.heads + head) * sizes.n + place.residue;
  return place;
}

// Of the block's warp; false where there is none for it.
__device__ __forceinline__ bool find_place(const Sizes& sizes, unsigned tasks, Place& place) {
  const unsigned task = blockIdx.x * kFrameWarps + static_cast<unsigned>(thread_index()) / 32;
  if (task >= tasks) return false;
  const unsigned heads = static_cast<unsigned>(sizes.heads);
  const unsigned node = task / heads;
  place = place_of(sizes, node, static_cast<int>(task - node * heads));
  return true;
}

struct Point {
  float at[3];
};

struct Frame {
  float rotation[3][3];
  float shift[3];  // the translation less the centre

  // Points are rows: a local one times the rotation is a global one.
  __device__ __forceinline__ Point turned(const Point& local) const {
    Point global;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      global.at[d] = fmaf(local.at[2], rotation[2][d],
                          fmaf(local.at[1], rotation[1][d], local.at[0] * rotation[0][d]));
    }
    return global;
  }

  __device__ __forceinline__ Point turned_back(const Point& global) const {
    Point local;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      local.at[c] = fmaf(global.at[2], rotation[c][2],
                         fmaf(global.at[1], rotation[c][1], global.at[0] * rotation[c][0]));
    }
    return local;
  }
};

__device__ __forceinline__ Frame load_frame(const Frames& frames, const Centre& centre,
                                            const Place& place) {
  Frame frame;
  const std::int64_t rotation =
      place.batch * frames.rotations_stride + std::int64_t{9} * place.residue;
  const std::int64_t translation =
      place.batch * frames.translations_stride + std::int64_t{3} * place.residue;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      frame.rotation[c][d] =
          load_number(frames.rotations.data, frames.rotations.type, rotation + 3 * c + d);
    }
    frame.shift[c] =
        load_number(frames.translations.data, frames.translations.type, translation + c) -
        centre.at[c];
  }
  return frame;
}

__device__ __forceinline__ Point load_point(const void* data, DType type, std::int64_t first) {
  Point point;
#pragma unroll
  for (int d = 0; d < 3; ++d) point.at[d] = load_number(data, type, first + d);
  return point;
}

template <DType type>
__device__ __forceinline__ float rounded_to(float x) {
  if constexpr (type == DType::kFloat32) return x;
  return type == DType::kBFloat16 ? sm80::unpack_bf16(sm80::pack_bf16(x, 0.0f)).x
                                  : sm80::unpack_f16(sm80::pack_f16(x, 0.0f)).x;
}

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// Finite where x is.
template <DType type>
__device__ __forceinline__ float saturated_to(float x) {
  const float nearest = rounded_to<type>(x);
  if (is_finite(nearest) || !is_finite(x)) return nearest;
  return copysignf(type == DType::kFloat16 ? 65504.0f : __uint_as_float(0x7f7f0000u), x);
}

// Writes points, as lines of values and moments have them: high parts, then low parts in 16-bit
// types.
template <DType type>
__device__ __forceinline__ void split_point(const Point& point, int index, int numbers,
                                            float* line) {
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    const float high = saturated_to<type>(point.at[d]);
    line[3 * index + d] = high;
    if constexpr (type != DType::kFloat32) {
      const float rest = is_finite(point.at[d]) ? saturated_to<type>(point.at[d] - high) : 0.0f;
      line[numbers + 3 * index + d] = rest;
    }
  }
}

// The warp's line of fp32 numbers in shared memory, `count` of them, a multiple of 8.
template <DType type>
__device__ __forceinline__ void store_line(const float* line, int count, void* to,
                                           std::int64_t first, int lane) {
  for (int at = 8 * lane; at < count; at += 8 * 32) {
    float numbers[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) numbers[i] = line[at + i];
    store_numbers_as<type>(to, first + at, numbers);
  }
}

// What has been gathered of a point, in the global frame and less the translation, and the gradient
// with respect to it in the local frame: of the local point, and of its length.
template <DType type>
__device__ __forceinline__ Point gathered_gradient(const Sizes& sizes, const Frame& frame,
                                                   const Place& place, int point, float norm_eps,
                                                   const void* d_features, const float* gathered,
                                                   Point& global) {
  const int number = place.head * sizes.value_numbers() + 3 * point;
  const std::int64_t row = place.node * sizes.features();
  global = load_point(gathered, DType::kFloat32,
                      place.node * sizes.heads * sizes.value_numbers() + number);
  Point grad = load_point(d_features, type, row + sizes.points_at() + number);
  if (sizes.norms) {
    const float grad_of_length = load_number(
        d_features, type, row + sizes.norms_at() + place.head * sizes.value_points + point);
    const Point local = frame.turned_back(global);
    float squares = norm_eps;
#pragma unroll
    for (int c = 0; c < 3; ++c) squares = fmaf(local.at[c], local.at[c], squares);
    const float length = sqrtf(squares);
    const float share = length == 0.0f ? 0.0f : grad_of_length / length;
#pragma unroll
    for (int c = 0; c < 3; ++c) grad.at[c] = fmaf(share, local.at[c], grad.at[c]);
  }
  return grad;
}

}  // namespace fused_ops::invariant_point_attention
