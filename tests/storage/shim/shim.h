// A library for LD_PRELOAD that sees a process' calls of the file system: it lets chosen ones fail,
// keeps a log of what changes files, and has calls wait. tests/storage/file_shim.py says how it is
// used.
//
// DYNEMB_FILE_SHIM names a file with a line for each thing to do, its words separated by tabs:
//   log    FILE  FOLDER                                  what changes files below the folder
//   fault  CALL  FIRST  TIMES  ERROR  PREFIX  SWITCH     ERROR: an errno, or 0 for a short transfer
//   hold   CALL  PREFIX  SWITCH                          waits while the file SWITCH is there
// A fault's calls are counted while its SWITCH is there, or always where that is empty.
#pragma once

#include <limits.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

// -- rules.c --------------------------------------------------------------------------------------

// Whether there is anything to do in this process.
extern int shim_is_ready;

// Ends the process: what the configuration says is wrong.
void shim_die(const char* what);
int shim_exists(const char* path);
int shim_starts_with(const char* path, const char* prefix);
// The present path of a descriptor; empty if it is not a file.
void shim_path_of(int file, char path[PATH_MAX]);
// The path of a name in a folder, absolute; its folder without links, the last part as it is.
void shim_path_at(int folder, const char* name, char path[PATH_MAX]);

enum { kNoFault = -1, kShortTransfer = 0 };
// What becomes of a call: kNoFault, kShortTransfer or an errno. Waits first where calls are held.
int shim_fate(const char* call, const char* path);
// -1, with this errno.
int shim_fail(int error);

// -- change_log.c ---------------------------------------------------------------------------------

// Kinds of records; crash_states.py has the same.
enum { kWrite = 1, kTruncate, kAllocate, kSync, kRename, kUnlink, kLink, kMakeDir, kOpen };

// A call that has succeeded. Paths follow, then a write's data.
struct Record {
  uint32_t kind;
  uint32_t path_bytes;
  uint32_t other_bytes;  // of the new name of a rename or link
  uint32_t flag;         // O_CREAT and O_TRUNC as they took effect; mode of an allocation
  int64_t offset;
  int64_t size;   // of a write's data; of a truncated or allocated range
  int64_t begin;  // bytes of the log when the call began
};

void shim_open_log(const char* file, const char* folder);
int shim_is_logged(const char* path);
int64_t shim_log_bytes(void);
// Keeps errno.
void shim_write_log(struct Record record, const char* path, const char* other,
                    const struct iovec* data, int parts);
