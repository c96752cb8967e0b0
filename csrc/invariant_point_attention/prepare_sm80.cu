// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/prepare_sm80.cuh"

#include <algorithm>
#include <cstdint>

#include "common/launch.h"

namespace fused_ops::invariant_point_attention {
namespace {

constexpr const char* kPrepare = "invariant_point_attention: launching prepare_sm80";

// `width`: 1 for biases, and of weights the numbers of a line. Returns how many there are.
int list_projections(const PrepareProblem& p, void* to, std::int64_t width, bool biases,
                     WeightCopy* copies) {
  const Sizes& s = p.sizes;
  const auto at = [&](std::int64_t line) -> void* {
    if (!to) return nullptr;
    return static_cast<unsigned char*>(to) + line * width * bytes_of(type_of(p.mode));
  };
  const auto stored = [&](const Linear& linear) { return biases ? linear.bias : linear.weight; };
  int count = 0;
  for (const Linear* linear : {&p.q, &p.k, &p.v}) {
    copies[count] = WeightCopy::of(stored(*linear), at(std::int64_t{count} * s.width()), s.heads,
                                   s.dim * width, s.head_dim * width);
    ++count;
  }
  const auto add = [&](const Stored& from, int first, int last) {
    const std::int64_t size = (last - first) * width;
    copies[count++] = WeightCopy::of(from, at(first), 1, size, size);
  };
  add(stored(p.q_points), s.query_points_at(), s.key_points_at());
  add(stored(p.k_points), s.key_points_at(), s.value_points_at());
  add(stored(p.v_points), s.value_points_at(), s.projected_filled());
  add({}, s.projected_filled(), s.projected());
  return count;
}

void list_copies(const PrepareProblem& p, WeightCopy (&copies)[kCopies]) {
  const Sizes& s = p.sizes;
  int count = list_projections(p, p.projections, s.channels, false, copies);
  count += list_projections(p, p.projection_bias, 1, true, copies + count);
  copies[count++] =
      WeightCopy::of(p.out.weight, p.out_weight, s.channels, s.features(), s.features_filled());
  copies[count++] = WeightCopy::of(p.out.bias, p.out_bias, 1, s.channels, s.channels);
}

// Null data where nothing is masked.
MaskBits mask_of(const PrepareProblem& p) {
  MaskBits mask;
  mask.rows = 1;
  mask.all_rows = p.sizes.batch;
  mask.n = p.sizes.n;
  if (!p.mask.data) return mask;
  mask.data = p.mask.data;
  mask.outer_stride = p.mask.batch_stride;
  mask.stride = p.mask.stride;
  mask.set_type(p.mask.type);
  mask.present = p.present;
  return mask;
}

template <DType type, int kRepeats>
void launch_prepare(PrepareParams& params, CUstream_st* stream) {
  const std::int64_t norm_blocks = norm_rows_blocks<type, kRepeats>(&params.norm);
  const std::int64_t blocks = params.other_blocks + norm_blocks;
  if (blocks == 0) return;
  params.pairs = static_cast<unsigned>(std::min<std::int64_t>(params.other_blocks, norm_blocks));
  FO_CHECK_RUNTIME(blocks < std::int64_t{1} << 31, kPrepare,
                   " must have fewer than 2^31 blocks, got ", blocks);
  launch(kPrepare, prepare_kernel<type, kRepeats>, static_cast<unsigned>(blocks), kPrepareThreads,
         sizeof(CentreShared), stream, params);
}

}  // namespace

void prepare_sm80(const PrepareProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0 || sizes.channels == 0) return;
  FO_CHECK_RUNTIME(sizes.n < std::int64_t{1} << 30 && sizes.batch < std::int64_t{1} << 30, kPrepare,
                   " must be given fewer than 2^30 residues and batch elements");
  PrepareParams params;
  params.copy_type = type_of(problem.mode);
  list_copies(problem, params.copies);
  const Rows rows{problem.node.data,
                  problem.node.type,
                  {{sizes.n, problem.node.stride}, {sizes.batch, problem.node.batch_stride}, {}}};
  params.norm = NormRowsParams::of(rows, sizes.channels, problem.eps, problem.norm_weight,
                                   problem.norm_bias, problem.normalised, params.copy_type);
  if (!problem.normalised) params.norm.rows = 0;
  params.centre.translations = problem.frames.translations;
  params.centre.batch_stride = problem.frames.translations_stride;
  params.centre.mask = mask_of(problem);
  params.centre.n = static_cast<int>(sizes.n);
  params.centre.centres = problem.centres;
  params.centre_blocks = problem.centres ? static_cast<unsigned>(sizes.batch) : 0;
  const MaskBits& mask = params.centre.mask;
  params.mask_blocks = mask.data && mask.present ? mask.blocks() : 0;
  params.other_blocks = params.centre_blocks + params.mask_blocks;
  for (const WeightCopy& copy : params.copies) params.other_blocks += copy.blocks;
  with_norm_rows(params.norm, problem.node.type, [&](auto type, auto repeats) {
    launch_prepare<decltype(type)::value, decltype(repeats)::value>(params, stream);
  });
}

}  // namespace fused_ops::invariant_point_attention
