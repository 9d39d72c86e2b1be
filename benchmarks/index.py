"""The CPU index against C++ hash maps int64 -> int64: lookups, insertion, bytes an id.

Ours is called through torch.ops and returns handles. Keys are 64-bit numbers in random order, the
lookups draw from them uniformly, so nearly every one misses the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from common.command import is_selected, parser, positive
from common.dynamic_index import DynamicIndex
from common.id_streams import UniformNumbers, distinct_ids, spread
from common.report import Report, Row, compare, quantity
from common.timing import Timing, interleave
from peers import index_limits
from peers.hash_maps import NOTED_FIND_RATES, NOTED_LINE_RATE, HashMap, random_line_rate
from torch import Tensor

BENCH = "index"
NOTED_KEYS = 36_000_000  # keys in the table when the peers' rates were noted
LOOKUPS, INSERTIONS = 1 << 18, 1 << 20  # ids of one call, the latter at most
LOOKUP_CALLS = 16  # calls a round
THREADS = (1, 2)
FOUND, HALF, TRAINING, INSERT = "find, all found", "find, 50 % miss", "training find", "insert new"
OURS_FOUND = "our find, all found"
TARGETS = {FOUND: 1 / 1.5, TRAINING: 1.0, INSERT: 1.0}
HALF_TARGET = 1 / 0.6  # of our own all-found time
SLOT_BYTES, SCORE_BYTES = 24, 8
STEADY_BYTES = {False: SLOT_BYTES / 0.70, True: 40.0}  # by whether the index keeps scores
GROWN_FACTOR = 1.25


def case_name(operation: str, threads: int) -> str:
    return f"{operation}, {threads} thread{'s' if threads > 1 else ''}"


@dataclass
class Fill:
    """An index with ``keys`` ids, and its bytes an id just before and just after growths."""

    index: DynamicIndex
    steady_bytes: float
    grown_bytes: float


def fill(keys: int, *, scores: bool) -> Fill:
    """Insert ids 0 to ``keys - 1`` in batches, a clock step each."""
    index = DynamicIndex(scores=scores)
    steady, grown = float("inf"), 0.0
    before = 0.0
    for first in range(0, keys, LOOKUPS):
        growths = index.growths
        index.find_or_insert(distinct_ids(first, min(LOOKUPS, keys - first)))
        index.step()
        bytes_an_id = index.used_bytes / len(index)
        if index.growths > growths and first > keys // 4:  # small tables round up
            steady, grown = min(steady, before), max(grown, bytes_an_id)
        before = bytes_an_id
    return Fill(index, min(steady, before), max(grown, before))


def lookups(keys: int, *, missing: float = 0.0) -> list[Tensor]:
    """Return batches of ids, a share of which is not in a table of ``keys`` keys."""
    numbers = UniformNumbers(keys, seed=2).draw(LOOKUP_CALLS * LOOKUPS)
    if missing:
        absent = torch.rand(len(numbers), generator=torch.Generator().manual_seed(3)) < missing
        numbers += absent * keys
    return list(spread(numbers).split(LOOKUPS))


class IndexBenchmark:
    """Times our index against each peer in turn; one peer's map is held at a time."""

    def __init__(self, keys: int, *, rounds: int, peers: list[str], only: list[str]) -> None:
        self._keys = keys
        self._insertions = min(INSERTIONS, keys)  # ids of one call
        self._rounds = rounds
        self._peers = peers
        self._only = only

    def rows(self) -> Iterator[Row | str]:
        """Yield the name of each comparison as it starts, then its row."""
        yield from self._bytes_and_own_rows()
        for peer in self._peers:
            yield from self._find_rows(peer)
            for threads in THREADS:
                yield from self._insert_rows(peer, threads)
        for threads in THREADS:
            yield from self._insert_limit_rows(threads)

    def _selected(self, operation: str, threads: int, peer: str) -> bool:
        return is_selected(self._only, case_name(operation, threads), peer)

    def _compare(
        self,
        operation: str,
        threads: int,
        peer: str,
        timings: dict[str, Timing],
        *,
        target: float | None,
        noted_rate: float | None = None,
        ids: int = LOOKUPS,
    ) -> Row:
        row = compare(
            BENCH,
            case_name(operation, threads),
            timings["ours"],
            peer,
            timings["peer"],
            target=target,
            noted_ms=ids / (noted_rate * threads * 1e3) if noted_rate else None,
            threads=threads,
            keys=self._keys,
            ids=ids,
            ours_m_per_s=ids / timings["ours"].median_ms / 1e3,
            peer_m_per_s=ids / timings["peer"].median_ms / 1e3,
        )
        if not row["valid"]:
            row["reason"] += f"; this machine: {self._line_note()}"
        return row

    def _line_note(self) -> str:
        if not hasattr(self, "_line_rate"):
            self._line_rate = random_line_rate()
        return (
            f"{self._line_rate:.0f} M random cache lines a second and core, "
            f"{NOTED_LINE_RATE:.0f} where the rates were noted"
        )

    def _time(
        self,
        ours: Callable[[Tensor], object],
        peer: Callable[[Tensor], object],
        *batches: list[Tensor],
    ) -> dict[str, Timing]:
        ours_batches, peer_batches = batches[0], batches[-1]
        return interleave(
            {
                "ours": lambda call: ours(ours_batches[call % LOOKUP_CALLS]),
                "peer": lambda call: peer(peer_batches[call % LOOKUP_CALLS]),
            },
            rounds=self._rounds,
            calls=LOOKUP_CALLS,
        )

    def _bytes_and_own_rows(self) -> Iterator[Row | str]:
        for scores in (False, True):
            name = "with scores" if scores else "without scores"
            steady, grown = f"bytes an id {name}", f"bytes an id {name}, just after a growth"
            own = [t for t in THREADS if not scores and self._selected(HALF, t, OURS_FOUND)]
            if not own and not any(is_selected(self._only, c, "target") for c in (steady, grown)):
                continue
            yield f"filling, {name}"
            filled = fill(self._keys, scores=scores)
            target = STEADY_BYTES[scores]
            for case, value, limit in (
                (steady, filled.steady_bytes, target),
                (grown, filled.grown_bytes, target * GROWN_FACTOR),
            ):
                if is_selected(self._only, case, "target"):
                    yield case
                    yield quantity(
                        BENCH, case, value, "bytes", target=limit, keys=len(filled.index)
                    )
            for threads in own:
                yield case_name(HALF, threads)
                torch.set_num_threads(threads)
                find = filled.index.find
                half, found = lookups(self._keys, missing=0.5), lookups(self._keys)
                timings = self._time(find, find, half, found)
                yield self._compare(HALF, threads, OURS_FOUND, timings, target=HALF_TARGET)

    def _find_rows(self, peer: str) -> Iterator[Row | str]:
        operations = [
            (operation, threads)
            for operation in (FOUND, TRAINING, HALF)
            for threads in THREADS
            if self._selected(operation, threads, peer)
        ]
        if not operations:
            return
        yield f"filling {peer}"
        found, half = lookups(self._keys), lookups(self._keys, missing=0.5)
        other = HashMap(peer)
        for first in range(0, self._keys, INSERTIONS):
            other.insert(
                distinct_ids(first, min(INSERTIONS, self._keys - first)), first_value=first
            )
        other.tune_prefetch(found[0])
        for scores in (False, True):
            wanted = [o for o in operations if (o[0] == TRAINING) == scores]
            if not wanted:
                continue
            index = fill(self._keys, scores=scores).index
            for operation, threads in wanted:
                yield f"{case_name(operation, threads)}: {peer}"
                torch.set_num_threads(threads)
                timings = self._time(
                    index.find_or_insert if operation == TRAINING else index.find,
                    lambda ids, threads=threads: other.find(ids, threads=threads),
                    half if operation == HALF else found,
                )
                noted = NOTED_FIND_RATES[peer] if self._keys >= NOTED_KEYS else None
                yield self._compare(
                    operation,
                    threads,
                    peer,
                    timings,
                    target=TARGETS.get(operation),
                    noted_rate=noted if operation != HALF else None,
                )
            del index
        other.close()

    def _insert_rows(self, peer: str, threads: int) -> Iterator[Row | str]:
        if not self._selected(INSERT, threads, peer):
            return
        yield f"{case_name(INSERT, threads)}: {peer}"
        other = HashMap(peer, shards=threads)
        for first in range(0, self._keys, INSERTIONS):
            other.insert(
                distinct_ids(first, min(INSERTIONS, self._keys - first)), first_value=first
            )
        yield self._insert_row(
            peer, threads, lambda ids, first: other.insert(ids, first_value=first)
        )
        other.close()

    def _insert_limit_rows(self, threads: int) -> Iterator[Row | str]:
        if not self._selected(INSERT, threads, index_limits.NAME):
            return
        yield f"{case_name(INSERT, threads)}: {index_limits.NAME}"
        hand = index_limits.ReferenceIndex(
            self._keys // 2
        )  # as many slots to a key as a table of ours
        for first in range(0, self._keys, INSERTIONS):
            ids = distinct_ids(first, min(INSERTIONS, self._keys - first))
            hand.insert(ids, first_value=first + 1, threads=threads)
        yield self._insert_row(
            index_limits.NAME,
            threads,
            lambda ids, first: hand.insert(ids, first_value=first, threads=threads),
        )

    def _insert_row(self, peer: str, threads: int, insert: Callable[[Tensor, int], object]) -> Row:
        """``insert`` is given ids and the number of the first."""
        torch.set_num_threads(threads)
        index = fill(self._keys, scores=False).index
        growths = index.growths
        calls = self._rounds + 1
        new = [
            distinct_ids(self._keys + i * self._insertions, self._insertions) for i in range(calls)
        ]
        timings = interleave(
            {
                "ours": lambda call: index.find_or_insert(new[call]),
                "peer": lambda call: insert(new[call], self._keys + call * self._insertions),
            },
            rounds=self._rounds,
            calls=1,
        )
        target = TARGETS[INSERT] if peer != index_limits.NAME else None
        row = self._compare(INSERT, threads, peer, timings, target=target, ids=self._insertions)
        return row | {"growths_in_rounds": index.growths - growths}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--keys", type=positive, help="keys in the table (default 36,000,000)")
    arguments.add_argument(
        "--peers",
        nargs="+",
        choices=sorted(NOTED_FIND_RATES),
        default=list(NOTED_FIND_RATES),
        help="hash maps to compare with (default: all)",
    )
    options = arguments.parse_args()
    benchmark = IndexBenchmark(
        options.keys or (2_000_000 if options.quick else NOTED_KEYS),
        rounds=options.rounds,
        peers=options.peers,
        only=options.only,
    )
    report = Report(as_json=options.json, cases=4 + 2 * len(THREADS) + 8 * len(options.peers))
    report.take(benchmark.rows())
    report.close()


if __name__ == "__main__":
    main()
