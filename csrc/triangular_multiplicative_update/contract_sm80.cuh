// SPDX-License-Identifier: Apache-2.0
// The contraction of split planes to fp32's accuracy on the fp16 tensor cores.
//
// A block computes one square tile of one matrix; its four warps a quarter each. Chunks of
// kSplitInner of k come through a ring of stages by cp.async, already split, so that a warp does
// nothing but copy, load fragments and multiply. Small blocks, two and more a multiprocessor: while
// the warps of one meet at a barrier, fill their ring or store, the other one multiplies.
#pragma once

#include <cstdint>

#include "triangular_multiplicative_update/contract_operand_sm80.cuh"
#include "triangular_multiplicative_update/contract_tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

template <Layout a_layout, Layout b_layout, int kSide>
struct Contract {
  static constexpr int kWarpSide = kSide / 2;
  static constexpr int kThreads = 128;
  using Product = sm80::SplitProduct<kWarpSide, kWarpSide>;

  struct alignas(1024) Stage {
    unsigned char a[kOperandBytes<kSide>];
    unsigned char b[kOperandBytes<kSide>];
  };

  static __device__ __forceinline__ void run(const ContractParams& params) {
    const Sizes& sizes = params.problem.sizes;
    Stage* stages = &shared_memory<Stage>();
    const int thread = thread_index();
    const int lane = thread % 32;
    const int warp_row = thread / 64 * kWarpSide;
    const int warp_column = thread / 32 % 2 * kWarpSide;

    const TilePlace place(params, params.first_tile + blockIdx.x);
    const std::int64_t matrix = place.matrix * sizes.n * sizes.pitch;

    OperandCopies<a_layout, kSide, kThreads> a_copies(params.problem.a, matrix, sizes,
                                                      std::int64_t{place.row} * kSide, thread);
    OperandCopies<b_layout, kSide, kThreads> b_copies(params.problem.b, matrix, sizes,
                                                      std::int64_t{place.column} * kSide, thread);
    const auto copy = [&](int chunk, int stage) {
      if (chunk < params.chunks) {
        a_copies.copy(stages[stage].a, params.problem.a, sizes.pitch);
        b_copies.copy(stages[stage].b, params.problem.b, sizes.pitch);
      }
      sm80::cp_async_commit();
    };
    for (int i = 0; i < params.stages - 1; ++i) copy(i, i);

    Product product;
    product.clear();
    int stage = 0;
    int free = params.stages - 1;
#pragma unroll 1
    for (int chunk = 0; chunk < params.chunks; ++chunk) {
      if (params.stages == 2) {
        sm80::cp_async_wait<0>();
      } else {
        sm80::cp_async_wait<1>();
      }
      __syncthreads();  // the chunk is there for all, and all have read the one before
      copy(chunk + params.stages - 1, free);
      product.multiply(OperandA<a_layout, kSide>(stages[stage].a, warp_row, lane),
                       OperandB<b_layout, kSide>(stages[stage].b, warp_column, lane));
      free = stage;
      stage = stage + 1 == params.stages ? 0 : stage + 1;
    }
    sm80::cp_async_wait<0>();

    store_tile<kSide, kSide>(product, params.problem, place, warp_row, warp_column, lane);
  }
};

template <Layout a_layout, Layout b_layout, int kSide, int kMinBlocks>
__global__ void __launch_bounds__(Contract<a_layout, b_layout, kSide>::kThreads, kMinBlocks)
    contract_kernel(const __grid_constant__ ContractParams params) {
  Contract<a_layout, b_layout, kSide>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
