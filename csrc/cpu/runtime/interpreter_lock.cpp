#include "cpu/runtime/interpreter_lock.h"

#include <dlfcn.h>

namespace dynemb::cpu {
namespace {

// Found in the process, because the library is also loaded by programs without Python.
struct Interpreter {
  void* (*own_state)();      // of this thread, in the main interpreter
  void* (*current_state)();  // of the thread with the lock; from 3.12 on, of this thread if it is
  void* (*save)();
  void (*restore)(void*);

  bool found() const { return own_state && current_state && save && restore; }
};

template <class Function>
Function symbol(const char* name, const char* earlier_name = nullptr) {
  void* found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr && earlier_name != nullptr) found = dlsym(RTLD_DEFAULT, earlier_name);
  return reinterpret_cast<Function>(found);
}

const Interpreter& interpreter() {
  static const Interpreter found{
      symbol<void* (*)()>("PyGILState_GetThisThreadState"),
      symbol<void* (*)()>("PyThreadState_GetUnchecked", "_PyThreadState_UncheckedGet"),
      symbol<void* (*)()>("PyEval_SaveThread"),
      symbol<void (*)(void*)>("PyEval_RestoreThread"),
  };
  return found;
}

}  // namespace

WithoutInterpreterLock::WithoutInterpreterLock() : state_(nullptr) {
  const Interpreter& python = interpreter();
  if (!python.found()) return;
  void* own = python.own_state();
  if (own != nullptr && own == python.current_state()) state_ = python.save();
}

WithoutInterpreterLock::~WithoutInterpreterLock() {
  if (state_ != nullptr) interpreter().restore(state_);
}

}  // namespace dynemb::cpu
