// SPDX-License-Identifier: Apache-2.0
// The attention kernel for fp32 tensors with the end that the backward begins with: beside the
// result, what the softmax's gradient needs of each query, and the gradients in front of and behind
// the gate.
//
// The sum of a query's weights, of which the logarithm may be hundreds, does not fit one fp32
// number to fp32's accuracy: its power of two is what log_sums has, and the rest, a factor of 1/2
// to 1 for all of the query's weights, goes into what they are multiplied with: d_attended,
// row_dots.
#pragma once

#include "msa_row_attention/attend_fp32_sm80.cuh"

namespace fused_ops::msa_row_attention {

struct StatisticsFp32Params : AttendFp32Params {  // `out` is the gated attention again
  const float* d_gated = nullptr;
  float* d_attended = nullptr;
  float* d_projected = nullptr;
  float* log_sums = nullptr;
  float* row_dots = nullptr;
};

struct StatisticsFp32 {
  using Params = StatisticsFp32Params;

  // With a the attention and du the gradient of what is stored: da = du g, du a g (1 - g), and per
  // query the dot product of a and da, as the latter is stored: it is subtracted from products with
  // that.
  template <class Kernel>
  static __device__ __forceinline__ void store(const Kernel& of, int h, bool any) {
    constexpr int kVector = Kernel::kVector;
    const Params& p = of.p;
    const float inverse = 1.0f / of.sums[h];
    // The sum is 2^power times a number of 1 to 2; NaN, infinity and zero make `factor` NaN.
    const std::uint32_t exponent = __float_as_uint(of.sums[h]) & 0x7f800000u;
    const float power = static_cast<float>(static_cast<int>(exponent >> 23) - 127);
    const float log_sum = of.shift[h] + power;
    // What log_sum lacks of the sum.
    const float taken = log_sum - of.shift[h];
    const float lost = (of.shift[h] - (log_sum - taken)) + (power - taken);
    const float factor = __uint_as_float(exponent) / of.sums[h] * exp2f(-lost);
    const int at = of.query_at(h);
    const bool here = at < p.n;
    const std::int64_t line = (of.row * p.n + at) * p.width + of.head * p.dim;
    const std::int64_t gate_line = of.projected(at, 3) - p.projected;
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < Kernel::kGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 2 * kVector; c += 4) {
        const int column = j * (8 * kVector) + of.t() * (2 * kVector) + c;
        if (!here || !of.is_inside(column)) continue;
        float gates[4], gated[4], d_attended[4], d_gate[4];
        of.load_gate(at, column, gates);
        const float4 du_four = *reinterpret_cast<const float4*>(p.d_gated + line + column);
        const float du[4] = {du_four.x, du_four.y, du_four.z, du_four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = c + e;
          const float a = of.total[j * kVector + i % kVector][2 * h + i / kVector] * inverse;
          const float gate = 1.0f / (1.0f + expf(-gates[e]));
          const float da = du[e] * gate, stored = da * factor;
          dot = fmaf(a, stored, dot);
          gated[e] = any ? a * gate : 0.0f;
          d_attended[e] = any ? stored : 0.0f;
          d_gate[e] = any ? da * a * (1.0f - gate) : 0.0f;
        }
        const auto put = [](float* to, const float (&four)[4]) {
          *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
        };
        put(p.out + line + column, gated);
        put(p.d_attended + line + column, d_attended);
        put(p.d_projected + gate_line + column, d_gate);
      }
    }
    dot += __shfl_xor_sync(0xffffffff, dot, 1);
    dot += __shfl_xor_sync(0xffffffff, dot, 2);
    if (here && of.t() == 0) {
      const std::int64_t query = (of.row * p.heads + of.head) * p.n + at;
      p.log_sums[query] = any ? log_sum : 0.0f;
      p.row_dots[query] = any ? dot : 0.0f;
    }
  }
};

}  // namespace fused_ops::msa_row_attention
