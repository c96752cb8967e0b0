// SPDX-License-Identifier: Apache-2.0
#include "emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if EMULATION_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#if EMULATION_OWN_SWITCH
// Saves what a called function must preserve on the old stack, takes it from the new one.
extern "C" void emulation_switch(void** from, void* to) asm("emulation_switch");

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl emulation_switch
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
// A new fiber starts at emulation_begin, with no caller for a debugger to follow.
extern "C" void emulation_begin() asm("emulation_begin");
asm(R"(
.text
.p2align 4
.globl emulation_switch
emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.globl emulation_begin
emulation_begin:
  mov x16, x19
  mov x30, xzr
  br x16
)");
#endif
#endif

namespace emulation {
namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr std::size_t kGuardBytes = std::size_t{64} << 10;  // a multiple of every page size in use

// The fiber being left and the one being entered, for the code that runs on the new stack first.
Fiber* leaving = nullptr;
Fiber* entering = nullptr;

}  // namespace

Fiber::Fiber(void (*entry)(void*), void* argument, unsigned number)
    : entry_(entry), argument_(argument) {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kGuardBytes, PROT_NONE);  // a stack that overflows ends the process
  char* bottom = static_cast<char*>(memory) + kGuardBytes;
  // Stacks at equal distances would share the same few sets of the cache.
  size_ = kStackBytes - number % 64 * 576;
  bottom_ = bottom;
#if EMULATION_OWN_SWITCH
  char* top = bottom + size_;
#if defined(__x86_64__)
  // From the top: no caller, where to start, six registers.
  void** stack = reinterpret_cast<void**>(top) - 8;
  stack[6] = reinterpret_cast<void*>(&Fiber::begin);
#else
  void** stack = reinterpret_cast<void**>(top) - 20;
  stack[0] = reinterpret_cast<void*>(&Fiber::begin);      // x19
  stack[11] = reinterpret_cast<void*>(&emulation_begin);  // x30
#endif
  stack_pointer_ = stack;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = bottom;
  context_.uc_stack.ss_size = size_;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::begin, 0);
#endif
}

void Fiber::begin() {
  Fiber* self = entering;
  self->arrive();
  self->entry_(self->argument_);
}

void Fiber::arrive() {
#if EMULATION_ASAN
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
  // The bounds of the process's own stack become known when it is left for the first time.
  if (leaving->bottom_ == nullptr) {
    leaving->bottom_ = bottom;
    leaving->size_ = size;
  }
#endif
}

void Fiber::hand_over_to(Fiber& next) {
  leaving = this;
  entering = &next;
#if EMULATION_ASAN
  __sanitizer_start_switch_fiber(&fake_stack_, next.bottom_, next.size_);
#endif
#if EMULATION_OWN_SWITCH
  emulation_switch(&stack_pointer_, next.stack_pointer_);
#else
  swapcontext(&context_, &next.context_);
#endif
  arrive();
}

}  // namespace emulation
