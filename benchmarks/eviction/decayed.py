"""Decayed counts: hit rates on drifting streams beside others, and the cost of scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from common.command import is_selected
from common.id_streams import ZipfNumbers, spread
from common.report import Row, compare, quantity
from common.timing import interleave
from eviction.quality import BATCHES, LIMIT_SHARE
from eviction.reference import ExactCache
from peers.managed_collisions import ManagedCollisions
from torch import Tensor

import torch_dynemb as td

DRIFTS = {"no drift": 0, "drift": 5, "strong drift": 20}  # numbers that change rank in a batch
CAPACITY = 0.1  # of the distinct ids of a stream
HALF_LIVES = {"a third": BATCHES // 3, "a tenth": BATCHES // 10}  # steps, by share of the stream
MCH_INTERVAL = 10  # steps
MCH = f"TorchRec MCH DistanceLFU, every {MCH_INTERVAL} steps"
COST_TARGET = 1.1  # of decayed counts against frequencies
NEVER = 1 << 30  # a threshold that no id reaches
POLICIES = {
    "LRU": {"score": "step"},
    "LFU": {"score": "frequency"},
    **{
        f"decayed, {share}": {"score": "decayed", "half_life_steps": steps}
        for share, steps in HALF_LIVES.items()
    },
}


class SwappingNumbers(ZipfNumbers):
    """As ``ZipfNumbers``, but numbers trade places with others of any rank.

    Args:
        limit: of the numbers.
        seed: of the draws.
        swaps: pairs of ranks that swap their numbers before each draw. One of a pair is drawn
            evenly by its logarithm, so popular numbers change as often as others.
    """

    def __init__(self, limit: int, *, seed: int, swaps: int) -> None:
        super().__init__(limit, seed=seed)
        self._swaps = swaps
        self._pairs = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> Tensor:
        """Return int64 [count]."""
        numbers, limit = self._number_of_rank, len(self._number_of_rank)
        for _ in range(self._swaps):
            even, any_rank = torch.rand(2, generator=self._pairs).tolist()
            pair = torch.tensor([int(limit**even) - 1, int(any_rank * limit)])
            numbers[pair] = numbers[pair.flip(0)]
        return numbers[self._ranks(count)]


def _group(policy: str, capacity: int) -> td.TableGroup:
    of_table = td.Policy(capacity=capacity, **POLICIES[policy])  # type: ignore[arg-type]
    return td.TableGroup([td.TableConfig("bench", 1, policy=of_table)], optimizer=None, seed=0)


class Stream(NamedTuple):
    """Batches of numbers, drawn while ranks swap.

    Attributes:
        batches: of numbers, int64 [n] each.
        ids: int64 [limit], the id of each number.
        capacity: ids that tables may hold.
    """

    batches: list[Tensor]
    ids: Tensor
    capacity: int

    @staticmethod
    def of(swaps: int, lookups: int) -> Stream:
        """Draw so many lookups in :data:`BATCHES` batches."""
        limit = int(lookups * LIMIT_SHARE)
        numbers = SwappingNumbers(limit, seed=0, swaps=swaps)
        batches = [numbers.draw(-(-lookups // BATCHES)) for _ in range(BATCHES)]
        distinct = len(torch.unique(torch.cat(batches)))
        return Stream(batches, spread(torch.arange(limit)), max(int(CAPACITY * distinct), 1))

    def hit_rate(self, look_up: Callable[[Tensor], int]) -> float:
        """Return the percentage of lookups that find their id, in the second half.

        Args:
            look_up: looks up a batch of numbers, and returns how many lookups found their ids.
        """
        found = [look_up(batch) for batch in self.batches][BATCHES // 2 :]
        return 100 * sum(found) / sum(len(batch) for batch in self.batches[BATCHES // 2 :])

    def hit_rate_of(self, policy: str) -> float:
        """Return the hit rate of a table with a policy of :data:`POLICIES`."""
        group = _group(policy, self.capacity)

        def look_up(numbers: Tensor) -> int:
            before = group.usage.tables()["bench"].found
            group.insert(0, self.ids[numbers])
            group.step()
            return group.usage.tables()["bench"].found - before

        return self.hit_rate(look_up)


def hit_rate_rows(bench: str, lookups: int, only: list[str]) -> Iterator[Row | str]:
    """Yield points by which hit rates of decayed counts exceed those of others."""
    for name, swaps in DRIFTS.items():
        case = f"hit rate of decayed counts above LRU and LFU, {name}"
        if not is_selected(only, case, "target"):
            continue
        yield case
        stream = Stream.of(swaps, lookups)
        rates = {policy: stream.hit_rate_of(policy) for policy in POLICIES}
        exact = ExactCache(
            stream.ids.numpy(), stream.capacity, score="decayed", half_life=HALF_LIVES["a third"]
        )
        rates["exact decayed, a third"] = stream.hit_rate(
            lambda numbers, exact=exact: exact.look_up(numbers.numpy())  # type: ignore[misc]
        )
        yield quantity(
            bench,
            case,
            max(rates[f"decayed, {share}"] for share in HALF_LIVES)
            - max(rates["LRU"], rates["LFU"]),
            "points",
            capacity=stream.capacity,
            **{f"hit_rate_{policy}": rate for policy, rate in rates.items()},
        )


def mch_hit_rate_rows(bench: str, lookups: int, only: list[str]) -> Iterator[Row | str]:
    """Yield points by which hit rates of decayed counts exceed those of TorchRec's MCH."""
    for name, swaps in DRIFTS.items():
        case = f"hit rate of decayed counts above {MCH}, {name}"
        if not is_selected(only, case, "target"):
            continue
        yield case
        stream = Stream.of(swaps, lookups)
        module = ManagedCollisions("DistanceLFU", stream.capacity + 1, interval=MCH_INTERVAL)

        def look_up(
            numbers: Tensor, stream: Stream = stream, module: ManagedCollisions = module
        ) -> int:
            ids = stream.ids[numbers]
            found = module.known(ids)
            module.look_up(ids)
            return int(found.sum())

        theirs, ours = stream.hit_rate(look_up), stream.hit_rate_of("decayed, a third")
        yield quantity(
            bench,
            case,
            ours - theirs,
            "points",
            capacity=stream.capacity,
            hit_rate=ours,
            peer_hit_rate=theirs,
        )


class Cost(NamedTuple):
    """Two policies with which the same ids are looked up in training.

    Attributes:
        case, peer: names in the report.
        policy, other: of the case and of its peer.
        scores: whether lookups bring scores.
        target: largest ratio of the times, or None.
    """

    case: str
    peer: str
    policy: td.Policy
    other: td.Policy
    scores: bool = False
    target: float | None = None


def _costs(capacity: int) -> list[Cost]:
    def of(score: str | td.Custom, **arguments: int) -> td.Policy:
        return td.Policy(score=score, capacity=capacity, **arguments)  # type: ignore[arg-type]

    steps = HALF_LIVES["a third"]
    known, replaced = "find_or_insert of known ids", "replaced"
    decayed_sum = td.Custom(combine="decayed_sum", half_life_steps=steps)
    return [
        Cost(
            f"{known}, decayed",
            "frequency",
            of("decayed", half_life_steps=steps),
            of("frequency"),
            target=COST_TARGET,
        ),
        Cost(f"{known}, sums", replaced, of(td.Custom(combine="sum")), of("custom"), True),
        Cost(f"{known}, decayed sums", replaced, of(decayed_sum), of("custom"), True),
        Cost(
            "find_or_insert of ids below admission, decayed",
            "counted",
            td.Policy(admission=td.AdmitFrequent(NEVER, half_life_steps=steps)),
            td.Policy(admission=td.AdmitFrequent(NEVER)),
        ),
    ]


def cost_rows(
    bench: str, capacity: int, batch: int, rounds: int, only: list[str]
) -> Iterator[Row | str]:
    """Yield times of ``find_or_insert`` of ids that have been seen, by score and admission."""
    for cost in _costs(2 * capacity):
        if not is_selected(only, cost.case, cost.peer):
            continue
        yield cost.case
        law = ZipfNumbers(capacity, seed=0)
        batches = [spread(law.draw(batch)) for _ in range(8)]
        scores = torch.arange(batch) % 7 if cost.scores else None
        groups = {
            name: td.TableGroup([td.TableConfig("bench", 1, policy=policy)], optimizer=None, seed=0)
            for name, policy in (("ours", cost.policy), (cost.peer, cost.other))
        }
        for group in groups.values():
            for some in spread(torch.arange(capacity)).split(batch):
                group.insert(0, some, scores=None if scores is None else scores[: len(some)])

        def look_up(
            call: int,
            group: td.TableGroup,
            batches: list[Tensor] = batches,
            scores: Tensor | None = scores,
        ) -> None:
            group.insert(0, batches[call % len(batches)], scores=scores)

        runs = {name: functools.partial(look_up, group=group) for name, group in groups.items()}
        timings = interleave(runs, rounds=rounds, calls=8)
        yield compare(
            bench,
            cost.case,
            timings["ours"],
            cost.peer,
            timings[cost.peer],
            target=cost.target,
            threads=torch.get_num_threads(),
        )


__all__ = ["cost_rows", "hit_rate_rows", "mch_hit_rate_rows"]
