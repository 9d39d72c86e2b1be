#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim.h"

static int log_file = -1;
static char log_folder[PATH_MAX];
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;

void shim_open_log(const char* file, const char* folder) {
  log_file =
      (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log_file < 0) shim_die("the log cannot be opened");
  if (strlen(folder) >= sizeof log_folder) shim_die("the path of the logged folder is too long");
  strcpy(log_folder, folder);
}

int shim_is_logged(const char* path) {
  const size_t length = strlen(log_folder);
  return log_file >= 0 && shim_starts_with(path, log_folder) &&
         (path[length] == '/' || path[length] == '\0');
}

int64_t shim_log_bytes(void) {
  if (log_file < 0) return 0;
  struct stat status;
  return fstat(log_file, &status) == 0 ? (int64_t)status.st_size : 0;
}

void shim_write_log(struct Record record, const char* path, const char* other,
                    const struct iovec* data, int parts) {
  if (!shim_is_logged(path) && !shim_is_logged(other)) return;
  const int error = errno;
  record.path_bytes = (uint32_t)strlen(path);
  record.other_bytes = (uint32_t)strlen(other);
  const int64_t data_bytes = record.kind == kWrite ? record.size : 0;
  const size_t head = sizeof record + record.path_bytes + record.other_bytes;
  char* whole = malloc(head + (size_t)data_bytes);
  if (whole == NULL) shim_die("no memory for the log");
  memcpy(whole, &record, sizeof record);
  memcpy(whole + sizeof record, path, record.path_bytes);
  memcpy(whole + sizeof record + record.path_bytes, other, record.other_bytes);
  int64_t left = data_bytes;
  char* to = whole + head;
  for (int i = 0; i < parts && left > 0; ++i) {
    const int64_t part = left < (int64_t)data[i].iov_len ? left : (int64_t)data[i].iov_len;
    memcpy(to, data[i].iov_base, (size_t)part);
    to += part;
    left -= part;
  }
  pthread_mutex_lock(&log_mutex);
  const char* from = whole;
  for (size_t rest = head + (size_t)data_bytes; rest > 0;) {
    const long done = syscall(SYS_write, log_file, from, rest);
    if (done <= 0) shim_die("the log cannot be written");
    from += done;
    rest -= (size_t)done;
  }
  pthread_mutex_unlock(&log_mutex);
  free(whole);
  errno = error;
}
