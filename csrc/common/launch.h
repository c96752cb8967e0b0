// SPDX-License-Identifier: Apache-2.0
// The few calls into the CUDA runtime, each checked. No torch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>

#include "common/build_info.h"
#include "common/check.h"

namespace fused_ops {

// Throws std::runtime_error with CUDA's own text; `what` names the op and the call.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next unrelated call would report it again
  FO_CHECK_RUNTIME(false, what, " must succeed, got CUDA error ", cudaGetErrorName(error), ": ",
                   cudaGetErrorString(error));
}

// Asked once per device: a query costs more than the rest of a launcher's host code.
inline Capability device_capability(int device) {
  constexpr int kCached = 64;
  static std::atomic<int> cache[kCached];  // 10 * major + minor, 0 where not asked yet
  const bool cached = device >= 0 && device < kCached;
  int number = cached ? cache[device].load(std::memory_order_relaxed) : 0;
  if (number == 0) {
    int major = 0;
    int minor = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
               "reading the compute capability");
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
               "reading the compute capability");
    number = 10 * major + minor;
    if (cached) cache[device].store(number, std::memory_order_relaxed);
  }
  return {number / 10, number % 10};
}

// Of the current device.
inline int multiprocessors() {
  constexpr int kCached = 64;
  static std::atomic<int> cache[kCached];
  int device = 0;
  check_cuda(cudaGetDevice(&device), "reading the current device");
  const bool cached = device >= 0 && device < kCached;
  int number = cached ? cache[device].load(std::memory_order_relaxed) : 0;
  if (number == 0) {
    check_cuda(cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device),
               "reading the number of multiprocessors");
    if (cached) cache[device].store(number, std::memory_order_relaxed);
  }
  return number;
}

// Bytes of shared memory that the blocks of one multiprocessor share, on the current device. Each
// block costs 1 KiB beside its own.
inline int shared_bytes_of_multiprocessor() {
  constexpr int kCached = 64;
  static std::atomic<int> cache[kCached];
  int device = 0;
  check_cuda(cudaGetDevice(&device), "reading the current device");
  const bool cached = device >= 0 && device < kCached;
  int bytes = cached ? cache[device].load(std::memory_order_relaxed) : 0;
  if (bytes == 0) {
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
               "reading the size of shared memory");
    if (cached) cache[device].store(bytes, std::memory_order_relaxed);
  }
  return bytes;
}

#ifdef __CUDACC__
// Launches kernel(params) and checks the launch itself; what goes wrong while the kernel runs
// shows, as always with CUDA, at a later call.
template <class Params>
void launch(const char* what, void (*kernel)(Params), unsigned grid_x, unsigned threads,
            std::size_t shared_bytes, cudaStream_t stream, const Params& params) {
  if (shared_bytes > 48 * 1024) {  // below, no permission is needed
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               what);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid_x);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), what);
}
#endif

}  // namespace fused_ops
