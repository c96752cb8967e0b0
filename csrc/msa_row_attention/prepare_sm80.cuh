// SPDX-License-Identifier: Apache-2.0
// What comes before the products, in one launch: the weights side by side, the mask as bits, and
// the LayerNorm of the MSA, which is bound by memory bandwidth. A block takes one of the three.
#pragma once

#include "common/cuda/sm80/mask_bits.cuh"
#include "common/cuda/sm80/norm_rows.cuh"
#include "common/cuda/sm80/weight_copy.cuh"

namespace fused_ops::msa_row_attention {

constexpr int kPrepareThreads = 128;
static_assert(kPrepareThreads == kCopyThreads && kPrepareThreads == kMaskBitsThreads &&
              kPrepareThreads == kNormRowsThreads);

constexpr int kCopies = 8;

struct PrepareParams {
  NormRowsParams norm;
  WeightCopy copies[kCopies];
  MaskBits mask;
  unsigned mask_blocks = 0;
  unsigned other_blocks = 0;  // for all that is not LayerNorm
  unsigned pairs = 0;         // of a block of those and one for LayerNorm, which take turns
};

// kRepeats as normalise_rows has it.
template <DType type, int kRepeats>
__global__ void __launch_bounds__(kPrepareThreads, 8)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
  const int thread = thread_index();
  // In turn, so that while there are others most of what is under way is LayerNorm.
  const bool paired = blockIdx.x < 2 * params.pairs;
  unsigned block = paired ? blockIdx.x / 2 : blockIdx.x - params.pairs;
  if (paired ? blockIdx.x % 2 != 0 : params.pairs == params.other_blocks) {
    return normalise_rows<type, kRepeats>(params.norm, block, thread);
  }
  if (block < params.mask_blocks) return pack_mask(params.mask, block, thread);
  copy_numbers(params.copies, params.norm.out_type, block - params.mask_blocks, thread);
}

}  // namespace fused_ops::msa_row_attention
