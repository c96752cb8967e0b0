// SPDX-License-Identifier: Apache-2.0
#include "common/launch.h"
#include "tensor_matmul/forward_sm80.cuh"

namespace fused_ops::tensor_matmul {
namespace {

bool aligned(const float* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

Access a_access(const ForwardParams& p) {
  const RowAxes& rows = p.a_rows;
  Access access;
  access.along_inner = p.a_inner_stride == 1 || rows.stride[rows.count - 1] != 1;
  if (access.along_inner) {
    access.vector = aligned(p.a) && p.a_inner_stride == 1;
    for (int i = 0; i < rows.count; ++i) access.vector &= rows.stride[i] % 4 == 0;
  } else {
    access.vector = aligned(p.a) && rows.count == 1 && p.a_inner_stride % 4 == 0;
  }
  return access;
}

Access b_access(const ForwardParams& p) {
  Access access;
  access.along_inner = p.b_inner_stride == 1 && p.b_column_stride != 1;
  access.vector =
      aligned(p.b) && (access.along_inner ? p.b_column_stride % 4 == 0
                                          : p.b_column_stride == 1 && p.b_inner_stride % 4 == 0);
  return access;
}

template <int tile>
void launch_tile(const KernelParams& params, CUstream_st* stream) {
  const ForwardParams& p = params.problem;
  launch("tensor_matmul: launching forward_sm80", forward_kernel<tile>,
         static_cast<unsigned>(blocks(kTiles[tile], p.rows, p.columns)), kTiles[tile].threads(),
         sizeof(SharedStorage<tile>), stream, params);
}

}  // namespace

void forward_sm80(const ForwardParams& problem, int tile, CUstream_st* stream) {
  if (problem.rows == 0 || problem.columns == 0) return;
  KernelParams params;
  params.problem = problem;
  params.a = a_access(problem);
  params.b = b_access(problem);
  params.c_vector = aligned(problem.c) && problem.columns % 4 == 0;
  if (tile == kLargeTile) {
    launch_tile<kLargeTile>(params, stream);
  } else {
    launch_tile<kSmallTile>(params, stream);
  }
}

}  // namespace fused_ops::tensor_matmul
