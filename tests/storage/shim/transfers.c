#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim.h"

// Reads and writes, by system calls: glibc's functions only add that a thread may be cancelled.

typedef ssize_t (*Transfer)(int, const struct iovec*, int, off_t, int);

static ssize_t do_pwritev(int file, const struct iovec* data, int parts, off_t offset, int flags) {
  if (flags == 0) return syscall(SYS_pwritev, file, data, parts, offset, 0L);
  return syscall(SYS_pwritev2, file, data, parts, offset, 0L, flags);
}
static ssize_t do_preadv(int file, const struct iovec* data, int parts, off_t offset, int flags) {
  if (flags == 0) return syscall(SYS_preadv, file, data, parts, offset, 0L);
  return syscall(SYS_preadv2, file, data, parts, offset, 0L, flags);
}
static ssize_t do_writev(int file, const struct iovec* data, int parts, off_t offset, int flags) {
  (void)offset, (void)flags;
  return syscall(SYS_writev, file, data, parts);
}
static ssize_t do_readv(int file, const struct iovec* data, int parts, off_t offset, int flags) {
  (void)offset, (void)flags;
  return syscall(SYS_readv, file, data, parts);
}

static ssize_t transfer(const char* call, Transfer real, int file, const struct iovec* data,
                        int parts, off_t offset, int flags) {
  char path[PATH_MAX] = "";
  if (!shim_is_ready) return real(file, data, parts, offset, flags);
  shim_path_of(file, path);
  const int becomes = shim_fate(call, path);
  if (becomes > 0) return shim_fail(becomes);
  struct iovec half;
  if (becomes == kShortTransfer && parts > 0) {
    const size_t size = data[0].iov_len;  // in whole sectors where it may be a direct one
    half = (struct iovec){data[0].iov_base, size < 1024 ? size / 2 : size / 1024 * 512};
    data = &half;
    parts = 1;
  }
  const int64_t start = shim_log_bytes();
  const ssize_t done = real(file, data, parts, offset, flags);
  if (done > 0 && (real == do_pwritev || real == do_writev)) {
    const int64_t end = real == do_writev ? (int64_t)syscall(SYS_lseek, file, 0, SEEK_CUR) : 0;
    const int64_t at = real == do_writev ? end - done : (int64_t)offset;
    shim_write_log((struct Record){.kind = kWrite, .offset = at, .size = done, .begin = start},
                   path, "", data, parts);
  }
  return done;
}

#define ONE(data, size) (&(struct iovec){(void*)(data), (size)}), 1
#define DEFINE_PWRITE(name)                                                  \
  ssize_t name(int file, const void* data, size_t size, off_t offset) {      \
    return transfer("pwrite", do_pwritev, file, ONE(data, size), offset, 0); \
  }
#define DEFINE_PREAD(name)                                                 \
  ssize_t name(int file, void* data, size_t size, off_t offset) {          \
    return transfer("pread", do_preadv, file, ONE(data, size), offset, 0); \
  }
#define DEFINE_VECTOR(name, call, real)                                       \
  ssize_t name(int file, const struct iovec* data, int parts, off_t offset) { \
    return transfer(call, real, file, data, parts, offset, 0);                \
  }
#define DEFINE_FLAGS(name, call, real)                                                   \
  ssize_t name(int file, const struct iovec* data, int parts, off_t offset, int flags) { \
    return transfer(call, real, file, data, parts, offset, flags);                       \
  }
DEFINE_PWRITE(pwrite)
DEFINE_PWRITE(pwrite64)
DEFINE_PREAD(pread)
DEFINE_PREAD(pread64)
DEFINE_VECTOR(pwritev, "pwrite", do_pwritev)
DEFINE_VECTOR(pwritev64, "pwrite", do_pwritev)
DEFINE_VECTOR(preadv, "pread", do_preadv)
DEFINE_VECTOR(preadv64, "pread", do_preadv)
DEFINE_FLAGS(pwritev2, "pwrite", do_pwritev)
DEFINE_FLAGS(pwritev64v2, "pwrite", do_pwritev)
DEFINE_FLAGS(preadv2, "pread", do_preadv)
DEFINE_FLAGS(preadv64v2, "pread", do_preadv)

ssize_t __pread_chk(int file, void* data, size_t size, off_t offset, size_t room) {
  if (size > room) abort();
  return pread(file, data, size, offset);
}
ssize_t __pread64_chk(int file, void* data, size_t size, off_t offset, size_t room) {
  return __pread_chk(file, data, size, offset, room);
}
ssize_t write(int file, const void* data, size_t size) {
  return transfer("write", do_writev, file, ONE(data, size), 0, 0);
}
ssize_t writev(int file, const struct iovec* data, int parts) {
  return transfer("write", do_writev, file, data, parts, 0, 0);
}
ssize_t read(int file, void* data, size_t size) {
  return transfer("read", do_readv, file, ONE(data, size), 0, 0);
}
ssize_t readv(int file, const struct iovec* data, int parts) {
  return transfer("read", do_readv, file, data, parts, 0, 0);
}
ssize_t __read_chk(int file, void* data, size_t size, size_t room) {
  if (size > room) abort();
  return read(file, data, size);
}
