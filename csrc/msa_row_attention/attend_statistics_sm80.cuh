// SPDX-License-Identifier: Apache-2.0
// The attention kernel with the end that the backward begins with: beside the result, what the
// softmax's gradient needs of each query, and the gradients in front of and behind the gate.
#pragma once

#include "msa_row_attention/attend_sm80.cuh"

namespace fused_ops::msa_row_attention {

struct StatisticsParams : AttendParams {  // `out` is the gated attention again
  const std::uint16_t* d_gated = nullptr;
  std::uint16_t* d_attended = nullptr;
  std::uint16_t* d_projected = nullptr;
  float* log_sums = nullptr;
  float* row_dots = nullptr;
};

struct Statistics {
  using Params = StatisticsParams;

  // Where a query's numbers of the head begin, of the attention.
  template <class Kernel>
  static __device__ __forceinline__ std::int64_t line_of(const Kernel& of, int at) {
    return (std::int64_t{of.row} * of.p.n + at) * of.p.width + of.head * of.p.dim;
  }

  // With a the attention and du the gradient of what is stored: da = du g, du a g (1 - g), and per
  // query the dot product of a and da. The latter is rounded first, because the products with the
  // values that it is subtracted from are taken of the rounded one.
  template <bool whole, class Kernel>
  static __device__ __forceinline__ void store(const Kernel& of, bool any) {
    constexpr Mode mode = Kernel::kMode;
    const Params& p = of.p;
    const int first_column = static_cast<int>(of.lane() % 4 * 2);
    // All loads are under way before the first is needed.
    std::uint32_t all_gates[Kernel::kM][2][Kernel::kTiles];
    std::uint32_t all_gradients[Kernel::kM][2][Kernel::kTiles];
#pragma unroll
    for (int m = 0; m < Kernel::kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = of.query_at(m, h);
        const bool here = whole || at < p.n;
        const std::uint16_t* gate_line = of.projected(at, 3);
        const std::uint16_t* d_gated_line = p.d_gated + line_of(of, at);
#pragma unroll
        for (int j = 0; j < Kernel::kTiles; ++j) {
          const int column = j * 8 + first_column;
          all_gates[m][h][j] = of.template load_two<whole>(gate_line, here, column);
          all_gradients[m][h][j] = of.template load_two<whole>(d_gated_line, here, column);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < Kernel::kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = of.query_at(m, h);
        const bool here = whole || at < p.n;
        const float inverse = any ? sm80::reciprocal_approx(of.sums[m][2 * h]) : 0.0f;
        const std::int64_t line = line_of(of, at);
        std::uint16_t* d_gate_line = p.d_projected + (of.projected(at, 3) - p.projected);
        const std::uint32_t (&gates)[Kernel::kTiles] = all_gates[m][h];
        const std::uint32_t (&d_gated)[Kernel::kTiles] = all_gradients[m][h];
        float dot = 0.0f;
#pragma unroll
        for (int j = 0; j < Kernel::kTiles; ++j) {
          const int column = j * 8 + first_column;
          const float2 logit = unpack_16<mode>(gates[j]), du = unpack_16<mode>(d_gated[j]);
          const float gate[2] = {sigmoid(logit.x), sigmoid(logit.y)};
          const float a[2] = {of.total[m][j][2 * h] * inverse, of.total[m][j][2 * h + 1] * inverse};
          const float gated[2] = {a[0] * gate[0], a[1] * gate[1]};
          const std::uint32_t d_attended = pack_16<mode>(du.x * gate[0], du.y * gate[1]);
          const float2 da = unpack_16<mode>(d_attended);
          dot = fmaf(a[0], da.x, fmaf(a[1], da.y, dot));
          if (!here || (!whole && !of.is_inside(column))) continue;
          const auto put = [&](std::uint16_t* to, std::uint32_t two) {
            *reinterpret_cast<std::uint32_t*>(to + column) = any ? two : 0;
          };
          put(p.out + line, pack_16<mode>(gated[0], gated[1]));
          put(p.d_attended + line, d_attended);
          put(d_gate_line, pack_16<mode>(du.x * gated[0] * (1.0f - gate[0]),
                                         du.y * gated[1] * (1.0f - gate[1])));
        }
        dot += __shfl_xor_sync(0xffffffff, dot, 1);
        dot += __shfl_xor_sync(0xffffffff, dot, 2);
        if (here && first_column == 0) {
          const std::int64_t query = (std::int64_t{of.row} * p.heads + of.head) * p.n + at;
          p.log_sums[query] = any ? of.shift[m][h] + __log2f(of.sums[m][2 * h]) : 0.0f;
          p.row_dots[query] = any ? dot : 0.0f;
        }
      }
    }
  }
};

}  // namespace fused_ops::msa_row_attention
