"""Faults of the protocols, which the programs of ``interleaved.py`` must find.

A mutant is a change of text in a copy of a source. MUTANT in the new text says at run time whether
the source has the fault, so a program has all of its mutants.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        what: in words.
        program: that finds it, with its scene.
        file: below ``csrc``.
        old, new: text; the file has the old one once.
        found: the end of the message.
    """

    what: str
    program: str
    file: str
    old: str
    new: str
    found: str


RELAXED, RELEASE = "__ATOMIC_RELAXED", "__ATOMIC_RELEASE"


def _order(text: str, order: str, weaker: str) -> tuple[str, str]:
    """Text with a memory order, and with a weaker one in the mutant."""
    assert text.count(order) == 1
    return text, text.replace(order, f"(MUTANT ? {weaker} : {order})")


def _without(text: str) -> tuple[str, str]:
    """Statements, and the same left out in the mutant."""
    return text, f"if (!MUTANT) {{\n{text}\n}}"


COPY_ON_WRITE = ("copy_on_write", "cpu/rows/copy_on_write.cpp")
SAVED = "the save has a row that was written meanwhile"
READER = "cpu/serving/live_reader.h"
WRITER = "cpu/serving/live_writer.cpp"
TORN, FOREIGN = "a row is made of two", "an id has the row of another"
MOVES = ("index_lookup", "cpu/index/moving_entries.h")
PROBE = ("index_lookup", "cpu/index/probe.h")
FOREIGN_HANDLE = "an id has the handle of another"
EMPTY = "a bucket that was full seems to have an empty slot"
ONE_WRITER = "cpu/index/one_writer.cpp"
VERSIONS = ("versions", "serving/versioned_model.h")
CHANGES = "cpu/serving/changed_table.cpp"
GONE_BACK = "a row of before an update that has ended, or that was read"
STD_RELEASE, STD_RELAXED = "std::memory_order_release", "std::memory_order_relaxed"
STD_ACQUIRE = "std::memory_order_acquire"
MUTANTS = (
    Mutant(
        "a copied row is not published",
        *COPY_ON_WRITE,
        *_order(
            "__atomic_store_n(mark, static_cast<int32_t>(place + 1), __ATOMIC_RELEASE);",
            RELEASE,
            RELAXED,
        ),
        "data race",
    ),
    Mutant(
        "a place is freed without order",
        *COPY_ON_WRITE,
        *_order(
            "__atomic_store_n(state.copy_on_write + kCowGiven, number + 1, __ATOMIC_RELEASE);",
            RELEASE,
            RELAXED,
        ),
        "data race",
    ),
    Mutant(
        "a writer takes a place without order",
        *COPY_ON_WRITE,
        *_order(
            "while (number < __atomic_load_n(state.copy_on_write + kCowGiven, __ATOMIC_ACQUIRE)) {",
            "__ATOMIC_ACQUIRE",
            RELAXED,
        ),
        "data race",
    ),
    Mutant(
        "the save may read a row after it has marked it",
        *COPY_ON_WRITE,
        "&seen, kCowRead, false, __ATOMIC_ACQ_REL,",
        "&seen, kCowRead, false, (MUTANT ? __ATOMIC_ACQUIRE : __ATOMIC_ACQ_REL),",
        SAVED,
    ),
    Mutant(
        "a writer does not copy rows first",
        *COPY_ON_WRITE,
        "if (seen == kCowRead || seen > 0) return;",
        "if (MUTANT || seen == kCowRead || seen > 0) return;",
        SAVED,
    ),
    Mutant(
        "a place is freed before its row is read",
        *COPY_ON_WRITE,
        "const char* from = place_of(state, seen - 1);\n      const char* at",
        "const char* from = place_of(state, seen - 1);\n"
        "if (MUTANT) give_place(state, seen - 1);\n      const char* at",
        "data race",
    ),
    Mutant(
        "a writer that finds no place keeps the mark",
        *COPY_ON_WRITE,
        *_without("__atomic_store_n(mark, kCowUnread, __ATOMIC_RELEASE);"),
        "the threads do not end",
    ),
    Mutant(
        "a row is freed before readers see that the index has dropped it",
        *("live_table updates", WRITER),
        *_without(
            "release_fence();  // a reader of a later word sees that the handle has left the index"
        ),
        TORN,
    ),
    Mutant(
        "a handle is stored before its key",
        *("live_table takes-over", WRITER),
        "  store_word_release(slot.key(), id);\n  store_word_release(slot.stored(), stored);",
        "  if (MUTANT) store_word_release(slot.stored(), stored);\n"
        "  store_word_release(slot.key(), id);\n  store_word_release(slot.stored(), stored);",
        FOREIGN,
    ),
    Mutant(
        "a handle is not published",
        *("live_table takes-over", WRITER),
        "  store_word_release(slot.stored(), stored);",
        "  MUTANT ? store_word(slot.stored(), stored) : store_word_release(slot.stored(), stored);",
        TORN,
    ),
    Mutant(
        "a new row is not published",
        *("live_table updates", WRITER),
        "  store_word_release(slot.stored(), write_row(writer, packed));",
        "  const int64_t stored = write_row(writer, packed);\n"
        "  MUTANT ? store_word(slot.stored(), stored) : store_word_release(slot.stored(), stored);",
        TORN,
    ),
    Mutant(
        "a range of the index is not published",
        *("live_table rehashes", WRITER),
        "  store_word_release(table.active, rehashes + 1);",
        "  MUTANT ? store_word(table.active, rehashes + 1)\n"
        "         : store_word_release(table.active, rehashes + 1);",
        "an id that stays is not found",
    ),
    Mutant(
        "a range is cleared before readers see that it is not active",
        *("live_table rehashes", WRITER),
        *_without(
            "release_fence();     // a reader of any later word sees that the other range is active"
        ),
        "an id that stays is not found",
    ),
    Mutant(
        "a reader does not look at the handle again",
        *("live_table updates", READER),
        "if (current && copied[r] && (!kValidated || now[r] == stored)) continue;",
        "if (current && copied[r] && (MUTANT || now[r] == stored)) continue;",
        TORN,
    ),
    Mutant(
        "a reader that begins anew does not look at the handle again",
        *("live_table updates", READER),
        "if (copied && (!kValidated || match_live(line, id) == place.stored))",
        "if (copied && (MUTANT || match_live(line, id) == place.stored))",
        TORN,
    ),
    Mutant(
        "a reader looks at the handle again before it has read the row",
        *("live_table updates", READER),
        "  acquire_fence();\n  // a rehash may have cleared",
        "  if (!MUTANT) acquire_fence();\n  // a rehash may have cleared",
        TORN,
    ),
    Mutant(
        "a reader does not look among removed ids again",
        *("changed_table known", CHANGES),
        "return look_among_removed(ChangedId::kRead);",
        "return MUTANT || look_among_removed(ChangedId::kRead);",
        GONE_BACK,
    ),
    Mutant(
        "a reader does not look among removed ids first",
        *("changed_table removed", CHANGES),
        "if (!look_among_removed(ChangedId::kAskFile)) return false;",
        "if (!MUTANT && !look_among_removed(ChangedId::kAskFile)) return false;",
        GONE_BACK,
    ),
    Mutant(
        "readers are not told of the first removed id",
        *("changed_table removed", CHANGES),
        *_without("any_removed.store(true, std::memory_order_release);"),
        GONE_BACK,
    ),
    Mutant(
        "a reader does not look whether there was a rehash",
        *("live_table rehashes", READER),
        "const bool current = !kValidated || load_word(table.active) == active;",
        "const bool current = MUTANT || load_word(table.active) == active;",
        "an id that stays is not found",
    ),
    Mutant(
        "a reader that begins anew does not look whether there was a rehash",
        *("live_table rehashes", READER),
        "if (!kValidated || load_word(table.active) == active) {",
        "if (MUTANT || load_word(table.active) == active) {",
        TORN,
    ),
    Mutant(
        "changes of the index are not ordered after their begin",
        *MOVES,
        *_without(
            "std::atomic_thread_fence(std::memory_order_release);"
            "  // before the stores of the change"
        ),
        FOREIGN_HANDLE,
    ),
    Mutant(
        "a reader looks for changes before it has read",
        *MOVES,
        *_without(
            "std::atomic_thread_fence(std::memory_order_acquire);  // after the loads of the read"
        ),
        FOREIGN_HANDLE,
    ),
    Mutant(
        "a reader does not look for changes",
        *MOVES,
        "if (moves.unchanged(before)) return;",
        "if (MUTANT || moves.unchanged(before)) return;",
        EMPTY,
    ),
    Mutant(
        "a handle is stored before its key",
        *PROBE,
        "  store_word(line + slot, id);\n",
        "  if (MUTANT) store_word_release(line + kBucketWidth + slot, stored);\n"
        "  store_word(line + slot, id);\n",
        FOREIGN_HANDLE,
    ),
    Mutant(
        "a handle is not published",
        *PROBE,
        "  store_word_release(line + kBucketWidth + slot, stored);",
        "  MUTANT ? store_word(line + kBucketWidth + slot, stored)\n"
        "         : store_word_release(line + kBucketWidth + slot, stored);",
        FOREIGN_HANDLE,
    ),
    Mutant(
        "id 0 takes a tombstone without a sign",
        *PROBE,
        "if (id == 0 && line[slot] != 0) moving.emplace(memory);",
        "if (!MUTANT && id == 0 && line[slot] != 0) moving.emplace(memory);",
        EMPTY,
    ),
    Mutant(
        "a reader that sees a change does not see its lock",
        *("one_writer moves", "cpu/index/moving_entries.h"),
        *_order("word_.fetch_add(1, std::memory_order_release);", STD_RELEASE, STD_RELAXED),
        "a call has rows of amid a change",
    ),
    Mutant(
        "a call does not look whether rows have moved",
        *("one_writer moves", "cpu/index/one_writer.h"),
        "    if (moves.unchanged(before)) return;",
        "    if (MUTANT || moves.unchanged(before)) return;",
        "a call has rows of amid a change",
    ),
    Mutant(
        "a refused op refuses the op of the thread that holds the lock",
        *("one_writer moves", ONE_WRITER),
        "compare_exchange_weak(holder, awaited(memory),",
        "compare_exchange_weak(holder, MUTANT ? memory : awaited(memory),",
        "a thread's own op is refused",
    ),
    Mutant(
        "the end of an op is not published",
        *("one_writer ops", ONE_WRITER),
        *_order(
            "OneWriter::~OneWriter() { slot_->busy.store(nullptr, std::memory_order_release); }",
            STD_RELEASE,
            STD_RELAXED,
        ),
        "data race",
    ),
    Mutant(
        "an op begins without order",
        *("one_writer ops", ONE_WRITER),
        "std::memory_order_acquire,\n",
        "(MUTANT ? std::memory_order_relaxed : std::memory_order_acquire),\n",
        "data race",
    ),
    Mutant(
        "a lock is taken amid an op",
        *("one_writer moves", ONE_WRITER),
        'const OneWriter writer("lock_memory", address(word));',
        'const OneWriter writer("lock_memory", address(MUTANT ? word + 64 : word));',
        "a thread's own op is refused",
    ),
    Mutant(
        "a run does not look whether its version is still the active one",
        *VERSIONS,
        "leave();\n      }",
        "if (MUTANT) return;\nleave();\n      }",
        "data race",
    ),
    Mutant(
        "a run counts itself too late for a writer",
        *VERSIONS,
        "side_->running.fetch_add(1);",
        "side_->running.fetch_add(\n"
        "1, MUTANT ? std::memory_order_relaxed : std::memory_order_seq_cst);",
        "data race",
    ),
    Mutant(
        "a run looks for the active version too early",
        *VERSIONS,
        "if (side_ == &model.sides_[model.active_.load()]) return;",
        "if (side_ == &model.sides_[model.active_.load(\n"
        "MUTANT ? std::memory_order_relaxed : std::memory_order_seq_cst)]) return;",
        "data race",
    ),
    Mutant(
        "a change does not wait for runs",
        *VERSIONS,
        "(running = next.running.load()) != 0;",
        "!MUTANT && (running = next.running.load()) != 0;",
        "data race",
    ),
    Mutant(
        "the last run of a version wakes no writer",
        *VERSIONS,
        "side_->running.notify_all();",
        "{ if (!MUTANT) side_->running.notify_all(); }",
        "threads wait for ever",
    ),
    Mutant(
        "a use is a load and a store",
        *("cache_slots", "cpu/storage/find_slots.cpp"),
        "if (threads == Threads::kOne) {\n    __atomic_store_n(slot + kSlotUse",
        "if (MUTANT || threads == Threads::kOne) {\n    __atomic_store_n(slot + kSlotUse",
        "a use counts for several threads, or none",
    ),
    Mutant(
        "an occurrence is counted by a load and a store",
        *("scores few", "cpu/index/find_block.h"),
        "if (__atomic_add_fetch(word, 1, __ATOMIC_RELAXED) > kMaxFrequency) {",
        "if (MUTANT) {\n"
        "__atomic_store_n(word, __atomic_load_n(word, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);\n"
        "} else if (__atomic_add_fetch(word, 1, __ATOMIC_RELAXED) > kMaxFrequency) {",
        "an occurrence is lost",
    ),
    Mutant(
        "the largest count is passed",
        *("scores full", "cpu/index/find_block.h"),
        "      __atomic_store_n(word, kMaxFrequency, __ATOMIC_RELAXED);",
        "      if (!MUTANT) __atomic_store_n(word, kMaxFrequency, __ATOMIC_RELAXED);",
        "an occurrence is lost",
    ),
    Mutant(
        "an expiry is set by a load and a store",
        *("scores few", "cpu/index/find_block.h"),
        "    while (seen < update.expires &&",
        "if (MUTANT && seen < update.expires) {\n"
        "__atomic_store_n(word, update.expires, __ATOMIC_RELAXED);\nreturn;\n}\n"
        "    while (seen < update.expires &&",
        "an id expires too early",
    ),
    Mutant(
        "a claim takes a slot from an earlier order",
        *("eviction", "cpu/index/eviction.cpp"),
        "while (seen > claim && !__atomic_compare_exchange_n(word",
        "while ((MUTANT || seen > claim) && !__atomic_compare_exchange_n(word",
        "the threads do not end",
    ),
    Mutant(
        "a displaced new id claims no other victim",
        *("eviction", "cpu/index/eviction.cpp"),
        "if (!is_eviction_claim(seen)) return;",
        "if (MUTANT || !is_eviction_claim(seen)) return;",
        "victims depend on the order of threads",
    ),
)
