// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/prepare_sm80.cuh"

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {
namespace {

// `lines` times as many numbers as a head has, filled up to its width.
WeightCopy copy_of(const Stored& from, void* to, const Sizes& sizes, std::int64_t lines,
                   std::int64_t line) {
  return WeightCopy::of(from, to, lines, sizes.dim * line, sizes.head_dim * line);
}

void list_copies(const PrepareProblem& p, DType type, WeightCopy (&copies)[kCopies]) {
  const Sizes& sizes = p.sizes;
  const std::int64_t width = sizes.width(), size = width * sizes.channels;
  const auto further = [&](void* to, std::int64_t numbers) -> void* {
    return to ? static_cast<unsigned char*>(to) + numbers * bytes_of(type) : nullptr;
  };
  const Stored* projections[] = {&p.query, &p.key, &p.value, &p.gate};
  for (int i = 0; i < 4; ++i) {
    copies[i] = copy_of(*projections[i], further(p.projections, i * size), sizes, sizes.heads,
                        sizes.channels);
  }
  copies[4] = copy_of({}, p.projection_bias, sizes, 3 * sizes.heads, 1);
  copies[5] = copy_of(p.gate_bias, further(p.projection_bias, 3 * width), sizes, sizes.heads, 1);
  copies[6] =
      copy_of(p.out_proj, p.out_weight, sizes, std::int64_t{sizes.channels} * sizes.heads, 1);
  copies[7] = WeightCopy::of(p.out_proj_bias, p.out_bias, sizes.channels, 1, 1);
}

template <DType type, int kRepeats>
void launch_prepare(PrepareParams& params, CUstream_st* stream) {
  const std::int64_t norm_blocks = norm_rows_blocks<type, kRepeats>(&params.norm);
  const std::int64_t blocks = params.other_blocks + norm_blocks;
  params.pairs = static_cast<unsigned>(std::min<std::int64_t>(params.other_blocks, norm_blocks));
  FO_CHECK_RUNTIME(blocks < std::int64_t{1} << 31,
                   "msa_row_attention: prepare must have fewer than 2^31 blocks, got ", blocks);
  launch("msa_row_attention: launching prepare_sm80", prepare_kernel<type, kRepeats>,
         static_cast<unsigned>(blocks), kPrepareThreads, 0, stream, params);
}

}  // namespace

void prepare_sm80(const PrepareProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.channels == 0) return;
  PrepareParams params;
  list_copies(problem, type_of(problem.mode), params.copies);
  params.norm = NormRowsParams::of(rows_of(sizes, problem.msa), sizes.channels, problem.eps,
                                   problem.norm_weight, problem.norm_bias, problem.normalised,
                                   type_of(problem.mode));
  const Mask& mask = problem.mask;
  if (mask.data) {
    params.mask.data = mask.data;
    params.mask.rows = sizes.rows;
    params.mask.all_rows = sizes.all_rows();
    params.mask.n = sizes.n;
    params.mask.outer_stride = mask.group_stride;
    params.mask.row_stride = mask.row_stride;
    params.mask.stride = mask.position_stride;
    params.mask.set_type(mask.type);
    params.mask.present = problem.present;
    params.mask_blocks = params.mask.blocks();
  }
  params.other_blocks = params.mask_blocks;
  for (const WeightCopy& copy : params.copies) params.other_blocks += copy.blocks;
  with_norm_rows(params.norm, problem.msa.type, [&](auto type, auto repeats) {
    launch_prepare<decltype(type)::value, decltype(repeats)::value>(params, stream);
  });
}

}  // namespace fused_ops::msa_row_attention
