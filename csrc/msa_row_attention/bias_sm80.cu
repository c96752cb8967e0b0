// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/bias_sm80.cuh"

#include <algorithm>
#include <cstdint>

#include "common/launch.h"

namespace fused_ops::msa_row_attention {
namespace {

// For the weights of all heads and channels; with the ring less than the 99 KB of a block on
// devices that have little.
constexpr int kMostTableBytes = 24 * 1024;

BiasAccess access_of(const BiasProblem& problem) {
  const Pairs& pair = problem.pair;
  const std::int64_t size = pair.type == DType::kFloat32 ? 4 : 2;
  // All whose multiples are added to an address; those of axes of length 1 are not.
  std::uint64_t steps = reinterpret_cast<std::uintptr_t>(pair.data);
  if (problem.sizes.groups > 1) steps |= static_cast<std::uint64_t>(pair.group_stride * size);
  if (problem.sizes.n > 1) {
    steps |= static_cast<std::uint64_t>(pair.i_stride * size);
    steps |= static_cast<std::uint64_t>(pair.j_stride * size);
  }
  // A word may hold fewer channels than it could, a piece not: it is there as a whole.
  if ((steps | static_cast<std::uint64_t>(problem.sizes.pair_channels * size)) % 16 == 0) {
    return BiasAccess::kPieces;
  }
  return steps % 4 == 0 ? BiasAccess::kWords : BiasAccess::kNumbers;
}

template <Mode mode, DType pair_type>
void launch_bias(const BiasProblem& problem, CUstream_st* stream) {
  using Kernel = BiasKernel<mode, pair_type>;
  BiasParams params;
  params.problem = problem;
  params.n = static_cast<int>(problem.sizes.n);
  params.blocks = static_cast<int>(bias_blocks(problem.sizes.n));
  params.key_blocks = static_cast<int>(bias_key_blocks(problem.sizes.n));
  params.chunks = static_cast<int>(ceil_div(problem.sizes.pair_channels, kBiasChunk));
  params.passes = problem.norm_weight.data && params.chunks > 1 ? 2 : 1;
  params.per_channel = 1.0f / static_cast<float>(problem.sizes.pair_channels);
  params.octets = static_cast<int>(ceil_div(problem.sizes.heads, 8));
  params.access = access_of(problem);
  params.resident = std::int64_t{params.octets} * params.chunks * Kernel::Table::kWeightBytes +
                        std::int64_t{params.chunks} * Kernel::Table::kNormBytes <=
                    kMostTableBytes;
  const int shared = params.resident ? Kernel::shared_bytes(params.octets, params.chunks)
                                     : Kernel::shared_bytes(Kernel::kOctets, 1);
  // As many as there is room for at once, each for several tiles that follow each other.
  const int resident = std::max(1, std::min(2, shared_bytes_of_multiprocessor() / (shared + 1024)));
  const std::int64_t tiles = problem.sizes.groups * params.blocks * params.key_blocks;
  const std::int64_t grid = std::min<std::int64_t>(tiles, multiprocessors() * resident);
  params.share = tiles / grid;
  params.longer = tiles % grid;
  launch("msa_row_attention: launching bias", bias_kernel<mode, pair_type>,
         static_cast<unsigned>(grid), kBiasThreads, shared, stream, params);
}

template <Mode mode>
void choose_pair(const BiasProblem& problem, CUstream_st* stream) {
  if (problem.pair.type == DType::kFloat32) {
    launch_bias<mode, DType::kFloat32>(problem, stream);
  } else if (problem.pair.type == DType::kBFloat16) {
    launch_bias<mode, DType::kBFloat16>(problem, stream);
  } else {
    launch_bias<mode, DType::kFloat16>(problem, stream);
  }
}

}  // namespace

void bias_sm80(const BiasProblem& problem, CUstream_st* stream) {
  if (problem.sizes.groups == 0 || problem.sizes.n == 0) return;
  if (problem.mode == Mode::kBFloat16) {
    choose_pair<Mode::kBFloat16>(problem, stream);
  } else if (problem.mode == Mode::kFloat16) {
    choose_pair<Mode::kFloat16>(problem, stream);
  } else {  // on FP32 units, which are fast enough, for both
    choose_pair<Mode::kSplit>(problem, stream);
  }
}

}  // namespace fused_ops::msa_row_attention
