// In place of torch's: programs call the functions of ops, and register none.
#pragma once

#define STABLE_TORCH_LIBRARY_IMPL(library, key, m) \
  struct Unregistered {                            \
    void impl(const char*, int) {}                 \
  };                                               \
  [[maybe_unused]] static void unregistered(Unregistered& m)
#define TORCH_BOX(function) (static_cast<void>(function), 0)
