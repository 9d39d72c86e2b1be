"""Decayed counts: hit rates beside LRU and LFU on drifting streams, and their cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from common.command import is_selected
from common.id_streams import ZipfNumbers, spread
from common.report import Row, compare, quantity
from common.timing import interleave
from eviction.quality import BATCHES, LIMIT_SHARE
from torch import Tensor

import torch_dynemb as td

DRIFTS = {"no drift": 0, "drift": 5, "strong drift": 20}  # numbers that change rank in a batch
CAPACITY = 0.1  # of the distinct ids of a stream
HALF_LIVES = {"a third": BATCHES // 3, "a tenth": BATCHES // 10}  # steps, by share of the stream
COST_TARGET = 1.1
DECAYED = "decayed, a third"
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


def hit_rate_rows(bench: str, lookups: int, only: list[str]) -> Iterator[Row | str]:
    """Yield points by which hit rates of decayed counts exceed the better of LRU and LFU."""
    for name, swaps in DRIFTS.items():
        case = f"hit rate of decayed counts above LRU and LFU, {name}"
        if not is_selected(only, case, "target"):
            continue
        yield case
        limit = int(lookups * LIMIT_SHARE)
        numbers = SwappingNumbers(limit, seed=0, swaps=swaps)
        batches = [spread(numbers.draw(-(-lookups // BATCHES))) for _ in range(BATCHES)]
        capacity = max(int(CAPACITY * len(torch.unique(torch.cat(batches)))), 1)
        groups = {policy: _group(policy, capacity) for policy in POLICIES}
        before = {}
        for number, batch in enumerate(batches):
            for policy, group in groups.items():
                if number == BATCHES // 2:
                    before[policy] = group.usage.tables()["bench"].found
                group.insert(0, batch)
                group.step()
        counted = len(batches[0]) * (BATCHES - BATCHES // 2)
        rates = {
            policy: 100 * (group.usage.tables()["bench"].found - before[policy]) / counted
            for policy, group in groups.items()
        }
        yield quantity(
            bench,
            case,
            max(rates[f"decayed, {share}"] for share in HALF_LIVES)
            - max(rates["LRU"], rates["LFU"]),
            "points",
            capacity=capacity,
            **{f"hit_rate_{policy}": rate for policy, rate in rates.items()},
        )


def cost_rows(
    bench: str, capacity: int, batch: int, rounds: int, only: list[str]
) -> Iterator[Row | str]:
    """Yield the time of ``find_or_insert`` of known ids: decayed counts against frequencies."""
    case, peer = "find_or_insert of known ids, decayed", "frequency"
    if not is_selected(only, case, peer):
        return
    yield case
    law = ZipfNumbers(capacity, seed=0)
    batches = [spread(law.draw(batch)) for _ in range(8)]
    groups = {policy: _group(policy, 2 * capacity) for policy in (DECAYED, "LFU")}
    for group in groups.values():
        for some in spread(torch.arange(capacity)).split(batch):
            group.insert(0, some)

    def look_up(call: int, group: td.TableGroup) -> None:
        group.insert(0, batches[call % len(batches)])

    runs = {policy: functools.partial(look_up, group=group) for policy, group in groups.items()}
    timings = interleave(runs, rounds=rounds, calls=8)
    yield compare(bench, case, timings[DECAYED], peer, timings["LFU"], target=COST_TARGET)


__all__ = ["cost_rows", "hit_rate_rows"]
