// SPDX-License-Identifier: Apache-2.0
// What comes before the products, in one launch: the centres of the batch elements, the mask as
// bits, the weights side by side, and the LayerNorm of the nodes, or only their conversion. A block
// takes one of these.
#pragma once

#include "common/cuda/sm80/mask_bits.cuh"
#include "common/cuda/sm80/norm_rows.cuh"
#include "common/cuda/sm80/weight_copy.cuh"
#include "invariant_point_attention/centre.cuh"

namespace fused_ops::invariant_point_attention {

constexpr int kPrepareThreads = 128;
static_assert(kPrepareThreads == kCopyThreads && kPrepareThreads == kMaskBitsThreads &&
              kPrepareThreads == kNormRowsThreads && kPrepareThreads == kCentreThreads);

// Six projections and what fills them up, of weights and of biases; the output projection's two.
constexpr int kCopies = 16;

struct PrepareParams {
  NormRowsParams norm;
  WeightCopy copies[kCopies];
  DType copy_type = DType::kFloat32;
  CentreParams centre;  // with the mask
  unsigned centre_blocks = 0;
  unsigned mask_blocks = 0;
  unsigned other_blocks = 0;  // for all that is not LayerNorm
  unsigned pairs = 0;         // of a block of those and one for LayerNorm, which take turns
};

// kRepeats as normalise_rows has it.
template <DType type, int kRepeats>
__global__ void __launch_bounds__(kPrepareThreads, 7)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
  const int thread = thread_index();
  // In turn, so that while there are others most of what is under way is LayerNorm.
  const bool paired = blockIdx.x < 2 * params.pairs;
  unsigned block = paired ? blockIdx.x / 2 : blockIdx.x - params.pairs;
  if (paired ? blockIdx.x % 2 != 0 : params.pairs == params.other_blocks) {
    return normalise_rows<type, kRepeats, true>(params.norm, block, thread);
  }
  // First, as they take longest.
  if (block < params.centre_blocks) {
    return CentreOf{params.centre, block, thread}.run();
  }
  block -= params.centre_blocks;
  if (block < params.mask_blocks) return pack_mask(params.centre.mask, block, thread);
  copy_numbers(params.copies, params.copy_type, block - params.mask_blocks, thread);
}

}  // namespace fused_ops::invariant_point_attention
