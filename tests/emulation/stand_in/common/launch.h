// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/common/launch.h where drivers are compiled, so that a room's launchers run
// too, with their choices of grid, shared memory and access.
#pragma once

#include <cstddef>

#include "common/build_info.h"
#include "common/check.h"
#include "emulation/block.h"

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace fused_ops {

inline Capability device_capability(int) {
  return {8, 0};
}

// Few, so that blocks which walk over tiles take several. A driver may choose another number.
inline int emulated_multiprocessors = 3;

inline int multiprocessors() {
  return emulated_multiprocessors;
}

inline int shared_bytes_of_multiprocessor() {
  return 164 * 1024;  // as 8.0 has it
}

template <class Params>
void launch(const char*, void (*kernel)(Params), unsigned grid_x, unsigned threads,
            std::size_t shared_bytes, cudaStream_t, const Params& params) {
  // What every device of ours offers a block at most.
  FO_CHECK_RUNTIME(shared_bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory, got ",
                   shared_bytes, " bytes");
  emulation::launch(kernel, grid_x, threads, shared_bytes, params);
}

template <auto kernel, class Params>
void launch_dependent(const char* what, unsigned grid_x, unsigned threads, std::size_t shared_bytes,
                      cudaStream_t stream, const Params& params) {
  launch(what, kernel, grid_x, threads, shared_bytes, stream, params);
}

}  // namespace fused_ops
