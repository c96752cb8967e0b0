// SPDX-License-Identifier: Apache-2.0
// C = A * B to fp32's accuracy on the fp16 tensor cores, B prepared (prepare_sm80.cuh).
//
// A block takes tile after tile of C, all of them one stream of chunks of the inner axis. While a
// chunk is multiplied, the next one of A is scaled and split from a raw copy in shared memory, and
// the one after that is on its way there, across the borders of tiles too: so one barrier a chunk
// is enough, and only the first chunk of a block waits for memory.
#pragma once

#include "tensor_matmul/split_tile.cuh"

namespace fused_ops::tensor_matmul {

template <int kRows, int kColumns, int kWarpRows, int kWarpColumns>
struct SplitForward {
  static constexpr int kStages = 2;
  using Shared = SplitShared<kRows, kColumns, kStages>;
  using Warps = sm80::SplitWarps<kRows, kColumns, kWarpRows, kWarpColumns>;
  using Results = SplitResults<kRows, kColumns, kStages, Warps>;
  static constexpr int kThreads = Warps::kThreads;
  using Copies = SplitCopies<kRows, kColumns, kThreads, kStages>;

  static __device__ __forceinline__ void run(const SplitParams& params) {
    auto& shared = shared_memory<Shared>();
    const int thread = thread_index();
    const Copies copies{shared, params, thread};
    const Results results{shared, params, Warps{thread}};
    const bool early = thread < kThreads / 2;

    SplitStream a_at(params), b_at(params), at(params);
    copies.find_rows(a_at);
    __syncthreads();

    // Copies the next chunk of A and finds the rows of the one after it, if they are new.
    const auto copy_next_a = [&](int stage) {
      if (a_at.row_tile >= params.row_tiles) return;
      copies.copy_a(a_at, stage);
      a_at.advance(params);
      if (a_at.chunk == 0) copies.find_rows(a_at);
    };
    const auto copy_next_b = [&](int stage) {
      if (b_at.row_tile >= params.row_tiles) return;
      copies.copy_b(b_at, stage);
      b_at.advance(params);
    };
    copy_next_a(0);
    sm80::cp_async_commit();
    __syncthreads();
    copy_next_a(1);
    copy_next_b(0);
    sm80::cp_async_commit();
    sm80::cp_async_wait<1>();
    __syncthreads();
    copies.split_a(0, 0);

    typename Results::Product product;
    product.clear();
    int stage = 0;
    while (at.row_tile < params.row_tiles) {
      sm80::cp_async_wait<0>();
      __syncthreads();
      const bool more = b_at.row_tile < params.row_tiles;  // of A's next chunk, too
      copy_next_a(stage);
      copy_next_b(stage ^ 1);
      sm80::cp_async_commit();

      // Half of the warps split first and multiply then, half the other way round: so the tensor
      // cores of each quarter of the multiprocessor always have a warp that feeds them.
      if (early && more) copies.split_a(stage ^ 1, stage ^ 1);
      results.multiply(product, stage, [] {});
      if (!early && more) copies.split_a(stage ^ 1, stage ^ 1);
      if (at.chunk == static_cast<int>(params.prepared.chunks) - 1) {
        results.store(product, at);
        product.clear();
      }
      at.advance(params);
      stage ^= 1;
    }
    sm80::cp_async_wait<0>();
  }
};

template <int kRows, int kColumns, int kWarpRows, int kWarpColumns, int kMinBlocks>
__global__ void __launch_bounds__(SplitForward<kRows, kColumns, kWarpRows, kWarpColumns>::kThreads,
                                  kMinBlocks)
    split_forward_kernel(const __grid_constant__ SplitParams params) {
  SplitForward<kRows, kColumns, kWarpRows, kWarpColumns>::run(params);
}

}  // namespace fused_ops::tensor_matmul
