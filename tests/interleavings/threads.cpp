#include "threads.h"

#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "checker.h"

namespace interleavings {

Thread threads[kMostThreads];
int thread_count;
int current = -1;
bool profiling;
int mutant;

namespace {

constexpr int kMostSteps = 20000;
constexpr int kMostStepsAtOnce = 300;  // then a loop without a yield lets others run, too
constexpr size_t kStackBytes = size_t{1} << 18;
constexpr int kProfiled = 300;  // executions

enum class Search { kRandom, kDepthFirst, kReplay };
struct Decision {
  int chosen, options;
};
struct Step {
  int thread;
  const char* what;
  const void* address;
  uint64_t value;
  const void* caller;
  bool is_old;
};

Search search = Search::kDepthFirst;
int preemptions = 2, old_values = 1, preemptions_left, old_values_left;
std::mt19937_64 generator;
double stays;         // probability that a thread goes on
bool ignores_yields;  // as a processor does that runs nothing else
std::vector<Decision> decisions;
size_t decided;
std::vector<Step> trace;
int steps, steps_at_once;
ucontext_t main_context;

// Turns the decisions to those of the next execution; false after the last one.
bool next_decisions() {
  decided = 0;
  if (search != Search::kDepthFirst) {
    decisions.clear();
    return search == Search::kRandom;
  }
  while (!decisions.empty() && decisions.back().chosen + 1 == decisions.back().options) {
    decisions.pop_back();
  }
  if (decisions.empty()) return false;
  ++decisions.back().chosen;
  return true;
}

void switch_to(int next) {
  if (next == current) return;
  void* exceptions = abi::__cxa_get_globals();
  ucontext_t* from = &main_context;
  if (is_running()) {
    std::memmove(self().exceptions, exceptions, sizeof self().exceptions);
    from = &self().context;
  }
  current = next;
  steps_at_once = 0;
  if (is_running()) std::memmove(exceptions, self().exceptions, sizeof self().exceptions);
  swapcontext(from, is_running() ? &self().context : &main_context);
}

void run_thread() {
  self().run();
  make_late_copy();
  self().ended = true;
  schedule(Reason::kEnded);
}

void run(const std::function<Execution()>& make) {
  forget_memory();
  trace.clear();
  preemptions_left = preemptions;
  old_values_left = old_values;
  steps = 0;
  const double probabilities[] = {0.5, 0.75, 0.9, 0.97};
  stays = probabilities[generator() % 4];
  ignores_yields = search == Search::kRandom && generator() % 4 == 0;
  const Execution execution = make();
  thread_count = static_cast<int>(execution.threads.size());
  for (int t = 0; t < thread_count; ++t) {
    Thread& thread = threads[t];
    thread.run = execution.threads[t];
    thread.now = thread.acquired = thread.released = {};
    thread.late = {};
    thread.waits_for = nullptr;
    thread.ended = thread.yields = false;
    std::memset(thread.exceptions, 0, sizeof thread.exceptions);
    if (!thread.stack) thread.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  schedule(Reason::kEnded);
  if (execution.check) execution.check();
}

}  // namespace

void fail(const std::string& what) {
  std::string command = "addr2line -s -e /proc/" + std::to_string(getpid()) + "/exe";
  for (const Step& step : trace) {
    char address[24];
    std::snprintf(address, sizeof address, " %zx", reinterpret_cast<uintptr_t>(step.caller) - 1);
    command += address;
  }
  std::FILE* places = trace.empty() ? nullptr : popen(command.c_str(), "r");
  for (const Step& step : trace) {
    char place[200] = "\n";
    if (places != nullptr && std::fgets(place, sizeof place, places) == nullptr) place[0] = '\n';
    std::fprintf(stderr, "thread %d  %-14s %p %20lld%s  %s", step.thread, step.what, step.address,
                 static_cast<long long>(step.value), step.is_old ? " (old)" : "      ", place);
  }
  std::fprintf(stderr, "--replay ");
  for (size_t i = 0; i < decided; ++i) std::fprintf(stderr, "%d,", decisions[i].chosen);
  std::fprintf(stderr, "\n%s\n", what.c_str());
  std::fflush(nullptr);
  _exit(1);
}

void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

void note(const char* what, const void* address, uint64_t value, const void* caller, bool is_old) {
  ++self().now.at[current];
  trace.push_back({current, what, address, value, caller, is_old});
}

int choose(int options, double plain) {
  if (options == 1) return 0;
  if (decided == decisions.size()) {
    int chosen = 0;
    if (search == Search::kRandom && static_cast<double>(generator() >> 11) * 0x1p-53 >= plain) {
      chosen = 1 + static_cast<int>(generator() % static_cast<unsigned>(options - 1));
    }
    decisions.push_back({chosen, options});
  }
  Decision& decision = decisions[decided++];
  if (search == Search::kReplay) decision.options = options;
  if (decision.options != options || decision.chosen >= options) {
    fail("the program is not deterministic: an execution has other choices when it is repeated");
  }
  return decision.chosen;
}

int choose_old(int options, double plain) {
  if (search == Search::kDepthFirst && old_values_left == 0) return 0;
  const int chosen = choose(options, plain);
  old_values_left -= chosen > 0;
  return chosen;
}

// Without a preemption a thread runs until it yields, waits or ends, and then threads take turns.
void schedule(Reason reason) {
  if (++steps > kMostSteps) fail("the threads do not end");
  if (reason == Reason::kYield && ignores_yields) reason = Reason::kStep;
  if (reason == Reason::kStep && ++steps_at_once > kMostStepsAtOnce) reason = Reason::kYield;
  if (reason == Reason::kYield) self().yields = true;
  int options[kMostThreads], count = 0;
  if (reason == Reason::kStep) options[count++] = current;
  const auto add = [&](bool yielding) {
    for (int k = 1; k <= thread_count; ++k) {
      const int t = (std::max(current, 0) + k) % thread_count;
      const bool listed = reason == Reason::kStep && t == current;
      const bool runs = !threads[t].ended && threads[t].waits_for == nullptr;
      if (runs && !listed && threads[t].yields == yielding) options[count++] = t;
    }
  };
  add(false);
  if (count == 0) add(true);
  if (count == 0) {
    for (int t = 0; t < thread_count; ++t) {
      if (!threads[t].ended) fail("threads wait for ever");
    }
    return switch_to(-1);
  }
  const bool is_bounded =
      search == Search::kDepthFirst && (reason == Reason::kStep || reason == Reason::kYield);
  int chosen = 0;
  if (!is_bounded || preemptions_left > 0) {
    chosen = choose(count, reason == Reason::kStep ? stays : 1.0 / count);
    preemptions_left -= is_bounded && chosen > 0;
  }
  threads[options[chosen]].yields = false;
  switch_to(options[chosen]);
}

void wait_for(const void* what) {
  self().waits_for = what;
  schedule(Reason::kWaits);
}

void wake(const void* what) {
  for (int t = 0; t < thread_count; ++t) {
    if (threads[t].waits_for == what) threads[t].waits_for = nullptr;
  }
}

int explore(int argc, char** argv, const std::function<Execution()>& make) {
  int64_t most = -1;
  uint64_t seed = 1;
  std::string replay;
  Search wanted = Search::kDepthFirst;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const int64_t number = std::atol(argv[i + 1]);
    if (name == "--random") wanted = Search::kRandom, most = number;
    if (name == "--seed") seed = static_cast<uint64_t>(number);
    if (name == "--preemptions") preemptions = static_cast<int>(number);
    if (name == "--old") old_values = static_cast<int>(number);
    if (name == "--replay") wanted = Search::kReplay, replay = argv[i + 1];
    if (name == "--mutant") mutant = static_cast<int>(number);
  }
  // Random ones first: threads are switched only before accesses that conflict with another's.
  search = Search::kRandom;
  profiling = true;
  generator.seed(1);
  for (int i = 0; i < kProfiled; ++i) {
    next_decisions();
    run(make);
  }
  search = wanted;
  profiling = false;
  generator.seed(seed);
  decisions.clear();
  decided = 0;
  for (const char* at = replay.c_str(); *at != 0; at = std::strchr(at, ',') + 1) {
    decisions.push_back({std::atoi(at), 0});
  }
  int64_t executions = 0, total = 0;
  bool more = true;
  while (more && executions != most) {
    run(make);
    ++executions;
    total += steps;
    more = next_decisions();
  }
  std::printf("{\"executions\": %ld, \"switches\": %ld}\n", executions, total);
  return 0;
}

}  // namespace interleavings
