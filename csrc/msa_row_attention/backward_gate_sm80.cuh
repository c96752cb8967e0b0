// SPDX-License-Identifier: Apache-2.0
// The backward's first step, number by number. With u = a g what attend stored, g the gate, du the
// gradient of u: da = du g, the gate's own gradient du u (1 - g), and of each query and head the
// dot product of a and da, which is that of u and du. Bound by memory.
#pragma once

#include "common/cuda/sm80/numbers.cuh"
#include "msa_row_attention/config.h"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

constexpr int kBackwardGateThreads = 256;

struct BackwardGateParams {
  const void* projected = nullptr;
  const float* projection_bias = nullptr;
  const void* gated = nullptr;
  const void* d_gated = nullptr;
  void* d_attended = nullptr;
  void* d_projected = nullptr;
  const float* factors = nullptr;
  float* row_dots = nullptr;
  float dot_scale = 1.0f;  // of dropout
  std::int64_t lines = 0;  // positions times heads
  unsigned heads = 0;
  unsigned n = 0;
  unsigned dim = 0;
  unsigned pieces = 0;  // of a line, 16 bytes each
  unsigned lines_of_block = 0;
};

// Where a query's numbers lie that there is one of for each head; `line` counts positions and
// heads.
__device__ __forceinline__ std::int64_t query_of(const BackwardGateParams& p, std::int64_t line) {
  const std::int64_t position = line / p.heads;
  const std::int64_t row = position / p.n;
  return (row * p.heads + (line - position * p.heads)) * p.n + (position - row * p.n);
}

struct BackwardGateShared {
  float dots[kBackwardGateThreads];
};

// A thread has 16 bytes of a head's line.
template <DType type>
__global__ void __launch_bounds__(kBackwardGateThreads)
    backward_gate_kernel(const __grid_constant__ BackwardGateParams p) {
  constexpr int kPiece = 16 / bytes_of(type);
  auto& shared = shared_memory<BackwardGateShared>();
  const auto thread = static_cast<unsigned>(thread_index());
  const unsigned in_block = thread / p.pieces;
  const unsigned column = (thread - in_block * p.pieces) * kPiece;
  const std::int64_t first = std::int64_t{blockIdx.x} * p.lines_of_block;
  const std::int64_t line = first + in_block;
  float dot = 0.0f;
  if (in_block < p.lines_of_block && line < p.lines) {
    const std::int64_t position = line / p.heads;
    const auto head = static_cast<unsigned>(line - position * p.heads);
    const std::int64_t width = std::int64_t{p.heads} * p.dim;
    const std::int64_t at = line * p.dim + column;
    const std::int64_t gate_at = position * 4 * width + 3 * width + head * p.dim + column;
    float gate[kPiece], u[kPiece], du[kPiece];
    load_numbers_as<type>(p.projected, gate_at, gate);
    load_numbers_as<type>(p.gated, at, u);
    load_numbers_as<type>(p.d_gated, at, du);
    if (p.projection_bias) {
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        gate[e] += p.projection_bias[3 * width + head * p.dim + column + e];
      }
    }
    const float factor = p.factors ? p.factors[query_of(p, line)] : 1.0f;
#pragma unroll
    for (int e = 0; e < kPiece; ++e) {
      // Of the opposite, so that both have all their digits.
      const float grown = sm80::exp2_approx(kLog2E * -fabsf(gate[e]));
      const float larger = 1.0f / (1.0f + grown), smaller = grown * larger;
      const float g = gate[e] >= 0.0f ? larger : smaller;
      const float rest = gate[e] >= 0.0f ? smaller : larger;
      dot = fmaf(u[e], du[e], dot);
      u[e] *= du[e] * rest;
      du[e] *= g * factor;
    }
    store_numbers_as<type>(p.d_attended, at, du);
    store_numbers_as<type>(p.d_projected, gate_at, u);
  }
  shared.dots[thread] = dot;
  __syncthreads();
  if (thread >= p.lines_of_block || first + thread >= p.lines) return;
  const std::int64_t query = query_of(p, first + thread);
  dot = 0.0f;
  for (unsigned piece = 0; piece < p.pieces; ++piece) dot += shared.dots[thread * p.pieces + piece];
  p.row_dots[query] = dot * (p.factors ? p.factors[query] : 1.0f) * p.dot_scale;
}

}  // namespace fused_ops::msa_row_attention
