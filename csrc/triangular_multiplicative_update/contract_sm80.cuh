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

namespace fused_ops::triangular_multiplicative_update {

struct ContractParams {
  ContractProblem problem;
  std::int64_t first_tile = 0;  // of this launch
  int tiles = 0;                // along a side of a matrix
  int chunks = 0;               // of k
  int stages = 0;               // 2 or 3
};

// The undo factors of both operands. Each alone is in fp32's range and so is what they give in the
// end, but their product need not be; the smaller one first neither overflows nor loses digits that
// count.
struct Undo {
  float first;
  float second;

  __device__ __forceinline__ Undo(float a, float b) {
    const bool a_first = fabsf(a) < fabsf(b);
    first = a_first ? a : b;
    second = a_first ? b : a;
  }
  __device__ __forceinline__ float operator()(float x) const { return x * first * second; }
};

// Stores a warp's results at (row, column) of a matrix (n, n) with lines of `pitch`, as far as they
// lie inside.
template <class Product>
__device__ __forceinline__ void store_results(const Product& product, const Undo& undo,
                                              float* matrix, std::int64_t n, std::int64_t pitch,
                                              std::int64_t row, std::int64_t column, int lane) {
  // Two lanes exchange halves of two column tiles, so that each has four columns of one.
  const bool odd = lane % 2 == 1;
  row += lane / 4;
  column += lane % 4 / 2 * 4 + (odd ? 8 : 0);
  const auto x = [&](int i, int j) { return product.total[i / 2][j][i % 2 * 2]; };
  const auto y = [&](int i, int j) { return product.total[i / 2][j][i % 2 * 2 + 1]; };
  float* at = matrix + row * pitch + column;
#pragma unroll
  for (int i = 0; i < Product::kRowTiles * 2; ++i) {
#pragma unroll
    for (int j = 0; j < Product::kColumnTiles; j += 2) {
      const float take_x = __shfl_xor_sync(0xffffffffu, odd ? x(i, j) : x(i, j + 1), 1);
      const float take_y = __shfl_xor_sync(0xffffffffu, odd ? y(i, j) : y(i, j + 1), 1);
      const float keep_x = undo(odd ? x(i, j + 1) : x(i, j));
      const float keep_y = undo(odd ? y(i, j + 1) : y(i, j));
      const float4 four = odd ? make_float4(undo(take_x), undo(take_y), keep_x, keep_y)
                              : make_float4(keep_x, keep_y, undo(take_x), undo(take_y));
      const std::int64_t left = row + i * 8 < n ? n - column - j * 8 : 0;
      if (left >= 4) {
        __stcs(reinterpret_cast<float4*>(at + j * 8), four);
      } else {
        if (left > 0) at[j * 8] = four.x;
        if (left > 1) at[j * 8 + 1] = four.y;
        if (left > 2) at[j * 8 + 2] = four.z;
      }
    }
    at += pitch * 8;
  }
}

// All tiles of a matrix are neighbours and share its operands in L2.
struct TilePlace {
  std::int64_t matrix;
  std::int64_t row;
  std::int64_t column;

  __device__ __forceinline__ explicit TilePlace(const ContractParams& params) {
    const std::int64_t tile = params.first_tile + blockIdx.x;
    const std::int64_t tiles_of_matrix = std::int64_t{params.tiles} * params.tiles;
    matrix = tile / tiles_of_matrix;
    const int rest = static_cast<int>(tile % tiles_of_matrix);
    row = rest / params.tiles;
    column = rest % params.tiles;
  }
};

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

    const TilePlace place(params);
    const std::int64_t matrix = place.matrix * sizes.n * sizes.pitch;

    OperandCopies<a_layout, kSide, kThreads> a_copies(params.problem.a, matrix, sizes,
                                                      place.row * kSide, thread);
    OperandCopies<b_layout, kSide, kThreads> b_copies(params.problem.b, matrix, sizes,
                                                      place.column * kSide, thread);
    const auto copy = [&](int chunk, int stage) {
      if (chunk < params.chunks) {
        a_copies.copy(stages[stage].a, sizes.pitch);
        b_copies.copy(stages[stage].b, sizes.pitch);
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

    const std::int64_t channel = place.matrix / sizes.batch;
    const Undo undo(params.problem.a.undo[channel], params.problem.b.undo[channel]);
    store_results(product, undo, params.problem.out + matrix, sizes.n, sizes.pitch,
                  place.row * kSide + warp_row, place.column * kSide + warp_column, lane);
  }
};

template <Layout a_layout, Layout b_layout, int kSide, int kMinBlocks>
__global__ void __launch_bounds__(Contract<a_layout, b_layout, kSide>::kThreads, kMinBlocks)
    contract_kernel(const __grid_constant__ ContractParams params) {
  Contract<a_layout, b_layout, kSide>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
