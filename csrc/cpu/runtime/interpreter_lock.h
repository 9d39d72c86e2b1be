// The lock of a Python interpreter in the process, released while a kernel runs.
//
// torch.ops releases it before a kernel is called. torch's loader of packages keeps it while a
// model runs, so that threads with a model each would take turns.
#pragma once

namespace dynemb::cpu {

// Releases the lock if this thread holds it, until the end of the scope. Does nothing in a process
// without Python. Kernels that use it must not touch objects of Python.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock();
  ~WithoutInterpreterLock();
  WithoutInterpreterLock(const WithoutInterpreterLock&) = delete;
  WithoutInterpreterLock& operator=(const WithoutInterpreterLock&) = delete;

 private:
  void* state_;  // of this thread; nullptr: the lock was not held
};

}  // namespace dynemb::cpu
