// Calls the library's ops in a C++ program that has only libtorch.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace dynemb::serving {

// Loads the library of ops, torch_dynemb/_C.abi3.so, into the process. Packages call its ops.
inline void load_ops(const std::string& library) {
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error("load_ops: " + library + " cannot be loaded: " + dlerror());
  }
}

namespace detail {

inline c10::OperatorHandle op(const std::string& name) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!found) {
    throw std::runtime_error("Model: the op " + name +
                             " is missing: call load_ops with torch_dynemb/_C.abi3.so first");
  }
  return *found;
}

// The results of an op.
template <typename... Arguments>
torch::jit::Stack call_all(const std::string& name, Arguments&&... arguments) {
  torch::jit::Stack stack;
  (stack.emplace_back(std::forward<Arguments>(arguments)), ...);
  op(name).callBoxed(stack);
  return stack;
}

// The first result of an op.
template <typename... Arguments>
c10::IValue call(const std::string& name, Arguments&&... arguments) {
  return std::move(call_all(name, std::forward<Arguments>(arguments)...).at(0));
}

}  // namespace detail

}  // namespace dynemb::serving
