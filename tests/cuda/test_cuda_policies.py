"""Life-cycle policies on the emulated GPU: integers equal to the CPU's after the same calls.

Random calls on small tables that insert and remove ids, with several orders of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from emulated_groups import emulated_cuda
from emulator.mode import Graph, created_bytes, set_capturing
from group_calls import same_bits, with_free_steps
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Slab, Table

pytestmark = pytest.mark.own_device

SKETCH = td.AdmitFrequentSketch(2, memory=4096)
SCORES: list[Any] = ["step", "timestamp", "frequency", "custom", ("frequency", "timestamp")]


def table(
    number: int, policy: td.Policy, features: dict[str, td.FeaturePolicy] | None = None
) -> td.TableConfig:
    features = {} if features is None else features
    return td.TableConfig(
        f"table{number}",
        3 if number == 1 else 4,
        [*features, "other"],
        padding_idx=7 if number == 1 else None,
        policy=policy,
        feature_policies=features,
    )


def tables_of(name: str, capacity: int) -> list[td.TableConfig]:
    """The tables of a group by what happens in it."""

    def evicting(score: Any, **arguments: Any) -> td.Policy:
        return td.Policy(score=score, capacity=capacity, **arguments)

    if name.startswith("evict by"):
        score = {str(score): score for score in SCORES}[name.removeprefix("evict by ")]
        return [table(0, evicting(score)), table(1, evicting(score))]
    policies: dict[str, list[td.Policy]] = {
        "protected": [evicting("step", protected_steps=2), evicting("frequency")],
        "refused": [
            td.Policy(score="step", capacity=capacity, on_full="default"),
            td.Policy(capacity=capacity, on_full="default"),
        ],
        "error": [td.Policy(score="step", capacity=3 * capacity, on_full="error"), td.Policy()],
        "beyond capacity": [td.Policy(capacity=capacity, on_full="grow")],
        "frequent": [td.Policy(admission=td.AdmitFrequent(2)), td.Policy(score="frequency")],
        "frequent and evicted": [
            evicting("frequency", admission=td.AdmitFrequent(2)),
            evicting("step", admission=td.AdmitFrequent(3), protected_steps=2),
        ],
        "frequent and refused": [
            td.Policy(
                score="frequency",
                capacity=capacity,
                on_full="default",
                admission=td.AdmitFrequent(2),
            ),
            td.Policy(capacity=capacity, on_full="default", admission=SKETCH),
        ],
        "frequent of late": [
            evicting("frequency", admission=td.AdmitFrequent(2, half_life_steps=1)),
            td.Policy(
                score=("timestamp", "frequency"),
                capacity=capacity,
                on_full="default",
                admission=td.AdmitFrequent(2, half_life=7),
            ),
        ],
        "sketch": [td.Policy(admission=SKETCH), evicting("step", admission=SKETCH)],
        "chance and none": [
            evicting("timestamp", admission=td.AdmitByChance(0.4)),
            td.Policy(score="step", admission=td.AdmitNone()),
        ],
        "budget": [
            td.Policy(),
            td.Policy(score="frequency", capacity=capacity),
            td.Policy(on_full="default"),
        ],
    }
    if name != "features":
        return [table(t, policy) for t, policy in enumerate(policies[name])]
    counted = evicting(("timestamp", "frequency"), ttl=20, admission=td.AdmitFrequent(2))
    return [
        table(
            0,
            counted,
            {
                "a": td.FeaturePolicy(threshold=1, ttl=3),
                "b": td.FeaturePolicy(threshold=3, updates_scores=False),
            },
        ),
        table(
            1,
            td.Policy(score="custom", admission=SKETCH),
            {"a": td.FeaturePolicy(updates_scores=False), "b": td.FeaturePolicy(threshold=4)},
        ),
        table(2, td.Policy()),
    ]


GROUPS = [
    *(f"evict by {score}" for score in SCORES),
    "protected",
    "refused",
    "error",
    "beyond capacity",
    "frequent",
    "frequent and evicted",
    "frequent and refused",
    "frequent of late",
    "sketch",
    "chance and none",
    "features",
    "budget",
]


def make_group(name: str, capacity: int) -> td.TableGroup:
    budget = 60_000 if name == "budget" else None
    tables = tables_of(name, capacity)
    group = td.TableGroup(tables, optimizer=td.SGD(lr=0.5), seed=3, memory_budget=budget)
    group.evicted.record(3 * capacity)
    group.index.clock[1] = 1000  # not the machine's time
    return group


def state(group: td.TableGroup) -> dict[str, Tensor]:
    """Copies of all integers of the index, as far as they are used."""
    tensors = {
        name: getattr(group.index, name) for name in ("tables", "slabs", "sketch", "evicted")
    }
    for t in range(group.index.tables.shape[0]):
        active = group.index.active_buckets(t)
        tensors[f"buckets {t}"] = group.index.buckets[active]
        if group.config.layout.score_words and t < len(group.config.tables):
            tensors[f"scores {t}"] = with_free_steps(group.index.scores[active])
    for s in range(len(group.config.slabs)):
        tensors[f"free rows {s}"] = group.index.free_rows[
            s, : int(group.index.slabs[s, Slab.FREE_COUNT])
        ]
    return {name: tensor.clone() for name, tensor in tensors.items()}


def differences(a: td.TableGroup, b: td.TableGroup) -> dict[str, tuple[Tensor, Tensor]]:
    state_a, state_b = state(a), state(b)
    return {
        name: (state_a[name], state_b[name])
        for name in state_a
        if not same_bits(state_a[name], state_b[name])
    }


def find_or_insert(
    group: td.TableGroup,
    ids: Tensor,
    offsets: Tensor,
    tables: Sequence[int],
    policies: Sequence[int],
    admit: Tensor | None,
) -> Tensor:
    return ops.find_or_insert_(group.index, ids, offsets, admit, tables, policies)


class Pair:
    """The same calls on a group of the CPU and an emulated one."""

    def __init__(self, name: str, capacity: int = 50) -> None:
        self.cpu = make_group(name, capacity)
        with emulated_cuda():
            self.gpu = make_group(name, capacity)
        self.features = [
            (t, self.cpu.config.layout.of_feature.get((t, feature), t))
            for t, config in enumerate(self.cpu.config.tables)
            for feature in config.feature_names
        ]
        self.refused = 0

    def insert(self, ids: Tensor, offsets: Tensor, admit: Tensor | None = None) -> None:
        arguments = (ids, offsets, [t for t, _ in self.features], [p for _, p in self.features])
        handles = error = None
        try:
            handles = find_or_insert(self.cpu, *arguments, admit)
        except RuntimeError as raised:
            error = str(raised)
        with emulated_cuda():
            given = find_or_insert(self.gpu, *arguments, admit)
            if handles is None:
                assert error is not None
                assert "choose another on_full" in error
                self.refused += 1
                with pytest.raises(RuntimeError, match="choose another on_full"):
                    self.gpu.end_step()
            else:
                self.gpu.end_step()
                assert same_bits(handles, given)

    def erase(self, t: int, ids: Tensor) -> None:
        expected = self.cpu.erase(t, ids)
        with emulated_cuda():
            assert self.gpu.erase(t, ids) == expected

    def end_step(self, generator: torch.Generator) -> None:
        score = torch.randint(-5, 5, (), generator=generator)
        for group in (self.cpu, self.gpu):
            group.index.clock[0] += 1
            group.index.clock[1] += 2
            group.index.clock[2:] = score

    def check(self) -> None:
        assert differences(self.cpu, self.gpu) == {}
        with emulated_cuda():
            self.gpu.end_step()
            tables, clock = ops.reported_counts(self.gpu.index, self.gpu.rows)
        assert torch.equal(tables, self.cpu.index.tables)
        assert torch.equal(clock, self.cpu.rows.row_clock)


def random_ids(generator: torch.Generator, count: int, distinct: int) -> Tensor:
    """Few ids often, many now and then."""
    spread = torch.rand(count, generator=generator) ** 2
    return (spread * distinct).long() * 7919 - 7919 * 20 + 7


def random_call(
    pair: Pair, generator: torch.Generator, distinct: int, length: int = 40
) -> tuple[Tensor, Tensor]:
    """Four bags for every feature, of 0 to ``length`` ids."""
    lengths = torch.randint(0, length + 1, (4 * len(pair.features),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return random_ids(generator, int(offsets[-1]), distinct), offsets


@pytest.mark.parametrize("name", GROUPS)
def test_random_calls(name: str, seed: int) -> None:
    pair = Pair(name)
    generator = torch.Generator().manual_seed(seed)
    for step in range(14):
        ids, offsets = random_call(pair, generator, distinct=100 + 20 * step)
        admit = None
        if step % 5 == 4 and pair.cpu.config.layout.rows:
            admit = torch.rand(ids.numel(), generator=generator) < 0.5
        pair.insert(ids, offsets, admit)
        pair.check()
        if step % 3 == 2:
            pair.erase(0, random_ids(generator, 20, 200))
            pair.check()
        if step % 6 == 5:
            pair.insert(ids[:0], torch.zeros_like(offsets))
        if step % 2:
            pair.end_step(generator)
    counts = pair.cpu.index.tables.sum(0)
    assert counts[Table.FOUND] > 0
    assert counts[Table.MISSED] > 0
    if name.startswith("evict"):
        assert counts[Table.EVICTED] > 100
        assert counts[Table.REJECTED] > 0
        assert pair.cpu.index.evicted[0, 1] > 0, "the log has overflown"
    if name == "error":
        assert pair.refused > 0
    if name in ("refused", "budget", "frequent and refused"):
        assert counts[Table.REJECTED] > 0
    if any(config.policy.admission is not None for config in pair.cpu.config.tables):
        assert counts[Table.NOT_ADMITTED] > 0


def test_calls_of_many_blocks(seed: int) -> None:
    """Ranks, records and claims across blocks of threads, and growth of the index in between."""
    pair = Pair("features", capacity=700)
    generator = torch.Generator().manual_seed(seed)
    for step in range(4):
        ids, offsets = random_call(pair, generator, distinct=1500 + 500 * step, length=500)
        pair.insert(ids, offsets)
        pair.check()
        pair.end_step(generator)
    assert pair.cpu.index.tables[0, Table.EVICTED] > 256


def test_counters_are_rehashed_while_ids_find_victims_or_none(seed: int) -> None:
    """Of many new ids, some counted before, few find a victim: the others are counted on."""
    pair = Pair("frequent and evicted", capacity=20)
    pair.features = [(0, 0)]
    pair.insert(torch.arange(20).repeat(2), torch.tensor([0, 40]))
    growths = []
    for step in range(4):
        for group in (pair.cpu, pair.gpu):
            group.index.clock[0] += 1
        first = 100 + 200 * step
        once, twice = torch.arange(first, first + 60), torch.arange(first + 30, first + 120)
        pair.insert(once, torch.tensor([0, 60]))
        pair.check()
        before = int(pair.cpu.index.tables[2, Table.GROWTHS])
        pair.insert(torch.cat([once, twice, twice]), torch.tensor([0, 240]))
        pair.check()
        growths.append(int(pair.cpu.index.tables[2, Table.GROWTHS]) - before)
    assert pair.cpu.index.tables[0, Table.EVICTED] == 4 * 20
    assert pair.cpu.index.tables[0, Table.REJECTED] == 4 * 100
    assert pair.cpu.index.tables[2, Table.SIZE] == 4 * 100  # all that have no row, and no other
    assert sum(growths) > 0


def test_a_small_table_whose_ids_many_want(seed: int) -> None:
    """Its index is looked at as a whole, so that all new ids claim the same victims."""
    pair = Pair("evict by frequency", capacity=30)
    pair.features = [(0, 0)]
    pair.insert(torch.arange(30).repeat_interleave(torch.arange(30) % 4 + 1), torch.tensor([0, 73]))
    for count in (10, 30, 300):
        for group in (pair.cpu, pair.gpu):
            group.index.clock[0] += 1
        pair.insert(torch.arange(count) + 1000 * count, torch.tensor([0, count]))
        pair.check()
    assert pair.cpu.index.tables[0, Table.EVICTED] == 10 + 30 + 30
    assert pair.cpu.index.tables[0, Table.REJECTED] == 270


@pytest.mark.parametrize("capacity", [50, 200])
def test_victims_that_many_want(seed: int, capacity: int) -> None:
    """New ids of one bucket: they displace each other, and some find no victim."""
    from collisions import ids_in_one_bucket

    pair = Pair("protected", capacity)
    pair.features = [(0, 0)]
    pair.insert(torch.arange(capacity), torch.tensor([0, capacity]))
    for group in (pair.cpu, pair.gpu):
        group.index.clock[0] += 5
    bucket_count = int(pair.cpu.index.tables[0, Table.BUCKET_COUNT])
    new = ids_in_one_bucket(pair.cpu, 0, 60, bucket_count=bucket_count)
    pair.insert(new, torch.tensor([0, 60]))
    pair.check()
    assert 0 < int(pair.cpu.index.tables[0, Table.EVICTED]) < 60
    assert int(pair.cpu.index.tables[0, Table.REJECTED]) > 0


@pytest.mark.parametrize("shared", [False, True])
def test_frequencies_end_at_their_limit(seed: int, shared: bool) -> None:
    pair = Pair("evict by frequency")
    pair.features = [(0, 0)]
    ids = torch.arange(3)
    pair.insert(ids, torch.tensor([0, 3]))
    limit = 1 << 62
    for group in (pair.cpu, pair.gpu):
        group.scores.set(0, ids, torch.tensor([limit - 20, limit - 3, limit]))
    many = ids.repeat(40) if shared else ids
    pair.insert(many, torch.tensor([0, many.numel()]))
    pair.check()
    assert pair.cpu.scores.get(0, ids[2:]).scores.tolist() == [limit]


def test_scores_of_ids_given_twice_are_the_largest(seed: int) -> None:
    pair = Pair("features")
    ids = torch.arange(40).repeat(3)
    pair.features = [(1, 1)]
    pair.insert(ids, torch.tensor([0, 120]))
    given = torch.randint(-100, 100, (120,), generator=torch.Generator().manual_seed(seed))
    expected = pair.cpu.scores.set(1, ids, given)
    with emulated_cuda():
        assert pair.gpu.scores.set(1, ids, given) == expected
    pair.check()


@pytest.mark.long
def test_a_full_table_that_evicts_maps_no_more_memory() -> None:
    with emulated_cuda():
        group = td.TableGroup(
            [table(0, td.Policy(capacity=1000))], optimizer=td.SGD(lr=0.5), max_rows=1_000_000
        )
        group.insert(0, torch.arange(1000))
        mapped = created_bytes()
        for step in range(1, 20):
            group.index.clock[0] += 1
            group.insert(0, torch.arange(step * 1000, (step + 1) * 1000))
            group.end_step()
    assert created_bytes() == mapped
    assert group.size(0) == 1000
    assert int(group.index.tables[0, Table.EVICTED]) > 10_000


@pytest.fixture
def end_of_capture() -> Iterator[None]:
    yield
    set_capturing(False)


@pytest.mark.long
def test_a_captured_step_drops_the_tombstones_of_a_table_that_evicts(
    end_of_capture: None,
) -> None:
    """Every replay evicts, so that now and then one must rehash."""
    with emulated_cuda():
        group = td.TableGroup([table(0, td.Policy(capacity=1000))], optimizer=td.SGD(lr=0.5))
        set_capturing(True)
        for step in range(20):
            group.index.clock[0] += 1
            group.insert(0, torch.arange(step * 700, (step + 1) * 700))
            torch.ops.dynemb.raise_device_errors(0)
        set_capturing(False)
        assert group.size(0) == 1000
        assert int(group.index.tables[0, Table.GROWTHS]) > 3


@pytest.mark.parametrize("again", ["record", "call"])
def test_replays_of_a_graph_from_before_a_record_write_into_kept_memory(again: str) -> None:
    """The graph knows the address of the records of its capture."""
    policy = td.Policy(capacity=100)
    ids, graph, seen = torch.arange(150), Graph(), []
    with emulated_cuda():
        group = td.TableGroup([table(0, policy)], optimizer=td.SGD(lr=0.5))
        group.evicted.record(500)
        group.insert(0, torch.arange(-100, 0))
        group.step()
        with graph.capture():
            group.insert(0, ids)
        if again == "record":
            group.evicted.record(600)
        else:
            group.evicted.call(lambda name, evicted: seen.append(evicted))
        assert group.evicted.take() == {}
        group.step()
        ids += 1000
        graph.replay()
        stale = r"\d+ evicted ids were not recorded.* captured before evicted.record or evicted.c"
        with pytest.raises(RuntimeError, match=stale):
            group.step() if again == "call" else group.evicted.take()
        assert group.evicted.take() == {}
        assert seen == []
        group.step()
        group.insert(0, torch.arange(5000, 5010))
        assert group.evicted.take()["table0"].ids.numel() == 10
