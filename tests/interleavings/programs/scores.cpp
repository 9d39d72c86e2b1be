// Threads find one id and change its scores: csrc/cpu/index/find_block.h.
#include <algorithm>

#include "checker.h"
#include "cpu/index/find_block.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;
using interleavings::require;

enum Word : int { kFrequency = 1, kExpiry, kScoreWords };

alignas(64) int64_t scores[kScoreWords * kBucketWidth];

int64_t& score(int word) { return scores[word * kBucketWidth]; }

void find(int64_t expires) {
  ScoreUpdate update{};
  update.frequency_word = kFrequency;
  update.expiry_word = kExpiry;
  update.expires = expires;
  refresh_scores(update, scores);
}

// Three occurrences of an id that has had `before` ones.
interleavings::Execution begin(int64_t before) {
  std::fill(std::begin(scores), std::end(scores), 0);
  score(kFrequency) = before;
  interleavings::share(scores, sizeof scores, interleavings::Access::kGuarded);
  const auto check = [before] {
    require(score(kFrequency) == std::min(before + 3, kMaxFrequency), "an occurrence is lost");
    require(score(kExpiry) == 9, "an id expires too early");
  };
  return {{[] { find(8); }, [] { find(9); }, [] { find(7); }}, check};
}

}  // namespace

int main(int argc, char** argv) {
  const bool full = argc > 1 && std::string(argv[1]) == "full";
  return interleavings::explore(argc - 1, argv + 1,
                                [full] { return begin(full ? kMaxFrequency - 1 : 5); });
}
