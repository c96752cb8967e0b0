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
namespace detail {

template <class Params>
void launch(const char* what, void (*kernel)(Params), unsigned grid_x, unsigned threads,
            std::size_t shared_bytes, cudaStream_t stream, bool early, const Params& params) {
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
  cudaLaunchAttribute attribute = {};
  if (early) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), what);
}

// Whether the code of the kernel that this device runs waits in griddepcontrol_wait(). PTX for an
// older architecture, compiled by the driver for a new device, does not.
template <auto kernel>
bool waits_for_previous_grid(const char* what) {
  constexpr int kCached = 64;
  static std::atomic<int> cache[kCached];  // the architecture, 0 where not asked yet
  int device = 0;
  check_cuda(cudaGetDevice(&device), what);
  const bool cached = device >= 0 && device < kCached;
  int number = cached ? cache[device].load(std::memory_order_relaxed) : 0;
  if (number == 0) {
    cudaFuncAttributes attributes = {};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), what);
    number = attributes.ptxVersion;
    if (cached) cache[device].store(number, std::memory_order_relaxed);
  }
  return number >= 90;
}

}  // namespace detail

// Launches kernel(params) and checks the launch itself; what goes wrong while the kernel runs
// shows, as always with CUDA, at a later call.
template <class Params>
void launch(const char* what, void (*kernel)(Params), unsigned grid_x, unsigned threads,
            std::size_t shared_bytes, cudaStream_t stream, const Params& params) {
  detail::launch(what, kernel, grid_x, threads, shared_bytes, stream, false, params);
}

// The same for a kernel that may start while the one launched before it on the stream still runs,
// where the device can do that: programmatic dependent launch. Every thread of the kernel calls
// griddepcontrol_wait() before it reads what that one wrote, or writes anything; that one calls
// griddepcontrol_launch_dependents().
template <auto kernel, class Params>
void launch_dependent(const char* what, unsigned grid_x, unsigned threads, std::size_t shared_bytes,
                      cudaStream_t stream, const Params& params) {
  detail::launch(what, kernel, grid_x, threads, shared_bytes, stream,
                 detail::waits_for_previous_grid<kernel>(what), params);
}
#endif

}  // namespace fused_ops
