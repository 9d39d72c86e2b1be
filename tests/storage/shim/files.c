#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim.h"

static int sync_file(const char* call, long number, int file) {
  char path[PATH_MAX] = "";
  if (shim_is_ready) shim_path_of(file, path);
  const int becomes = shim_fate(call, path);
  if (becomes > 0) return shim_fail(becomes);
  const int64_t start = shim_log_bytes();
  const int done = (int)syscall(number, file);
  if (done == 0) shim_write_log((struct Record){.kind = kSync, .begin = start}, path, "", NULL, 0);
  return done;
}
int fsync(int file) { return sync_file("fsync", SYS_fsync, file); }
int fdatasync(int file) { return sync_file("fdatasync", SYS_fdatasync, file); }

int ftruncate(int file, off_t size) {
  char path[PATH_MAX] = "";
  if (shim_is_ready) shim_path_of(file, path);
  const int becomes = shim_fate("ftruncate", path);
  if (becomes > 0) return shim_fail(becomes);
  const int64_t start = shim_log_bytes();
  const int done = (int)syscall(SYS_ftruncate, file, size);
  const struct Record record = {.kind = kTruncate, .size = size, .begin = start};
  if (done == 0) shim_write_log(record, path, "", NULL, 0);
  return done;
}
int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

int truncate(const char* name, off_t size) {
  char path[PATH_MAX] = "";
  if (shim_is_ready) shim_path_at(AT_FDCWD, name, path);
  const int becomes = shim_fate("ftruncate", path);
  if (becomes > 0) return shim_fail(becomes);
  const int64_t start = shim_log_bytes();
  const int done = (int)syscall(SYS_truncate, name, size);
  const struct Record record = {.kind = kTruncate, .size = size, .begin = start};
  if (done == 0) shim_write_log(record, path, "", NULL, 0);
  return done;
}
int truncate64(const char* name, off_t size) { return truncate(name, size); }

int fallocate(int file, int mode, off_t offset, off_t size) {
  char path[PATH_MAX] = "";
  if (shim_is_ready) shim_path_of(file, path);
  const int becomes = shim_fate("fallocate", path);
  if (becomes > 0) return shim_fail(becomes);
  const int64_t start = shim_log_bytes();
  const int done = (int)syscall(SYS_fallocate, file, mode, offset, size);
  if (done == 0) {
    const struct Record record = {
        .kind = kAllocate, .flag = (uint32_t)mode, .offset = offset, .size = size, .begin = start};
    shim_write_log(record, path, "", NULL, 0);
  }
  return done;
}
int fallocate64(int file, int mode, off_t offset, off_t size) {
  return fallocate(file, mode, offset, size);
}
// glibc's would write to every page where the file system has no fallocate; this one says so
int posix_fallocate(int file, off_t offset, off_t size) {
  const int error = errno;
  const int failure = fallocate(file, 0, offset, size) == 0 ? 0 : errno;
  errno = error;
  return failure;
}
int posix_fallocate64(int file, off_t offset, off_t size) {
  return posix_fallocate(file, offset, size);
}

// -- names ----------------------------------------------------------------------------------------

static int open_at(int folder, const char* name, int flags, mode_t mode) {
  char path[PATH_MAX] = "";
  if (!shim_is_ready) return (int)syscall(SYS_openat, folder, name, flags, mode);
  shim_path_at(folder, name, path);
  const int becomes = shim_fate("open", path);
  if (becomes > 0) return shim_fail(becomes);
  const int is_new = (flags & O_CREAT) != 0 && shim_is_logged(path) && !shim_exists(path);
  const int64_t start = shim_log_bytes();
  const int file = (int)syscall(SYS_openat, folder, name, flags, mode);
  const int is_unnamed = (flags & O_TMPFILE) == O_TMPFILE;
  if (file >= 0 && !is_unnamed && (is_new || (flags & O_TRUNC) != 0)) {
    const uint32_t flag = (is_new ? O_CREAT : 0) | (flags & O_TRUNC);
    shim_write_log((struct Record){.kind = kOpen, .flag = flag, .begin = start}, path, "", NULL, 0);
  }
  return file;
}

#define MODE(flags, last)                         \
  mode_t mode = 0;                                \
  if (((flags) & (O_CREAT | __O_TMPFILE)) != 0) { \
    va_list more;                                 \
    va_start(more, last);                         \
    mode = va_arg(more, mode_t);                  \
    va_end(more);                                 \
  }
int open(const char* name, int flags, ...) {
  MODE(flags, flags)
  return open_at(AT_FDCWD, name, flags, mode);
}
int open64(const char* name, int flags, ...) {
  MODE(flags, flags)
  return open_at(AT_FDCWD, name, flags, mode);
}
int openat(int folder, const char* name, int flags, ...) {
  MODE(flags, flags)
  return open_at(folder, name, flags, mode);
}
int openat64(int folder, const char* name, int flags, ...) {
  MODE(flags, flags)
  return open_at(folder, name, flags, mode);
}
int __open_2(const char* name, int flags) { return open_at(AT_FDCWD, name, flags, 0); }
int __open64_2(const char* name, int flags) { return open_at(AT_FDCWD, name, flags, 0); }
int __openat_2(int folder, const char* name, int flags) { return open_at(folder, name, flags, 0); }
int __openat64_2(int folder, const char* name, int flags) {
  return open_at(folder, name, flags, 0);
}
int creat(const char* name, mode_t mode) {
  return open_at(AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC, mode);
}
int creat64(const char* name, mode_t mode) { return creat(name, mode); }

int mkdirat(int folder, const char* name, mode_t mode) {
  char path[PATH_MAX] = "";
  if (shim_is_ready) shim_path_at(folder, name, path);
  const int becomes = shim_fate("mkdir", path);
  if (becomes > 0) return shim_fail(becomes);
  const int done = (int)syscall(SYS_mkdirat, folder, name, mode);
  if (done == 0) shim_write_log((struct Record){.kind = kMakeDir}, path, "", NULL, 0);
  return done;
}
int mkdir(const char* name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int folder, const char* name, int flags) {
  char path[PATH_MAX] = "";
  if (shim_is_ready) shim_path_at(folder, name, path);
  const int becomes = shim_fate("unlink", path);
  if (becomes > 0) return shim_fail(becomes);
  const int done = (int)syscall(SYS_unlinkat, folder, name, flags);
  if (done == 0) shim_write_log((struct Record){.kind = kUnlink}, path, "", NULL, 0);
  return done;
}
int unlink(const char* name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char* name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char* name) {
  const int done = unlink(name);
  return done != 0 && errno == EISDIR ? rmdir(name) : done;
}

int renameat2(int from, const char* name, int to, const char* other, unsigned flags) {
  char path[PATH_MAX] = "";
  char new_path[PATH_MAX] = "";
  if (shim_is_ready) {
    shim_path_at(from, name, path);
    shim_path_at(to, other, new_path);
  }
  const int becomes = shim_fate("rename", path);
  if (becomes > 0) return shim_fail(becomes);
  const int done = (int)syscall(SYS_renameat2, from, name, to, other, flags);
  const struct Record record = {.kind = kRename, .flag = flags};
  if (done == 0) shim_write_log(record, path, new_path, NULL, 0);
  return done;
}
int renameat(int from, const char* name, int to, const char* other) {
  return renameat2(from, name, to, other, 0);
}
int rename(const char* name, const char* other) {
  return renameat2(AT_FDCWD, name, AT_FDCWD, other, 0);
}

int linkat(int from, const char* name, int to, const char* other, int flags) {
  char path[PATH_MAX] = "";
  char new_path[PATH_MAX] = "";
  if (shim_is_ready) {
    shim_path_at(from, name, path);
    shim_path_at(to, other, new_path);
  }
  const int becomes = shim_fate("link", path);
  if (becomes > 0) return shim_fail(becomes);
  const int done = (int)syscall(SYS_linkat, from, name, to, other, flags);
  if (done == 0) shim_write_log((struct Record){.kind = kLink}, path, new_path, NULL, 0);
  return done;
}
int link(const char* name, const char* other) { return linkat(AT_FDCWD, name, AT_FDCWD, other, 0); }
