#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

enum { kMostRules = 32 };
struct Rule {
  char call[16];
  char prefix[PATH_MAX];
  char control[PATH_MAX];
  long first, times;
  int error;
  long seen;
};

static struct Rule faults[kMostRules], holds[kMostRules];
static int fault_count, hold_count;

int shim_is_ready;

void shim_die(const char* what) {
  fprintf(stderr, "file_shim: %s\n", what);
  abort();
}

static void copy(char* to, size_t room, const char* text) {
  if (strlen(text) >= room) shim_die("a word of the configuration is too long");
  strcpy(to, text);
}

int shim_exists(const char* path) { return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0; }

int shim_starts_with(const char* path, const char* prefix) {
  return strncmp(path, prefix, strlen(prefix)) == 0;
}

void shim_path_of(int file, char path[PATH_MAX]) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  path[length > 0 ? length : 0] = '\0';
  if (path[0] != '/') path[0] = '\0';
}

void shim_path_at(int folder, const char* name, char path[PATH_MAX]) {
  char whole[2 * PATH_MAX];
  path[0] = '\0';
  if (name == NULL || strlen(name) >= PATH_MAX) return;
  if (name[0] == '/') {
    strcpy(whole, name);
  } else {
    char base[PATH_MAX];
    if (folder == AT_FDCWD) {
      if (getcwd(base, sizeof base) == NULL) return;
    } else {
      shim_path_of(folder, base);
    }
    snprintf(whole, sizeof whole, "%s/%s", base, name);
  }
  for (size_t end = strlen(whole); end > 1 && whole[end - 1] == '/'; --end) whole[end - 1] = '\0';
  char* last = strrchr(whole, '/');
  if (last == NULL) return;
  *last = '\0';
  char real[PATH_MAX];
  if (realpath(last == whole ? "/" : whole, real) == NULL) return;
  if (strlen(real) + strlen(last + 1) + 2 > PATH_MAX) return;
  strcpy(path, strcmp(real, "/") == 0 ? "" : real);
  strcat(path, "/");
  strcat(path, last + 1);
}

static void wait_where_held(const char* call, const char* path) {
  for (int i = 0; i < hold_count; ++i) {
    const struct Rule* rule = &holds[i];
    if (strcmp(rule->call, call) != 0 || !shim_starts_with(path, rule->prefix)) continue;
    int is_told = 0;
    while (shim_exists(rule->control)) {
      if (!is_told) {  // that a call has come this far
        char reached[PATH_MAX + 16];
        snprintf(reached, sizeof reached, "%s.reached", rule->control);
        const long file = syscall(SYS_openat, AT_FDCWD, reached, O_WRONLY | O_CREAT, 0600);
        if (file >= 0) syscall(SYS_close, file);
        is_told = 1;
      }
      const struct timespec moment = {0, 1000000};
      nanosleep(&moment, NULL);
    }
  }
}

int shim_fate(const char* call, const char* path) {
  if (!shim_is_ready || path[0] == '\0') return kNoFault;
  wait_where_held(call, path);
  int chosen = kNoFault;
  for (int i = 0; i < fault_count; ++i) {
    struct Rule* rule = &faults[i];
    if (strcmp(rule->call, call) != 0 || !shim_starts_with(path, rule->prefix)) continue;
    if (rule->control[0] != '\0' && !shim_exists(rule->control)) continue;
    const long seen = __atomic_add_fetch(&rule->seen, 1, __ATOMIC_SEQ_CST);
    if (seen >= rule->first && seen - rule->first < rule->times) chosen = rule->error;
  }
  return chosen;
}

int shim_fail(int error) {
  errno = error;
  return -1;
}

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("DYNEMB_FILE_SHIM");
  if (path == NULL || *path == '\0') return;
  FILE* file = fopen(path, "r");
  if (file == NULL) shim_die("DYNEMB_FILE_SHIM names no file");
  char line[3 * PATH_MAX];
  while (fgets(line, sizeof line, file) != NULL) {
    char* words[8] = {"", "", "", "", "", "", "", ""};
    int count = 0;
    line[strcspn(line, "\n")] = '\0';
    for (char *rest = line, *word; count < 8 && (word = strsep(&rest, "\t")) != NULL;) {
      words[count++] = word;
    }
    if (strcmp(words[0], "log") == 0 && count == 3) {
      shim_open_log(words[1], words[2]);
    } else if (strcmp(words[0], "fault") == 0 && count == 7 && fault_count < kMostRules) {
      struct Rule* rule = &faults[fault_count++];
      copy(rule->call, sizeof rule->call, words[1]);
      rule->first = atol(words[2]);
      rule->times = atol(words[3]);
      rule->error = atoi(words[4]);
      copy(rule->prefix, sizeof rule->prefix, words[5]);
      copy(rule->control, sizeof rule->control, words[6]);
    } else if (strcmp(words[0], "hold") == 0 && count == 4 && hold_count < kMostRules) {
      struct Rule* rule = &holds[hold_count++];
      copy(rule->call, sizeof rule->call, words[1]);
      copy(rule->prefix, sizeof rule->prefix, words[2]);
      copy(rule->control, sizeof rule->control, words[3]);
    } else {
      shim_die("a line of the configuration is none");
    }
  }
  fclose(file);
  shim_is_ready = 1;
}
