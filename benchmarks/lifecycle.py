"""Life of ids: cost and victims of eviction, and the new ids that admission lets in.

Steady state: a full table (D=64) and batches of which 30 % are new ids, each for another one,
against as many lookups of known ids in an equal table. A reference kernel only touches the
memory that eviction has to touch: the limit of any index, and a training step on it that of any
table. TorchRec's MCH gets the same ids and as many rows. Victims are compared with those of an
exact simulation: see eviction/quality.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from common.command import is_selected, parser, positive
from common.id_streams import distinct_ids
from common.report import Report, Row, compare, quantity
from common.timing import Timing, interleave
from eviction import decayed, quality, removal
from eviction.quality import SCORES
from peers.evicting_table import EvictingTable
from peers.initial_rows import NormalRows
from peers.managed_collisions import ManagedCollisions
from torch import Tensor
from training.variants import train_all

import torch_dynemb as td
from torch_dynemb.table.rows import handle_rows

BENCH = "lifecycle"
DIM, BAG = 64, 16
NEW_SHARE = 0.3
KNOWN_BATCHES = 8  # batches of known ids, used in turn: never among the ones seen longest ago
KNOWN, HAND, MCH = "our known ids", "reference kernel", "TorchRec MCH"
LINES = "reference kernel that reads lines"
CONSTANT = "our Constant rows"
REFERENCE = "our Constant rows and reference Normal values"
STEADY_PEERS = (KNOWN, HAND, LINES)
STEADY_TARGETS = {"find_or_insert": 2.5, "training step": 1.6}
INITIAL_TARGET = 1.2  # Normal against Constant
MCH_TARGETS = {1: 1 / 8, 10: 1 / 3}  # by steps from eviction to eviction
MCH_POLICIES = {"LRU": "LRU", "LFU": "LFU", "DistanceLFU": "LFU"}  # theirs: ours


@dataclass(frozen=True)
class Sizes:
    """Ids of a full table and of a batch, rounds that are timed, calls in a round."""

    capacity: int
    batch: int
    rounds: int
    calls: int

    @property
    def new(self) -> int:
        """New ids in a batch."""
        return int(self.batch * NEW_SHARE)


class Batches:
    """Batches for a full table; a new id occurs once, a known one every few batches."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._generator = torch.Generator().manual_seed(0)
        ids = distinct_ids(0, KNOWN_BATCHES * sizes.batch)
        self._known = self._shuffled(ids).split(sizes.batch)
        self._next = 0  # new id

    def _shuffled(self, ids: Tensor) -> Tensor:
        return ids[torch.randperm(len(ids), generator=self._generator)]

    def known(self, call: int) -> Tensor:
        """Return ids that are in the table, int64 [batch]."""
        return self._known[call % KNOWN_BATCHES]

    def mixed(self, call: int) -> Tensor:
        """Return known and new ids in random order, int64 [batch]; new ones in every call."""
        new = distinct_ids(self._sizes.capacity + self._next, self._sizes.new)
        self._next += self._sizes.new
        return self._shuffled(torch.cat([self.known(call)[self._sizes.new :], new]))


class FullTable:
    """A table that holds as many ids as it may, all of which have been trained.

    Args:
        score: a key of SCORES.
        sizes: of the table and its batches.
        initializer: of its rows.
    """

    def __init__(self, score: str, sizes: Sizes, initializer: td.Initializer | None = None) -> None:
        self.bag = td.DynamicEmbeddingBag(
            DIM,
            mode="sum",
            name="bench",
            initializer=initializer,
            optimizer=td.RowWiseAdagrad(lr=0.01),
            policy=td.Policy(score=SCORES[score], capacity=sizes.capacity),
        )
        self._offsets = torch.tensor([0, sizes.batch])
        self.grad = torch.randn(sizes.batch // BAG, DIM, generator=torch.Generator().manual_seed(0))
        train_all(self.bag, sizes.capacity, sizes.batch)

    @property
    def stats(self) -> td.TableStats:
        """What has happened to the table."""
        return self.bag.group.usage.tables()["bench"]

    def look_up(self, ids: Tensor) -> Tensor:
        """Return handles of ids, int64 [batch], of one step without gradients."""
        handles = self.bag.group.find_or_insert(ids, self._offsets, [0])
        self.bag.group.step()
        return handles

    def train(self, ids: Tensor) -> None:
        """Forward, backward and update for ids, int64 [batch], in bags of :data:`BAG`."""
        self.bag(ids.view(-1, BAG)).backward(self.grad)
        self.bag.optimizer.step()


def steady_case(operation: str, score: str, threads: int) -> str:
    return f"{operation} with eviction, {score}, {threads} thread{'s' if threads > 1 else ''}"


def steady_rows(sizes: Sizes, only: list[str]) -> Iterator[Row | str]:
    """Yield calls with 30 % new ids against none, of the index and of the training step."""
    operations: dict[str, Callable[[FullTable, Tensor], object]] = {
        "find_or_insert": FullTable.look_up,
        "training step": FullTable.train,
    }
    for score in SCORES:
        wanted = [
            (operation, threads)
            for operation in operations
            for threads in sorted({1, torch.get_num_threads()})
            if any(
                is_selected(only, steady_case(operation, score, threads), peer)
                for peer in STEADY_PEERS
            )
        ]
        if not wanted:
            continue
        yield f"filling, {score}"
        evicting, known, batches = FullTable(score, sizes), FullTable(score, sizes), Batches(sizes)
        hand = EvictingTable(
            distinct_ids(0, sizes.capacity), batch=sizes.batch, frequent=score == "LFU"
        )
        for call in range(sizes.capacity // sizes.new):  # until all that can go has gone
            mixed = batches.mixed(call)
            evicting.look_up(mixed)
            hand.look_up(mixed)
        hand_operations: dict[str, Callable[[Tensor], object]] = {
            "find_or_insert": hand.look_up,
            "training step": functools.partial(hand.train, grad=evicting.grad),
        }
        all_threads = torch.get_num_threads()
        for operation, threads in wanted:
            yield steady_case(operation, score, threads)
            torch.set_num_threads(threads)
            rows = steady_comparisons(
                steady_case(operation, score, threads),
                operations[operation],
                evicting,
                known,
                hand_operations[operation],
                batches,
                sizes,
                STEADY_TARGETS[operation],
            )
            yield from (row for row in rows if is_selected(only, row["case"], row["peer"]))
            case = steady_case(operation, score, threads)
            if operation == "find_or_insert" and is_selected(only, case, LINES):
                yield lines_row(case, evicting, batches, sizes, score)
            torch.set_num_threads(all_threads)


def steady_comparisons(
    case: str,
    operation: Callable[[FullTable, Tensor], object],
    evicting: FullTable,
    known: FullTable,
    by_hand: Callable[[Tensor], object],
    batches: Batches,
    sizes: Sizes,
    target: float,
) -> list[Row]:
    """Time one operation on tables with and without eviction, and on the reference kernel."""
    calls = (sizes.rounds + 1) * sizes.calls
    mixed = [batches.mixed(call) for call in range(calls)]
    before = evicting.stats
    candidates: dict[str, Callable[[int], object]] = {
        "ours": lambda call: operation(evicting, mixed[call]),
        KNOWN: lambda call: operation(known, batches.known(call)),
        HAND: lambda call: by_hand(mixed[call]),
    }
    timings = interleave(candidates, rounds=sizes.rounds, calls=sizes.calls)
    after = evicting.stats
    ours, of_known = timings["ours"], timings[KNOWN]
    facts = {
        "threads": torch.get_num_threads(),
        "capacity": sizes.capacity,
        "batch": sizes.batch,
    }
    limit = timings[HAND].median_ms / of_known.median_ms
    return [
        compare(
            BENCH,
            case,
            ours,
            KNOWN,
            of_known,
            target=target,
            **facts,
            evicted_a_call=(after.evicted - before.evicted) / calls,
            rejected_a_call=(after.rejected - before.rejected) / calls,
            rehashes=after.growths - before.growths,
            ns_an_eviction=(ours.median_ms - of_known.median_ms) / sizes.new * 1e6,
        ),
        compare(BENCH, case, ours, HAND, timings[HAND], **facts, reference_by_known=limit),
    ]


def lines_row(case: str, evicting: FullTable, batches: Batches, sizes: Sizes, score: str) -> Row:
    """Time lookups against a kernel that also reads which slots are free: our limit."""
    hand = EvictingTable(
        distinct_ids(0, sizes.capacity),
        batch=sizes.batch,
        frequent=score == "LFU",
        reads_lines=True,
    )
    mixed = [batches.mixed(call) for call in range((sizes.rounds + 1) * sizes.calls)]
    timings = interleave(
        {
            "ours": lambda call: evicting.look_up(mixed[call]),
            LINES: lambda call: hand.look_up(mixed[call]),
        },
        rounds=sizes.rounds,
        calls=sizes.calls,
    )
    facts = {"threads": torch.get_num_threads(), "capacity": sizes.capacity, "batch": sizes.batch}
    return compare(BENCH, case, timings["ours"], LINES, timings[LINES], **facts)


def initial_value_rows(sizes: Sizes, only: list[str]) -> Iterator[Row | str]:
    """Yield steps with 30 % new ids, and rows that begin with random values or with one.

    The limit is a step with one value, and a kernel beside it that only computes the random values
    of so many rows. It does so in the forward and in the backward; threads share that without loss.
    """
    for threads in sorted({1, torch.get_num_threads()}):
        case = steady_case("training step, Normal rows,", "LRU", threads)
        wanted = [peer for peer in (CONSTANT, REFERENCE) if is_selected(only, case, peer)]
        if not wanted:
            continue
        yield case
        hand = NormalRows(sizes.new)
        normal = FullTable("LRU", sizes, td.Normal())
        constant = FullTable("LRU", sizes, td.Constant(0.01))
        batches = Batches(sizes)
        mixed = [batches.mixed(call) for call in range((sizes.rounds + 1) * sizes.calls)]
        all_threads = torch.get_num_threads()
        torch.set_num_threads(threads)
        timings = interleave(
            {
                "ours": lambda call, table=normal, mixed=mixed: table.train(mixed[call]),
                CONSTANT: lambda call, table=constant, mixed=mixed: table.train(mixed[call]),
                "values": lambda _, hand=hand: hand.compute(),
            },
            rounds=sizes.rounds,
            calls=sizes.calls,
        )
        torch.set_num_threads(all_threads)
        both = zip(timings[CONSTANT].rounds_ms, timings["values"].rounds_ms, strict=True)
        timings[REFERENCE] = Timing(tuple(step + 2 / threads * values for step, values in both))
        limit = timings[REFERENCE].median_ms / timings[CONSTANT].median_ms
        for peer in wanted:
            yield compare(
                BENCH,
                case,
                timings["ours"],
                peer,
                timings[peer],
                target=INITIAL_TARGET if peer == CONSTANT else None,
                threads=threads,
                capacity=sizes.capacity,
                batch=sizes.batch,
                reference_by_constant=limit,
            )


def sharing_ids(ids: Tensor, rows: Tensor) -> int:
    """Return ids that do not have a row of their own.

    Args:
        ids: int64 [N].
        rows: int64 [N], negative for none.

    Returns:
        How many distinct ids have the row of another one, or none.
    """
    distinct = torch.unique(torch.stack([ids, rows]), dim=1)[1]
    own = distinct[distinct >= 0]
    _, counts = torch.unique(own, return_counts=True)
    return int(len(distinct) - (counts == 1).sum())


def mch_rows(sizes: Sizes, only: list[str]) -> Iterator[Row | str]:
    """Yield lookups in training against MCH's, and the ids that share a row."""
    for theirs, score in MCH_POLICIES.items():
        for interval, target in MCH_TARGETS.items():
            every = "every step" if interval == 1 else f"every {interval} steps"
            case = f"lookups with eviction, {score}"
            peer = f"{MCH} {theirs}, {every}"
            sharing = f"ids of a batch without a row of their own, {score}, against {peer}"
            if not is_selected(only, case, peer) and not is_selected(only, sharing, "target"):
                continue
            yield f"{case}: {peer}"
            table, batches = FullTable(score, sizes), Batches(sizes)
            module = ManagedCollisions(theirs, sizes.capacity, interval=interval)
            fill = distinct_ids(0, sizes.capacity // sizes.batch * sizes.batch).split(sizes.batch)
            for call in range(-(-len(fill) // interval) * interval):
                module.look_up(fill[call % len(fill)])
            calls = 2 * interval
            mixed = [batches.mixed(call) for call in range((sizes.rounds + 1) * calls + 1)]
            timings = interleave(
                {
                    "ours": lambda call, table=table, mixed=mixed: table.look_up(mixed[call]),
                    "peer": lambda call, peer=module, mixed=mixed: peer.look_up(mixed[call]),
                },
                rounds=sizes.rounds,
                calls=calls,
            )
            yield compare(
                BENCH,
                case,
                timings["ours"],
                peer,
                timings["peer"],
                target=target,
                threads=torch.get_num_threads(),
                capacity=sizes.capacity,
                batch=sizes.batch,
            )
            last = mixed[-1]
            handles = table.look_up(last)
            yield quantity(
                BENCH,
                sharing,
                sharing_ids(last, torch.where(handles < 0, handles, handle_rows(handles))),
                "ids",
                target=0,
                peer_ids=sharing_ids(last, module.look_up(last)),
                new_ids=sizes.new,
            )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--capacity", type=positive, help="ids of a full table (default 1,000,000)"
    )
    arguments.add_argument("--batch", type=positive, help="ids of a batch (default 65,536)")
    arguments.add_argument(
        "--stream", type=positive, help="lookups of the streams of quality (default 2,048,000)"
    )
    arguments.add_argument("--threads", type=positive, help="threads (default: all)")
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = Sizes(
        capacity=options.capacity or (100_000 if options.quick else 1_000_000),
        batch=options.batch or (6_400 if options.quick else 1 << 16),
        rounds=options.rounds,
        calls=2 if options.quick else 16,
    )
    if sizes.batch % BAG or sizes.batch * KNOWN_BATCHES * 1.5 > sizes.capacity:
        arguments.error(
            f"--batch={sizes.batch}: expected a multiple of {BAG}, and at most 1/"
            f"{KNOWN_BATCHES * 1.5:g} of the capacity, {sizes.capacity}"
        )
    stream = options.stream or (102_400 if options.quick else 2_048_000)
    report = Report(as_json=options.json, cases=50)
    for rows in (
        steady_rows(sizes, options.only),
        initial_value_rows(sizes, options.only),
        mch_rows(sizes, options.only),
        quality.hit_rate_rows(BENCH, stream, options.only),
        quality.first_eviction_rows(BENCH, sizes.capacity, options.only),
        quality.small_table_rows(BENCH, 50 if options.quick else 1000, options.only),
        quality.admission_rows(BENCH, stream, options.only),
        decayed.hit_rate_rows(BENCH, stream, options.only),
        decayed.mch_hit_rate_rows(BENCH, stream, options.only),
        decayed.cost_rows(BENCH, sizes.capacity, sizes.batch, sizes.rounds, options.only),
        removal.removal_rows(BENCH, 4 * sizes.capacity, options.only),
    ):
        report.take(rows)
    report.close()


if __name__ == "__main__":
    main()
