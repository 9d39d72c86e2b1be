// Readers of blocks as the row store uses them: one for many reads, in a process that forks.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "cpu/storage/block_io.h"
#include "cpu/storage/block_progress.h"

using namespace dynemb;
using namespace dynemb::cpu;
namespace fs = std::filesystem;

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

namespace {

constexpr int64_t kBlocks = 200;  // of each file

char expected(int file, int64_t block) { return static_cast<char>(1 + block % 100 + file * 17); }

int make_file(const std::string& path, int number) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  EXPECT(file >= 0);
  for (int64_t i = 0; i < kBlocks; ++i) {
    const std::string page(kPageBytes, expected(number, i));
    EXPECT(write(file, page.data(), page.size()) == kPageBytes);
  }
  return file;
}

struct Memory {
  explicit Memory(size_t blocks)
      : data(static_cast<char*>(std::aligned_alloc(kPageBytes, blocks * kPageBytes))) {
    std::memset(data, 0, blocks * kPageBytes);
  }
  ~Memory() { std::free(data); }
  char* block(size_t i) { return data + i * kPageBytes; }
  char* data;
};

size_t entries(const char* folder) {
  size_t count = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    (void)entry;
    ++count;
  }
  return count;
}
size_t threads() { return entries("/proc/self/task"); }

// Reads `count` blocks of two files in turn, and looks at each as it arrives.
void read_two(BlockReader& reader, const int (&files)[2], size_t count) {
  Memory memory(count);
  std::vector<BlockRead> blocks;
  for (size_t i = 0; i < count; ++i) {
    const auto block = static_cast<int64_t>(i * 7 % kBlocks);
    blocks.push_back({files[i % 2], block * kPageBytes, memory.block(i), kPageBytes});
  }
  std::vector<int> arrived(count, 0);
  const auto failures = reader.read(blocks, [&](size_t i) {
    ++arrived[i];
    const char value = expected(static_cast<int>(i % 2), blocks[i].offset / kPageBytes);
    EXPECT(memory.block(i)[0] == value && memory.block(i)[kPageBytes - 1] == value);
  });
  EXPECT(failures.empty());
  EXPECT(std::set<int>(arrived.begin(), arrived.end()) ==
         (count == 0 ? std::set<int>{} : std::set<int>{1}));
}

// Blocks of a descriptor that is none, and behind the end: the others arrive.
void read_with_failures(BlockReader& reader, const int (&files)[2]) {
  constexpr size_t kCount = 150;
  Memory memory(kCount);
  std::vector<BlockRead> blocks;
  for (size_t i = 0; i < kCount; ++i) {
    const int file = i % 10 == 3 ? 9999 : files[0];
    const int64_t block = i % 10 == 5 ? kBlocks : static_cast<int64_t>(i);
    blocks.push_back({file, block * kPageBytes, memory.block(i), kPageBytes});
  }
  size_t arrived = 0;
  const auto failures = reader.read(blocks, [&](size_t i) {
    EXPECT(i % 10 != 3 && i % 10 != 5);
    ++arrived;
  });
  EXPECT(arrived == kCount - failures.size() && failures.size() == 2 * kCount / 10);
  for (size_t k = 0; k < failures.size(); ++k) {
    EXPECT(failures[k].block == k / 2 * 10 + (k % 2 == 0 ? 3 : 5));
    EXPECT(failures[k].error == (k % 2 == 0 ? EBADF : 0));
  }
}

// A forked process is refused and may end, and its parent reads on.
void fork_and_read(std::unique_ptr<BlockReader> reader, const int (&files)[2]) {
  const pid_t child = fork();
  EXPECT(child >= 0);
  if (child == 0) {
    alarm(60);  // a child that waits for threads that it does not have
    bool is_refused = false;
    try {
      read_two(*reader, files, 3);
    } catch (const std::exception& error) {
      is_refused = std::strstr(error.what(), "was forked from process") != nullptr;
    }
    reader.reset();
    auto own = block_reader(IoPath::kAuto);
    read_two(*own, files, 100);
    own.reset();
    _exit(is_refused ? 0 : 1);
  }
  read_two(*reader, files, 100);
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  read_two(*reader, files, 100);
}

void try_path(IoPath path, const int (&files)[2]) {
  const size_t files_before = entries("/proc/self/fd");
  for (int round = 0; round < 3; ++round) {
    auto reader = block_reader(path);
    EXPECT(reader->path() == path);
    for (const size_t count : {0, 1, 2, 64, 65, 1000, 1}) read_two(*reader, files, count);
    read_with_failures(*reader, files);
    read_two(*reader, files, 300);
  }
  EXPECT(threads() == 1);
  EXPECT(entries("/proc/self/fd") == files_before);
  auto reader = block_reader(path);
  read_two(*reader, files, 10);
  fork_and_read(std::move(reader), files);
}

void try_threads(const int (&files)[2]) {
  auto reader = block_reader(IoPath::kThreads);
  read_two(*reader, files, 0);
  read_two(*reader, files, 1);
  EXPECT(threads() == 1);
  read_two(*reader, files, 2);
  EXPECT(threads() == 33);
  reader.reset();
  EXPECT(threads() == 1);
}

// The kernel refuses a ring's queue: no block has been read, and the next read has another ring.
void try_broken_ring(const int (&files)[2]) {
  auto reader = block_reader(IoPath::kUring);
  read_two(*reader, files, 10);
  int rings = 0;
  for (int file = 3; file < 100; ++file) {
    std::error_code error;
    const fs::path name = fs::read_symlink("/proc/self/fd/" + std::to_string(file), error);
    if (name.string().find("io_uring") == std::string::npos) continue;
    ++rings;
    EXPECT(dup2(files[0], file) == file);
  }
  EXPECT(rings == 1);
  Memory memory(100);
  std::vector<BlockRead> blocks;
  for (size_t i = 0; i < 100; ++i) blocks.push_back({files[0], 0, memory.block(i), kPageBytes});
  const auto failures = reader->read(blocks, [](size_t) { EXPECT(false); });
  EXPECT(failures.size() == 100);
  for (size_t i = 0; i < 100; ++i) EXPECT(failures[i].block == i && failures[i].error != 0);
  read_two(*reader, files, 100);
}

void try_progress() {
  using State = BlockProgress::State;
  const BlockRead block{0, 0, nullptr, 3 * kPageBytes};
  const BlockProgress begin;
  EXPECT(begin.after(3 * kPageBytes, block).state == State::kWhole);
  EXPECT(begin.after(0, block).state == State::kEnded);
  BlockProgress part = begin.after(kPageBytes + 100, block);
  EXPECT(part.state == State::kMore && part.read == kPageBytes);
  EXPECT(part.after(100, block).state == State::kEnded);  // again to the same place
  EXPECT(part.after(0, block).state == State::kEnded);
  part = part.after(kPageBytes, block);
  EXPECT(part.state == State::kMore && part.read == 2 * kPageBytes);
  EXPECT(part.after(kPageBytes, block).state == State::kWhole);
  part = begin.after(10, block);  // less than a page is read again from its beginning
  EXPECT(part.state == State::kMore && part.read == 0);
  EXPECT(part.after(10, block).state == State::kEnded);
  EXPECT(part.after(3 * kPageBytes, block).state == State::kWhole);
}

}  // namespace

int main(int count, char** arguments) {
  EXPECT(count == 2);
  const std::string folder = arguments[1];
  try_progress();
  const int files[2] = {make_file(folder + "/a", 0), make_file(folder + "/b", 1)};
  try_threads(files);
  try_path(IoPath::kThreads, files);
  if (has_uring()) {
    try_path(IoPath::kUring, files);
    try_broken_ring(files);
  }
  std::puts(has_uring() ? "both" : "threads");
  return 0;
}
