// What a GPU can do at most, and first experiments about the layout of the tables: a program of its
// own, run by experiments.py. Prints a JSON line per measurement; times are milliseconds of one
// repetition between two events, the least and the median of kRounds after a warm-up.
//
//   experiments [--quick]
//
// Results of kernels are summed into a word that is stored on an impossible condition, so that no
// read can be left out by the compiler.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cub/cub.cuh>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr int kRounds = 7;
constexpr int kBlock = 256;
constexpr int64_t kMegabyte = int64_t{1} << 20;
constexpr int64_t kGigabyte = int64_t{1} << 30;

#define CHECK(call)                                                      \
  do {                                                                   \
    const cudaError_t status = (call);                                   \
    if (status != cudaSuccess) {                                         \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(status));                          \
      std::exit(1);                                                      \
    }                                                                    \
  } while (false)

// -- timing and output --------------------------------------------------------------------------

struct Time {
  double min_ms;
  double median_ms;
};

// `prepare` runs before each repetition and is not timed.
Time measure(const std::function<void()>& run, const std::function<void()>& prepare = [] {}) {
  cudaEvent_t start;
  cudaEvent_t stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  std::vector<double> times;
  for (int round = -1; round < kRounds; ++round) {
    prepare();
    CHECK(cudaEventRecord(start));
    run();
    CHECK(cudaEventRecord(stop));
    CHECK(cudaGetLastError());
    CHECK(cudaEventSynchronize(stop));
    float ms = 0.0f;
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    if (round >= 0) times.push_back(ms);
  }
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  std::sort(times.begin(), times.end());
  return {times.front(), times[times.size() / 2]};
}

// One line: what was measured, its rate in billions a second (from the median), further fields.
void print(const char* experiment, const std::string& what, const Time& time, double amount,
           const char* unit, const std::string& fields) {
  std::printf(
      "{\"experiment\": \"%s\", \"case\": \"%s\", \"min_ms\": %.6g, \"median_ms\": %.6g, "
      "\"rounds\": %d, \"rate\": %.6g, \"rate_of_min\": %.6g, \"unit\": \"%s\"%s%s}\n",
      experiment, what.c_str(), time.min_ms, time.median_ms, kRounds, amount / time.median_ms / 1e6,
      amount / time.min_ms / 1e6, unit, fields.empty() ? "" : ", ", fields.c_str());
  std::fflush(stdout);
}

std::string field(const char* name, double value) {
  char text[96];
  std::snprintf(text, sizeof text, "\"%s\": %.10g", name, value);
  return text;
}

// -- what kernels share -------------------------------------------------------------------------

__host__ __device__ __forceinline__ uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

// A number below `count` from the high bits of a hash.
__device__ __forceinline__ int64_t below(uint64_t hash, int64_t count) {
  return static_cast<int64_t>(__umul64hi(hash, static_cast<uint64_t>(count)));
}

__device__ __forceinline__ int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t thread_total() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

int multiprocessors = 0;
int grid() { return multiprocessors * 8; }  // 2048 threads a multiprocessor: all it can hold
int blocks_for(int64_t threads) {
  return static_cast<int>(std::max<int64_t>((threads + kBlock - 1) / kBlock, 1));
}

struct Memory {
  explicit Memory(int64_t size) : bytes(size) {
    CHECK(cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(size, 1))));
  }
  ~Memory() { CHECK(cudaFree(data)); }
  Memory(const Memory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  void fill(int value) const { CHECK(cudaMemset(data, value, static_cast<size_t>(bytes))); }
  void* data = nullptr;
  int64_t bytes;
};

int64_t free_memory() {
  size_t free_bytes = 0;
  size_t total = 0;
  CHECK(cudaMemGetInfo(&free_bytes, &total));
  return static_cast<int64_t>(free_bytes);
}

// -- bandwidth ----------------------------------------------------------------------------------

__global__ void fill_random(uint64_t* to, int64_t words) {
  for (int64_t i = thread_number(); i < words; i += thread_total()) {
    to[i] = mix(static_cast<uint64_t>(i) + 1);
  }
}

__global__ void copy_vectors(const uint4* from, uint4* to, int64_t vectors) {
  for (int64_t i = thread_number(); i < vectors; i += thread_total()) to[i] = from[i];
}

__global__ void read_vectors(const uint4* from, int64_t vectors, uint32_t* sink) {
  uint32_t sum = 0;
#pragma unroll 4
  for (int64_t i = thread_number(); i < vectors; i += thread_total()) {
    const uint4 v = from[i];
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

void bandwidth(const Memory& memory, uint32_t* sink) {
  const int64_t half = std::min<int64_t>(memory.bytes / 2, 4 * kGigabyte) / 256 * 256;
  auto* from = memory.as<char>();
  char* to = from + half;
  const std::string size = field("bytes", static_cast<double>(half));
  const Time copied =
      measure([&] { CHECK(cudaMemcpyAsync(to, from, half, cudaMemcpyDeviceToDevice)); });
  print("copy", "cudaMemcpy", copied, 2.0 * half, "GB/s", size);
  const Time kernel = measure([&] {
    copy_vectors<<<grid(), kBlock>>>(reinterpret_cast<uint4*>(from), reinterpret_cast<uint4*>(to),
                                     half / 16);
  });
  print("copy", "kernel, 16 bytes a thread", kernel, 2.0 * half, "GB/s", size);
  const Time read = measure(
      [&] { read_vectors<<<grid(), kBlock>>>(reinterpret_cast<uint4*>(from), half / 16, sink); });
  print("read in order", "kernel, 16 bytes a thread", read, 1.0 * half, "GB/s", size);
}

// All multiprocessors read the same memory again and again, past their own caches, which together
// could hold it; each pass begins elsewhere, so that none keeps to its part of the L2.
__global__ void read_cached(const uint4* from, int vectors, int passes, uint32_t* sink) {
  uint32_t sum = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const int begin =
        static_cast<int>(below(mix(static_cast<uint64_t>(pass) + 1), vectors)) / 8 * 8;
#pragma unroll 4
    for (int i = static_cast<int>(thread_number()); i < vectors;
         i += static_cast<int>(thread_total())) {
      const int at = i + begin;
      const uint4 v = __ldcg(from + (at < vectors ? at : at - vectors));
      sum += v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  if (sum == 0x12345678u) *sink = sum;
}

void l2_bandwidth(const Memory& memory, uint32_t* sink) {
  constexpr int kPasses = 64;
  for (const int64_t megabytes : {8, 16, 24}) {
    const int64_t footprint = megabytes * kMegabyte;
    const Time time = measure([&] {
      read_cached<<<grid(), kBlock>>>(memory.as<uint4>(), static_cast<int>(footprint / 16), kPasses,
                                      sink);
    });
    print("L2 read", "16 bytes a thread", time, 1.0 * kPasses * footprint, "GB/s",
          field("footprint", static_cast<double>(footprint)));
  }
}

// -- random access ------------------------------------------------------------------------------

// Groups of kLanes threads read lines of kBytes, 16 bytes a load; four lines are independent.
template <int kBytes, int kLanes>
__global__ void read_lines(const uint4* memory, int64_t lines, int64_t reads, uint32_t* sink) {
  constexpr int kVectors = kBytes / 16;
  constexpr int kEach = kVectors / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t stride = thread_total() / kLanes;
  uint32_t sum = 0;
#pragma unroll 4
  for (int64_t i = thread_number() / kLanes; i < reads; i += stride) {
    const uint4* line = memory + below(mix(static_cast<uint64_t>(i) + 1), lines) * kVectors;
    uint4 v[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) v[k] = line[lane * kEach + k];
#pragma unroll
    for (int k = 0; k < kEach; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

template <class T>
__global__ void read_words(const T* memory, int64_t words, int64_t reads, uint32_t* sink) {
  T sum = 0;
#pragma unroll 4
  for (int64_t i = thread_number(); i < reads; i += thread_total()) {
    sum += memory[below(mix(static_cast<uint64_t>(i) + 1), words)];
  }
  if (sum == static_cast<T>(0x12345678u)) *sink = static_cast<uint32_t>(sum);
}

// The old value is used, as placement in the index uses it.
__global__ void lower_words(unsigned long long* memory, int64_t words, int64_t count,
                            unsigned long long base, uint32_t* sink) {
  unsigned long long sum = 0;
#pragma unroll 4
  for (int64_t i = thread_number(); i < count; i += thread_total()) {
    sum += atomicMin(memory + below(mix(static_cast<uint64_t>(i) + 1), words),
                     base + static_cast<unsigned long long>(i));
  }
  if (sum == 0x12345678ull) *sink = static_cast<uint32_t>(sum);
}

template <int kBytes, int kLanes>
void random_lines(const Memory& memory, int64_t footprint, int64_t reads, uint32_t* sink) {
  const Time time = measure([&] {
    read_lines<kBytes, kLanes>
        <<<grid(), kBlock>>>(memory.as<uint4>(), footprint / kBytes, reads, sink);
  });
  char name[96];
  std::snprintf(name, sizeof name, "%d bytes, %d %s, %d %s each", kBytes, kLanes,
                kLanes == 1 ? "thread" : "lanes", kBytes / 16 / kLanes,
                kBytes / 16 / kLanes == 1 ? "load" : "loads");
  print("random read", name, time, static_cast<double>(reads), "G/s",
        field("access_bytes", kBytes) + ", " + field("lanes", kLanes) + ", " +
            field("footprint", static_cast<double>(footprint)));
}

template <class T>
void random_words(const Memory& memory, int64_t footprint, int64_t reads, uint32_t* sink) {
  const auto words = footprint / static_cast<int64_t>(sizeof(T));
  const Time time =
      measure([&] { read_words<T><<<grid(), kBlock>>>(memory.as<T>(), words, reads, sink); });
  print("random read", std::to_string(sizeof(T)) + " bytes, 1 thread", time,
        static_cast<double>(reads), "G/s",
        field("access_bytes", sizeof(T)) + ", " + field("lanes", 1) + ", " +
            field("footprint", static_cast<double>(footprint)));
}

void random_access(const Memory& memory, bool quick, uint32_t* sink) {
  const int64_t reads = quick ? int64_t{1} << 22 : int64_t{1} << 26;
  std::vector<int64_t> footprints;
  for (const int64_t megabytes : {64, 256, 1024, 4096, 10240, 20480, 40960}) {
    if (megabytes * kMegabyte <= memory.bytes) footprints.push_back(megabytes * kMegabyte);
  }
  for (const int64_t footprint : footprints) {
    random_lines<64, 1>(memory, footprint, reads, sink);
    random_lines<64, 4>(memory, footprint, reads, sink);
    random_lines<128, 1>(memory, footprint, reads, sink);
    random_lines<128, 4>(memory, footprint, reads, sink);
    random_lines<128, 8>(memory, footprint, reads, sink);
    random_words<uint32_t>(memory, footprint, reads, sink);
    random_words<uint64_t>(memory, footprint, reads, sink);
  }
  // every repetition lowers the words further, so that none finds its work done
  unsigned long long base = 1ull << 60;
  for (const int64_t footprint : footprints) {
    const Time time = measure(
        [&] {
          lower_words<<<grid(), kBlock>>>(memory.as<unsigned long long>(), footprint / 8, reads / 2,
                                          base, sink);
        },
        [&] { base -= static_cast<unsigned long long>(reads); });
    print("random atomicMin", "8 bytes, old value used", time, static_cast<double>(reads) / 2,
          "G/s",
          field("access_bytes", 8) + ", " + field("footprint", static_cast<double>(footprint)));
  }
}

// -- probes -------------------------------------------------------------------------------------

// Buckets of kWidth keys. kInline: keys, then handles, in one stretch of memory; otherwise handles
// lie in an array of their own. Key 0 is a free slot. Like the library: first candidate, second
// candidate, then the ones after it; a bucket with a free slot ends the search.
struct Buckets {
  int64_t* keys;
  int64_t* handles;
  uint8_t* digests;  // [buckets, width], 0: free; nullptr: none
  int64_t count;
};

__device__ __forceinline__ int64_t key_of(int64_t number) {  // not 0 for number >= 1
  return static_cast<int64_t>(mix(static_cast<uint64_t>(number)));
}
__device__ __forceinline__ uint64_t hash_of(int64_t key) {
  return mix(static_cast<uint64_t>(key) ^ 0x9e3779b97f4a7c15ULL);
}
__device__ __forceinline__ int64_t probe_bucket(uint64_t hash, int64_t count, int64_t probe) {
  if (probe == 0) return below(hash, count);
  const int64_t bucket = below(mix(hash ^ 0xbf58476d1ce4e5b9ULL), count) + probe - 1;
  return bucket < count ? bucket : bucket - count;
}
__device__ __forceinline__ uint8_t
digest_of(uint64_t hash) {  // low bits: the high ones chose the bucket
  const auto digest = static_cast<uint8_t>(hash);
  return digest == 0 ? 1 : digest;
}

template <int kWidth, bool kInline>
__device__ __forceinline__ int64_t* key_slot(const Buckets& b, int64_t bucket) {
  return b.keys + bucket * (kInline ? 2 * kWidth : kWidth);
}
template <int kWidth, bool kInline>
__device__ __forceinline__ int64_t* handle_slot(const Buckets& b, int64_t bucket) {
  return kInline ? b.keys + bucket * 2 * kWidth + kWidth : b.handles + bucket * kWidth;
}

// `used` counts the slots that were asked for, bucket by bucket.
template <int kWidth, bool kInline>
__global__ void insert_keys(Buckets b, int32_t* used, int64_t keys) {
  for (int64_t i = thread_number(); i < keys; i += thread_total()) {
    const int64_t key = key_of(i + 1);
    const uint64_t hash = hash_of(key);
    for (int64_t probe = 0;; ++probe) {
      const int64_t bucket = probe_bucket(hash, b.count, probe);
      const int slot = atomicAdd(used + bucket, 1);
      if (slot >= kWidth) continue;
      key_slot<kWidth, kInline>(b, bucket)[slot] = key;
      handle_slot<kWidth, kInline>(b, bucket)[slot] = i + 1;
      if (b.digests != nullptr) b.digests[bucket * kWidth + slot] = digest_of(hash);
      break;
    }
  }
}

__global__ void make_queries(int64_t* queries, int64_t count, int64_t keys, int missing_percent) {
  for (int64_t i = thread_number(); i < count; i += thread_total()) {
    const uint64_t random = mix(static_cast<uint64_t>(i) + 0x51ed2701ULL);
    const int64_t number = below(random, keys) + 1;
    const bool missing = static_cast<int>(random % 100) < missing_percent;
    queries[i] = key_of(missing ? number + keys : number);
  }
}

// A group of kLanes threads per query; a bucket's keys are divided among them.
template <int kWidth, bool kInline, int kLanes>
__global__ void find_keys(Buckets b, const int64_t* queries, int64_t count, int64_t* results) {
  constexpr int kEach = kWidth / kLanes;
  static_assert(kEach % 2 == 0, "keys are loaded two at a time");
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const unsigned first = (threadIdx.x & 31u) & ~static_cast<unsigned>(kLanes - 1);
  const unsigned mask = kLanes == 32 ? ~0u : ((1u << kLanes) - 1u) << first;
  const int64_t i = thread_number() / kLanes;
  if (i >= count) return;
  const int64_t query = queries[i];
  const uint64_t hash = hash_of(query);
  int64_t result = 0;
  for (int64_t probe = 0; probe <= b.count; ++probe) {
    const int64_t bucket = probe_bucket(hash, b.count, probe);
    const auto* keys = reinterpret_cast<const longlong2*>(key_slot<kWidth, kInline>(b, bucket));
    longlong2 pair[kEach / 2];
#pragma unroll
    for (int k = 0; k < kEach / 2; ++k) pair[k] = keys[lane * (kEach / 2) + k];
    int64_t handle[kEach];
    if constexpr (kInline && kLanes == 1) {  // handles are loaded along with the keys
      const auto* handles =
          reinterpret_cast<const longlong2*>(handle_slot<kWidth, kInline>(b, bucket));
#pragma unroll
      for (int k = 0; k < kEach / 2; ++k) {
        const longlong2 two = handles[k];
        handle[2 * k] = two.x;
        handle[2 * k + 1] = two.y;
      }
    }
    int slot = -1;
    bool free = false;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t key = k % 2 == 0 ? pair[k / 2].x : pair[k / 2].y;
      if (key == query) slot = k;
      free |= key == 0;
    }
    if constexpr (kInline && kLanes == 1) {
      if (slot >= 0) {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
          if (k == slot) result = handle[k];
        }
        break;
      }
      if (free) break;
    } else {
      if (slot >= 0) {
        result = handle_slot<kWidth, kInline>(b, bucket)[lane * kEach + slot];
        results[i] = result;
      }
      if (__any_sync(mask, slot >= 0)) return;
      if (__any_sync(mask, free)) break;
    }
  }
  if (lane == 0) results[i] = result;
}

// The same with the handles of an inline bucket loaded by further lanes: kWidth lanes of 16 bytes
// read the whole line at once.
template <int kWidth>
__global__ void find_keys_by_line(Buckets b, const int64_t* queries, int64_t count,
                                  int64_t* results) {
  constexpr int kLanes = kWidth;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const unsigned first = (threadIdx.x & 31u) & ~static_cast<unsigned>(kLanes - 1);
  const unsigned mask = ((1u << kLanes) - 1u) << first;
  const int64_t i = thread_number() / kLanes;
  if (i >= count) return;
  const int64_t query = queries[i];
  const uint64_t hash = hash_of(query);
  int64_t result = 0;
  for (int64_t probe = 0; probe <= b.count; ++probe) {
    const int64_t bucket = probe_bucket(hash, b.count, probe);
    const longlong2 pair =
        reinterpret_cast<const longlong2*>(key_slot<kWidth, true>(b, bucket))[lane];
    const bool has_keys = lane < kWidth / 2;
    const unsigned low = __ballot_sync(mask, has_keys && pair.x == query) & mask;
    const unsigned high = __ballot_sync(mask, has_keys && pair.y == query) & mask;
    const bool free = __any_sync(mask, has_keys && (pair.x == 0 || pair.y == 0)) != 0;
    if ((low | high) != 0) {
      const int from = __ffs(static_cast<int>(low | high)) - 1 - static_cast<int>(first);
      const long long value = low != 0 ? pair.x : pair.y;
      result = __shfl_sync(mask, value, from + kWidth / 2, kLanes);
      break;
    }
    if (free) break;
  }
  if (lane == 0) results[i] = result;
}

// 128 slots with a digest of one byte each: eight lanes read 16 digests each, then the keys with
// a digest that matches, then the handle.
__global__ void find_by_digest(Buckets b, const int64_t* queries, int64_t count, int64_t* results) {
  constexpr int kWidth = 128;
  constexpr int kLanes = 8;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const unsigned first = (threadIdx.x & 31u) & ~static_cast<unsigned>(kLanes - 1);
  const unsigned mask = ((1u << kLanes) - 1u) << first;
  const int64_t i = thread_number() / kLanes;
  if (i >= count) return;
  const int64_t query = queries[i];
  const uint64_t hash = hash_of(query);
  const uint32_t wanted = digest_of(hash) * 0x01010101u;
  for (int64_t probe = 0; probe <= b.count; ++probe) {
    const int64_t bucket = probe_bucket(hash, b.count, probe);
    const uint4 loaded = reinterpret_cast<const uint4*>(b.digests + bucket * kWidth)[lane];
    const uint32_t digests[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    int slot = -1;
    bool free = false;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      free |= __vcmpeq4(digests[w], 0u) != 0;
      uint32_t equal = __vcmpeq4(digests[w], wanted) & 0x01010101u;
      while (equal != 0) {
        const int byte = (__ffs(static_cast<int>(equal)) - 1) / 8;
        const int candidate = lane * 16 + w * 4 + byte;
        if (b.keys[bucket * kWidth + candidate] == query) slot = candidate;
        equal &= equal - 1;
      }
    }
    if (slot >= 0) results[i] = b.handles[bucket * kWidth + slot];
    if (__any_sync(mask, slot >= 0)) return;
    if (__any_sync(mask, free)) break;
  }
  if (lane == 0) results[i] = 0;
}

// How many queries have the right answer.
__global__ void count_right(const int64_t* queries, const int64_t* results, int64_t count,
                            int64_t keys, int missing_percent, unsigned long long* right) {
  for (int64_t i = thread_number(); i < count; i += thread_total()) {
    const uint64_t random = mix(static_cast<uint64_t>(i) + 0x51ed2701ULL);
    const bool missing = static_cast<int>(random % 100) < missing_percent;
    const int64_t expected = missing ? 0 : below(random, keys) + 1;
    if (results[i] == expected) atomicAdd(right, 1ULL);
  }
}

struct Queries {
  const Memory& keys;
  const Memory& results;
  const Memory& right;
  int64_t count;
};

using Find = std::function<void(const Buckets&, const int64_t*, int64_t, int64_t*)>;

void time_find(const char* layout, const char* how, const Buckets& b, int64_t keys, int width,
               double bytes_per_key, const Queries& q, const Find& find) {
  for (const int missing : {0, 50}) {
    make_queries<<<grid(), kBlock>>>(q.keys.as<int64_t>(), q.count, keys, missing);
    const Time time =
        measure([&] { find(b, q.keys.as<int64_t>(), q.count, q.results.as<int64_t>()); },
                [&] { q.results.fill(0xff); });
    q.right.fill(0);
    count_right<<<grid(), kBlock>>>(q.keys.as<int64_t>(), q.results.as<int64_t>(), q.count, keys,
                                    missing, q.right.as<unsigned long long>());
    unsigned long long right = 0;
    CHECK(cudaMemcpy(&right, q.right.data, 8, cudaMemcpyDeviceToHost));
    const bool correct = right == static_cast<unsigned long long>(q.count);
    print("probe",
          std::string(layout) + ", " + how + (missing == 0 ? ", all found" : ", half missing"),
          time, static_cast<double>(q.count), "G/s",
          field("width", width) + ", " + field("keys", static_cast<double>(keys)) + ", " +
              field("missing_percent", missing) + ", " + field("bytes_per_key", bytes_per_key) +
              ", \"correct\": " + (correct ? "true" : "false"));
    if (!correct) {
      std::fprintf(stderr, "probe: %s, %s: %llu of %lld answers are right\n", layout, how, right,
                   static_cast<long long>(q.count));
      std::exit(1);
    }
  }
}

template <int kWidth, bool kInline>
void with_buckets(int64_t keys, bool digests, const std::function<void(const Buckets&)>& use) {
  const int64_t count = (keys * 100 / 70 + kWidth - 1) / kWidth;
  const Memory key_memory(count * kWidth * 8 * (kInline ? 2 : 1));
  const Memory handle_memory(kInline ? 0 : count * kWidth * 8);
  const Memory digest_memory(digests ? count * kWidth : 0);
  const Memory used(count * 4);
  key_memory.fill(0);
  used.fill(0);
  if (digests) digest_memory.fill(0);
  const Buckets b{key_memory.as<int64_t>(), handle_memory.as<int64_t>(),
                  digests ? digest_memory.as<uint8_t>() : nullptr, count};
  insert_keys<kWidth, kInline><<<grid(), kBlock>>>(b, used.as<int32_t>(), keys);
  CHECK(cudaDeviceSynchronize());
  use(b);
  CHECK(cudaDeviceSynchronize());
}

template <int kWidth, bool kInline, int kLanes>
Find finder() {
  return [](const Buckets& b, const int64_t* queries, int64_t count, int64_t* results) {
    find_keys<kWidth, kInline, kLanes>
        <<<blocks_for(count * kLanes), kBlock>>>(b, queries, count, results);
  };
}
template <int kWidth>
Find line_finder() {
  return [](const Buckets& b, const int64_t* queries, int64_t count, int64_t* results) {
    find_keys_by_line<kWidth><<<blocks_for(count * kWidth), kBlock>>>(b, queries, count, results);
  };
}

void probes(bool quick) {
  const int64_t most = quick ? 1'000'000 : 50'000'000;
  const int64_t keys = std::min<int64_t>(most, free_memory() / 2 / 32);
  const int64_t count = quick ? int64_t{1} << 20 : int64_t{1} << 25;
  const Memory query_memory(count * 8);
  const Memory results(count * 8);
  const Memory right(8);
  const Queries q{query_memory, results, right, count};
  const double slot = 16.0 / 0.70;  // bytes a key at this load
  with_buckets<4, true>(keys, false, [&](const Buckets& b) {
    const char* layout = "4 keys + 4 handles in 64 bytes";
    time_find(layout, "1 thread", b, keys, 4, slot, q, finder<4, true, 1>());
    time_find(layout, "4 lanes", b, keys, 4, slot, q, line_finder<4>());
  });
  with_buckets<8, true>(keys, false, [&](const Buckets& b) {
    const char* layout = "8 keys + 8 handles in 128 bytes";
    time_find(layout, "1 thread", b, keys, 8, slot, q, finder<8, true, 1>());
    time_find(layout, "8 lanes", b, keys, 8, slot, q, line_finder<8>());
  });
  with_buckets<16, false>(keys, false, [&](const Buckets& b) {
    const char* layout = "16 keys, handles apart";
    time_find(layout, "4 lanes", b, keys, 16, slot, q, finder<16, false, 4>());
    time_find(layout, "8 lanes", b, keys, 16, slot, q, finder<16, false, 8>());
  });
  with_buckets<32, false>(keys, false, [&](const Buckets& b) {
    const char* layout = "32 keys, handles apart";
    time_find(layout, "8 lanes", b, keys, 32, slot, q, finder<32, false, 8>());
    time_find(layout, "16 lanes", b, keys, 32, slot, q, finder<32, false, 16>());
  });
  with_buckets<128, false>(keys, true, [&](const Buckets& b) {
    time_find("128 slots with digests of 1 byte", "8 lanes", b, keys, 128, 17.0 / 0.70, q,
              [](const Buckets& buckets, const int64_t* queries, int64_t n, int64_t* found) {
                find_by_digest<<<blocks_for(n * 8), kBlock>>>(buckets, queries, n, found);
              });
  });
}

// -- dedupe of row numbers ----------------------------------------------------------------------

constexpr int kRowBits = 24;
constexpr int64_t kRows = int64_t{1} << kRowBits;

// Zipf: rank = floor of a power-law variable of exponent 1.05 between 1 and kRows, ranks shuffled
// by an odd multiplier.
__global__ void make_rows(uint32_t* rows, int64_t count, bool zipf) {
  for (int64_t i = thread_number(); i < count; i += thread_total()) {
    const uint64_t random = mix(static_cast<uint64_t>(i) + 0x2545f491ULL);
    int64_t row = below(random, kRows);
    if (zipf) {
      const double u = static_cast<double>(random >> 11) * 0x1p-53;
      const double tail = pow(static_cast<double>(kRows), -0.05);
      row = static_cast<int64_t>(pow(1.0 + u * (tail - 1.0), -20.0)) - 1;
      row = (min(max(row, int64_t{0}), kRows - 1) * 0x9e3779b1LL) & (kRows - 1);
    }
    rows[i] = static_cast<uint32_t>(row);
  }
}

// `first` holds, for every row of the table, the least position so far; kNoPosition between calls.
constexpr int32_t kNoPosition = 0x7f7f7f7f;  // memset writes equal bytes
__global__ void claim_first(const uint32_t* rows, int64_t count, int32_t* first) {
  const int64_t i = thread_number();
  if (i < count) atomicMin(first + rows[i], static_cast<int32_t>(i));
}
__global__ void flag_first(const uint32_t* rows, int64_t count, const int32_t* first,
                           int32_t* flags) {
  const int64_t i = thread_number();
  if (i < count) flags[i] = first[rows[i]] == i ? 1 : 0;
}
__global__ void number_occurrences(const uint32_t* rows, int64_t count, const int32_t* first,
                                   const int32_t* numbers, int32_t* number_of) {
  const int64_t i = thread_number();
  if (i < count) number_of[i] = numbers[first[rows[i]]] - 1;
}
__global__ void forget_first(const uint32_t* rows, int64_t count, int32_t* first) {
  const int64_t i = thread_number();
  if (i < count) first[rows[i]] = kNoPosition;
}
__global__ void count_up(uint32_t* positions, int64_t count) {
  const int64_t i = thread_number();
  if (i < count) positions[i] = static_cast<uint32_t>(i);
}
__global__ void flag_runs(const uint32_t* rows, int64_t count, int32_t* flags) {
  const int64_t i = thread_number();
  if (i < count) flags[i] = i == 0 || rows[i] != rows[i - 1] ? 1 : 0;
}

int32_t last_of(const int32_t* numbers, int64_t count) {
  int32_t last = 0;
  CHECK(cudaMemcpy(&last, numbers + count - 1, 4, cudaMemcpyDeviceToHost));
  return last;
}

void dedupe(bool quick) {
  const std::vector<int64_t> sizes =
      quick ? std::vector<int64_t>{1 << 16} : std::vector<int64_t>{1 << 20, 1 << 22};
  const Memory first(kRows * 4);
  first.fill(0x7f);
  for (const int64_t count : sizes) {
    const auto items = static_cast<int>(count);
    const Memory rows(count * 4), sorted(count * 4), positions(count * 4), order(count * 4);
    const Memory flags(count * 4), numbers(count * 4), number_of(count * 4);
    size_t sort_bytes = 0;
    size_t scan_bytes = 0;
    CHECK(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, rows.as<uint32_t>(),
                                          sorted.as<uint32_t>(), positions.as<uint32_t>(),
                                          order.as<uint32_t>(), items, 0, kRowBits));
    CHECK(cub::DeviceScan::InclusiveSum(nullptr, scan_bytes, flags.as<int32_t>(),
                                        numbers.as<int32_t>(), items));
    const Memory scratch(static_cast<int64_t>(std::max(sort_bytes, scan_bytes)));
    const int blocks = blocks_for(count);
    for (const bool zipf : {false, true}) {
      make_rows<<<grid(), kBlock>>>(rows.as<uint32_t>(), count, zipf);
      const auto scan = [&] {
        size_t bytes = scan_bytes;
        CHECK(cub::DeviceScan::InclusiveSum(scratch.data, bytes, flags.as<int32_t>(),
                                            numbers.as<int32_t>(), items));
      };
      const Time claimed = measure([&] {
        claim_first<<<blocks, kBlock>>>(rows.as<uint32_t>(), count, first.as<int32_t>());
        flag_first<<<blocks, kBlock>>>(rows.as<uint32_t>(), count, first.as<int32_t>(),
                                       flags.as<int32_t>());
        scan();
        number_occurrences<<<blocks, kBlock>>>(rows.as<uint32_t>(), count, first.as<int32_t>(),
                                               numbers.as<int32_t>(), number_of.as<int32_t>());
        forget_first<<<blocks, kBlock>>>(rows.as<uint32_t>(), count, first.as<int32_t>());
      });
      const int32_t distinct = last_of(numbers.as<int32_t>(), count);
      const Time sorting = measure([&] {
        size_t bytes = sort_bytes;
        count_up<<<blocks, kBlock>>>(positions.as<uint32_t>(), count);
        CHECK(cub::DeviceRadixSort::SortPairs(scratch.data, bytes, rows.as<uint32_t>(),
                                              sorted.as<uint32_t>(), positions.as<uint32_t>(),
                                              order.as<uint32_t>(), items, 0, kRowBits));
        flag_runs<<<blocks, kBlock>>>(sorted.as<uint32_t>(), count, flags.as<int32_t>());
        scan();
      });
      const bool agree = last_of(numbers.as<int32_t>(), count) == distinct;
      const std::string fields = field("count", static_cast<double>(count)) + ", " +
                                 field("distinct", distinct) +
                                 ", \"correct\": " + (agree ? "true" : "false");
      const std::string draw =
          std::to_string(count) + (zipf ? " rows, Zipf 1.05" : " rows, uniform");
      print("dedupe", "first occurrence by atomicMin, " + draw, claimed, static_cast<double>(count),
            "G/s", fields);
      print("dedupe", "radix sort and run flags, " + draw, sorting, static_cast<double>(count),
            "G/s", fields);
      if (!agree) {
        std::fprintf(stderr, "dedupe: %s: the two ways count different rows\n", draw.c_str());
        std::exit(1);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  multiprocessors = properties.multiProcessorCount;
  std::printf(
      "{\"experiment\": \"device\", \"name\": \"%s\", \"multiprocessors\": %d, "
      "\"l2_bytes\": %d, \"free_bytes\": %lld}\n",
      properties.name, multiprocessors, properties.l2CacheSize,
      static_cast<long long>(free_memory()));
  std::fflush(stdout);
  const Memory sink(8);
  {
    const int64_t most = quick ? 256 * kMegabyte : 40 * kGigabyte;
    const Memory memory(std::min(most, free_memory() * 8 / 10) / 256 * 256);
    fill_random<<<grid(), kBlock>>>(memory.as<uint64_t>(), memory.bytes / 8);
    CHECK(cudaDeviceSynchronize());
    bandwidth(memory, sink.as<uint32_t>());
    l2_bandwidth(memory, sink.as<uint32_t>());
    random_access(memory, quick, sink.as<uint32_t>());
  }
  probes(quick);
  dedupe(quick);
  return 0;
}
