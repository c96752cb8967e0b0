// SPDX-License-Identifier: Apache-2.0
#include "emulation/driver.h"

#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>

// Leaks are not what these programs look for, and finding them needs rights that a container may
// not have.
extern "C" const char* __asan_default_options() {
  return "detect_leaks=0";
}
extern "C" const char* __ubsan_default_options() {
  return "print_stacktrace=1";
}

namespace emulation {
namespace {

std::map<std::string, void (*)(Request&)>& kernels() {
  static std::map<std::string, void (*)(Request&)> all;
  return all;
}

}  // namespace

Kernel::Kernel(const char* name, void (*run)(Request&)) {
  kernels()[name] = run;
}

// Lines "kernel NAME", "set NAME INTEGER", "input NAME BYTES" up to "data"; then the inputs' bytes.
void Request::read() {
  std::vector<const Buffer*> order;
  std::string line;
  while (std::getline(std::cin, line) && line != "data") {
    std::istringstream words(line);
    std::string kind, name;
    std::int64_t number = 0;
    words >> kind >> name >> number;
    if (kind == "kernel") {
      kernel_ = name;
    } else if (kind == "set") {
      settings_[name] = number;
    } else {
      order.push_back(&inputs_.emplace(name, static_cast<std::size_t>(number)).first->second);
    }
  }
  for (const Buffer* buffer : order) {
    std::cin.read(buffer->data(), static_cast<std::streamsize>(buffer->bytes()));
  }
  if (!std::cin) throw std::runtime_error("the request ends too early");
}

void Request::write() {
  for (const auto& [name, buffer] : outputs_) {
    std::cout << "output " << name << " " << buffer.bytes() << "\n";
  }
  std::cout << "data\n";
  for (const auto& [name, buffer] : outputs_) {
    std::cout.write(buffer.data(), static_cast<std::streamsize>(buffer.bytes()));
  }
  std::cout.flush();
}

std::int64_t Request::integer(const std::string& name) const {
  const auto found = settings_.find(name);
  if (found == settings_.end()) throw std::runtime_error("no setting " + name);
  return found->second;
}

std::int64_t Request::integer(const std::string& name, std::int64_t otherwise) const {
  return settings_.count(name) != 0 ? integer(name) : otherwise;
}

const Buffer& Request::find(const std::string& name) const {
  const auto found = inputs_.find(name);
  if (found == inputs_.end()) throw std::runtime_error("no input " + name);
  return found->second;
}

}  // namespace emulation

int main() {
  try {
    emulation::Request request;
    request.read();
    const auto& all = emulation::kernels();
    const auto kernel = all.find(request.kernel());
    if (kernel == all.end()) throw std::runtime_error("no kernel " + request.kernel());
    emulation::set_seed(static_cast<std::uint64_t>(request.integer("seed", 1)));
    kernel->second(request);
    request.write();
  } catch (const emulation::Fault& fault) {
    std::fprintf(stderr, "fault: %s\n", fault.what());
    return 3;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 4;
  }
  return 0;
}
