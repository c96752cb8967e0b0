// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/prepare_sm80.cuh"

#include <algorithm>
#include <cstdint>

#include "common/launch.h"

namespace fused_ops::msa_row_attention {
namespace {

bool aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

bool is_floating(MaskType type) {
  return type == MaskType::kFloat16 || type == MaskType::kBFloat16 || type == MaskType::kFloat32 ||
         type == MaskType::kFloat64;
}

// `lines` times as many numbers as a head has, filled up to its width.
WeightCopy copy_of(const Stored& from, void* to, const Sizes& sizes, std::int64_t lines,
                   std::int64_t line) {
  WeightCopy copy;
  if (!to) return copy;
  copy.from = from;
  copy.to = to;
  copy.count = lines * sizes.dim * line;
  copy.chunk = sizes.dim * line;
  copy.filled = sizes.head_dim * line;
  copy.blocks = static_cast<unsigned>(ceil_div(copy.count, kCopyNumbers));
  copy.vector = from.data && copy.chunk == copy.filled && aligned(from.data) && aligned(to);
  return copy;
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
  Sizes whole = sizes;  // no heads here
  whole.dim = whole.head_dim = 1;
  copies[7] = copy_of(p.out_proj_bias, p.out_bias, whole, sizes.channels, 1);
}

template <DType type, int kRepeats>
void launch_prepare(PrepareParams& params, CUstream_st* stream) {
  const Sizes& sizes = params.problem.sizes;
  std::int64_t rows_of_block = kPrepareWarps;
  if constexpr (kRepeats > 0) {
    using Norms = RowNorms<type, kRepeats>;
    while ((kRepeats * Norms::kPiece << params.lanes_log2) < sizes.channels) ++params.lanes_log2;
    rows_of_block = (kPrepareThreads >> params.lanes_log2) * Norms::kRows;
  }
  const std::int64_t norm_blocks = ceil_div(sizes.positions(), rows_of_block);
  const std::int64_t blocks = params.other_blocks + norm_blocks;
  params.pairs = static_cast<unsigned>(std::min<std::int64_t>(params.other_blocks, norm_blocks));
  FO_CHECK_RUNTIME(blocks < std::int64_t{1} << 31,
                   "msa_row_attention: prepare must have fewer than 2^31 blocks, got ", blocks);
  launch("msa_row_attention: launching prepare_sm80", prepare_kernel<type, kRepeats>,
         static_cast<unsigned>(blocks), kPrepareThreads, 0, stream, params);
}

template <DType type>
void choose_prepare(PrepareParams& params, CUstream_st* stream) {
  const PrepareProblem& p = params.problem;
  constexpr int kPiece = 16 / bytes_of(type);
  const int channels = p.sizes.channels;
  bool vector = channels % 8 == 0 && aligned(p.msa.data) && aligned(p.normalised) &&
                aligned(p.norm_weight.data) && aligned(p.norm_bias.data);
  vector = vector && params.where.steps_by(kPiece);
  if (vector && channels <= 2 * 32 * kPiece) {
    launch_prepare<type, 2>(params, stream);
  } else if (vector && channels <= 4 * 32 * kPiece) {
    launch_prepare<type, 4>(params, stream);
  } else {
    launch_prepare<type, 0>(params, stream);
  }
}

}  // namespace

void prepare_sm80(const PrepareProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.channels == 0) return;
  PrepareParams params;
  params.problem = problem;
  list_copies(problem, type_of(problem.mode), params.copies);
  params.shares = NormShares::of(sizes.channels);
  params.where = NormRows::of(sizes, problem.msa);
  params.rows = sizes.positions();
  if (problem.mask.data) {
    const MaskType type = problem.mask.type;
    params.mask_bytes = bytes_of(type);
    params.mask_shift = is_floating(type) ? 1 : 0;
    params.mask_blocks =
        static_cast<unsigned>(ceil_div(sizes.all_rows() * mask_words(sizes.n), kPrepareWarps));
  }
  params.other_blocks = params.mask_blocks;
  for (const WeightCopy& copy : params.copies) params.other_blocks += copy.blocks;
  if (problem.msa.type == DType::kFloat32) {
    choose_prepare<DType::kFloat32>(params, stream);
  } else if (problem.msa.type == DType::kBFloat16) {
    choose_prepare<DType::kBFloat16>(params, stream);
  } else {
    choose_prepare<DType::kFloat16>(params, stream);
  }
}

}  // namespace fused_ops::msa_row_attention
