// SPDX-License-Identifier: Apache-2.0
// A fiber: a stack of its own that runs until it hands over to another one.
#pragma once

#include <cstddef>

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(EMULATION_UCONTEXT)
#define EMULATION_OWN_SWITCH 1
#else
#define EMULATION_OWN_SWITCH 0
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define EMULATION_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATION_ASAN 1
#endif
#endif
#ifndef EMULATION_ASAN
#define EMULATION_ASAN 0
#endif

namespace emulation {

class Fiber {
 public:
  // The stack on which the process itself runs.
  Fiber() = default;
  // `entry` never returns: it hands over for the last time instead. Stacks are never given back.
  // `number` tells fibers apart, to spread their stacks over the processor's cache.
  Fiber(void (*entry)(void*), void* argument, unsigned number);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves this fiber, which must be the running one, for `next`; returns when somebody comes back.
  void hand_over_to(Fiber& next);

 private:
  static void begin();
  void arrive();

  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
#if EMULATION_OWN_SWITCH
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
  // What AddressSanitizer must know of a stack before it is entered.
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
  void* fake_stack_ = nullptr;
};

}  // namespace emulation
