// SPDX-License-Identifier: Apache-2.0
// Every instruction once, in a form that Python can hold against its documentation.
#include <cstdint>

#include "common/cuda/sm80/instructions.cuh"
#include "emulation/driver.h"

namespace {

using namespace fused_ops;
using namespace fused_ops::sm80;
using emulation::Request;

constexpr unsigned kAll = 0xffffffff;

// D (16, 8) = C + A (16, inner) B (inner, 8), as a chain along the inner axis. Each lane gathers
// its elements where PTX's tables place them.
struct MmaParams {
  const std::uint16_t* a16;
  const std::uint16_t* b16;
  const std::uint32_t* a32;
  const std::uint32_t* b32;
  const float* c;
  float* d;
  int inner;
  int format;  // 0 fp16, 1 bf16, 2 TF32
};

__global__ void mma_kernel(const MmaParams p) {
  const int group = threadIdx.x >> 2;
  const int member = threadIdx.x & 3;
  float sum[4];
  const auto position = [&](int i) { return (group + (i < 2 ? 0 : 8)) * 8 + member * 2 + (i & 1); };
  for (int i = 0; i < 4; ++i) sum[i] = p.c[position(i)];
  for (int l = 0; l < p.inner; l += p.format == 2 ? 8 : 16) {
    std::uint32_t a[4] = {};
    std::uint32_t b[2] = {};
    if (p.format == 2) {
      for (int i = 0; i < 4; ++i) {
        a[i] = p.a32[(group + i % 2 * 8) * p.inner + l + member + i / 2 * 4];
      }
      for (int i = 0; i < 2; ++i) b[i] = p.b32[(l + member + i * 4) * 8 + group];
      mma_tf32(sum, a, b);
      continue;
    }
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      const int column = member * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      a[i / 2] |= std::uint32_t{p.a16[row * p.inner + l + column]} << 16 * (i % 2);
    }
    for (int i = 0; i < 4; ++i) {
      const int row = member * 2 + (i & 1) + (i >= 2 ? 8 : 0);
      b[i / 2] |= std::uint32_t{p.b16[(l + row) * 8 + group]} << 16 * (i % 2);
    }
    if (p.format == 1) {
      mma_bf16(sum, a, b);
    } else if (l == 0 && p.c[0] == 0.0f) {
      mma_f16_zero(sum, a, b);
    } else {
      mma_f16(sum, a, b);
    }
  }
  for (int i = 0; i < 4; ++i) p.d[position(i)] = sum[i];
}

const emulation::Kernel mma("mma", [](Request& request) {
  MmaParams p;
  p.a16 = request.input<std::uint16_t>("a");
  p.b16 = request.input<std::uint16_t>("b");
  p.a32 = request.input<std::uint32_t>("a");
  p.b32 = request.input<std::uint32_t>("b");
  p.c = request.input<float>("c");
  p.d = request.output<float>("d", 16 * 8);
  p.inner = static_cast<int>(request.integer("inner"));
  p.format = static_cast<int>(request.integer("format"));
  emulation::launch(mma_kernel, 1, 32, 0, p);
});

// Four 8x8 matrices, row after row, into fragments (lane, matrix).
struct MatrixShared {
  alignas(16) std::uint16_t rows[32][8];
};

__global__ void ldmatrix_kernel(const std::uint16_t* from, std::uint32_t* to, bool trans) {
  auto& shared = shared_memory<MatrixShared>();
  for (int i = 0; i < 8; ++i) shared.rows[threadIdx.x][i] = from[threadIdx.x * 8 + i];
  __syncwarp();
  std::uint32_t fragments[4];
  if (trans) {
    ldmatrix_x4_trans(fragments, shared_address(shared.rows[threadIdx.x]));
  } else {
    ldmatrix_x4(fragments, shared_address(shared.rows[threadIdx.x]));
  }
  for (int i = 0; i < 4; ++i) to[threadIdx.x * 4 + i] = fragments[i];
}

const emulation::Kernel ldmatrix("ldmatrix", [](Request& request) {
  emulation::launch(ldmatrix_kernel, 1, 32, sizeof(MatrixShared),
                    request.input<std::uint16_t>("rows"),
                    request.output<std::uint32_t>("fragments", 128), request.integer("trans") != 0);
});

// 16 bytes to a thread, copied to shared memory 4 by 4 and read at once.
struct WordsShared {
  alignas(16) std::uint32_t words[32][4];
};

struct SharedLoadParams {
  const std::uint32_t* from;
  uint4* to;
  uint2* halves;  // the second ones
};

__global__ void shared_load_kernel(SharedLoadParams p) {
  auto& shared = shared_memory<WordsShared>();
  for (int i = 0; i < 4; ++i) {
    const SharedAddress at = shared_address(&shared.words[threadIdx.x][i]);
    cp_async_4(at, p.from + threadIdx.x * 4 + i, i < 3 ? 4 : 0);
  }
  cp_async_commit();
  cp_async_wait<0>();
  const SharedAddress at = shared_address(shared.words[threadIdx.x]);
  p.to[threadIdx.x] = load_shared_16(at);
  p.halves[threadIdx.x] = load_shared_8(at + 8);
}

const emulation::Kernel shared_load("shared_load", [](Request& request) {
  emulation::launch(
      shared_load_kernel, 1, 32, sizeof(WordsShared),
      SharedLoadParams{request.input<std::uint32_t>("words"), request.output<uint4>("out", 32),
                       request.output<uint2>("halves", 32)});
});

// An 8x8 matrix, row after row, gathered into fragments and transposed.
__global__ void transpose_kernel(const std::uint32_t* from, std::uint32_t* to) {
  to[threadIdx.x] = transpose_8x8(from[threadIdx.x]);
}

const emulation::Kernel transpose("transpose", [](Request& request) {
  emulation::launch(transpose_kernel, 1, 32, 0, request.input<std::uint32_t>("rows"),
                    request.output<std::uint32_t>("columns", 32));
});

// Pairs of numbers to 16 bits and all of 16 bits to numbers.
__global__ void pack_kernel(const float* x, int count, bool bf16, std::uint32_t* packed) {
  for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
    packed[i] = bf16 ? pack_bf16(x[2 * i], x[2 * i + 1]) : pack_f16(x[2 * i], x[2 * i + 1]);
  }
}

__global__ void unpack_kernel(const std::uint32_t* packed, int count, bool bf16, float* x) {
  for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
    const float2 pair = bf16 ? unpack_bf16(packed[i]) : unpack_f16(packed[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

const emulation::Kernel pack("pack", [](Request& request) {
  const int count = static_cast<int>(request.size<float>("x"));
  emulation::launch(pack_kernel, 1, 64, 0, request.input<float>("x"), count,
                    request.integer("bf16") != 0,
                    request.output<std::uint32_t>("packed", count / 2));
});

const emulation::Kernel unpack("unpack", [](Request& request) {
  const int count = static_cast<int>(request.size<std::uint16_t>("packed"));
  emulation::launch(unpack_kernel, 1, 64, 0, request.input<std::uint32_t>("packed"), count,
                    request.integer("bf16") != 0, request.output<float>("x", count));
});

__global__ void max_nan_kernel(const float* x, const float* y, float* larger) {
  larger[threadIdx.x] = max_nan(x[threadIdx.x], y[threadIdx.x]);
}

const emulation::Kernel max_of_two("max_nan", [](Request& request) {
  const auto count = request.size<float>("x");
  emulation::launch(max_nan_kernel, 1, static_cast<unsigned>(count), 0, request.input<float>("x"),
                    request.input<float>("y"), request.output<float>("larger", count));
});

__global__ void approx_kernel(const float* x, float* power, float* reciprocal) {
  power[threadIdx.x] = exp2_approx(x[threadIdx.x]);
  reciprocal[threadIdx.x] = reciprocal_approx(x[threadIdx.x]);
}

const emulation::Kernel approx("approx", [](Request& request) {
  const auto count = request.size<float>("x");
  emulation::launch(approx_kernel, 1, static_cast<unsigned>(count), 0, request.input<float>("x"),
                    request.output<float>("power", count),
                    request.output<float>("reciprocal", count));
});

// Thread i copies i bytes of 16 and i % 5 bytes of 4.
struct CopyShared {
  alignas(16) unsigned char large[17][16];
  alignas(16) unsigned char small[17][4];
};

__global__ void copy_kernel(const unsigned char* from, unsigned char* large, unsigned char* small) {
  auto& shared = shared_memory<CopyShared>();
  const int i = threadIdx.x;
  cp_async_16(shared.large[i], from + 16 * i, i);
  cp_async_commit();
  cp_async_4(shared.small[i], from + 16 * i, i % 5);
  cp_async_commit();
  cp_async_wait<1>();
  for (int j = 0; j < 16; ++j) large[16 * i + j] = shared.large[i][j];
  cp_async_wait<0>();
  for (int j = 0; j < 4; ++j) small[4 * i + j] = shared.small[i][j];
}

const emulation::Kernel copy("copy", [](Request& request) {
  emulation::launch(copy_kernel, 1, 17, sizeof(CopyShared), request.input<unsigned char>("from"),
                    request.output<unsigned char>("large", 17 * 16),
                    request.output<unsigned char>("small", 17 * 4));
});

// results (what, lane) of shuffles, votes and reductions.
__global__ void warp_kernel(const int* x, int* results) {
  const int lane = threadIdx.x;
  const int mine = x[lane];
  int row = 0;
  const auto put = [&](int result) { results[row++ * 32 + lane] = result; };
  put(__shfl_sync(kAll, mine, 5));
  put(__shfl_sync(kAll, mine, lane + 3, 8));
  put(__shfl_up_sync(kAll, mine, 3));
  put(__shfl_up_sync(kAll, mine, 3, 16));
  put(__shfl_down_sync(kAll, mine, 5));
  put(__shfl_down_sync(kAll, mine, 5, 8));
  put(__shfl_xor_sync(kAll, mine, 9));
  put(static_cast<int>(__shfl_xor_sync(kAll, static_cast<float>(mine), 1)));
  put(static_cast<int>(__shfl_xor_sync(kAll, mine * (1ll << 40), 2) >> 40));
  put(static_cast<int>(__ballot_sync(kAll, mine > 0)));
  put(__any_sync(kAll, mine == x[7]));
  put(__all_sync(kAll, mine == x[7]));
  put(__reduce_add_sync(kAll, mine));
  put(__reduce_max_sync(kAll, mine));
  // Two halves of a warp on ways of their own.
  if (lane < 16) {
    put(__shfl_xor_sync(0x0000ffff, mine, 1));
  } else {
    put(__shfl_xor_sync(0xffff0000, mine, 2));
  }
}

const emulation::Kernel warp("warp", [](Request& request) {
  emulation::launch(warp_kernel, 1, 32, 0, request.input<int>("x"),
                    request.output<int>("results", 15 * 32));
});

// results (block, what) of votes of a block and of atomics; total of all blocks.
__global__ void block_kernel(int* results, float* total) {
  auto& sum = shared_memory<int>();
  const int thread = threadIdx.x;
  if (thread == 0) sum = 0;
  const int count = __syncthreads_count(thread % 3 == 0);
  atomicAdd(&sum, thread);
  const int any = __syncthreads_or(thread == 99);
  const int all = __syncthreads_and(thread != 99);
  atomicAdd(total, 0.5f);
  if (thread >= 64) return;  // whoever is left still meets
  __syncthreads();
  if (thread == 0) {
    int* mine = results + blockIdx.x * 4;
    mine[0] = count;
    mine[1] = any;
    mine[2] = all;
    mine[3] = sum;
  }
}

const emulation::Kernel block("block", [](Request& request) {
  float* total = request.output<float>("total", 1);
  *total = 0.0f;
  emulation::launch(block_kernel, 3, 100, sizeof(int), request.output<int>("results", 12), total);
});

}  // namespace
