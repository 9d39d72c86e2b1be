// Vectors for temporary data of a call. Large ones take huge pages if the system has them: new
// pages of 4 KiB on every call cost more than the work in them. Elements added by resize() are not
// initialized.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <new>
#include <type_traits>
#include <vector>

namespace dynemb::cpu {

template <class T>
struct ScratchAllocator {
  static_assert(std::is_trivially_copyable_v<T>);
  using value_type = T;

  ScratchAllocator() = default;
  template <class U>
  ScratchAllocator(const ScratchAllocator<U>&) {}

  T* allocate(size_t count) {
    constexpr size_t kHugePage = size_t{1} << 21;
    const size_t bytes = count * sizeof(T);
    const bool large = bytes >= 2 * kHugePage;
    void* memory = large ? std::aligned_alloc(kHugePage, (bytes + kHugePage - 1) & -kHugePage)
                         : std::malloc(bytes);
    if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (large) madvise(memory, bytes, MADV_HUGEPAGE);  // on failure, pages are small
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { std::free(memory); }

  // resize() calls it without arguments for new elements.
  template <class U>
  void construct(U* element) {
    ::new (static_cast<void*>(element)) U;
  }
  template <class U, class... A>
  void construct(U* element, A&&... arguments) {
    ::new (static_cast<void*>(element)) U(static_cast<A&&>(arguments)...);
  }
};

template <class T, class U>
bool operator==(const ScratchAllocator<T>&, const ScratchAllocator<U>&) {
  return true;
}
template <class T, class U>
bool operator!=(const ScratchAllocator<T>&, const ScratchAllocator<U>&) {
  return false;
}

template <class T>
using Scratch = std::vector<T, ScratchAllocator<T>>;

}  // namespace dynemb::cpu
