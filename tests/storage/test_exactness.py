"""Tables with storage have the bits of tables in memory: outputs, rows, state, indexes, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from execution import threads
from group_calls import same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optimizer_groups import OPTIMIZERS, PLAIN
from tiered_pairs import STORES, Batch, Pair, storage_of

import torch_dynemb as td
from torch_dynemb.ops.columns import Tier
from torch_dynemb.storage.tiers import Storage

pytestmark = pytest.mark.cpu_only("stores are of the CPU")

UNIFORM = td.Uniform(-1.0, 1.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are small, and others need the processors."""
    with threads(1):
        yield


NewStorage = Callable[[], Storage]


@pytest.fixture
def new_storage(request: pytest.FixtureRequest, tmp_path_factory: Any) -> NewStorage:
    """Makes stores, in files unless a test names others."""
    kind = getattr(request, "param", "auto")
    return lambda: storage_of(kind, tmp_path_factory.mktemp("store"))


every_store = pytest.mark.parametrize("new_storage", STORES, indirect=True)


def tables(**arguments: Any) -> list[td.TableConfig]:
    return [
        td.TableConfig("a", 4, initializer=UNIFORM, **arguments),
        td.TableConfig("b", 3, initializer=UNIFORM, padding_idx=0, **arguments),
        td.TableConfig("c", 4, feature_names=["c1", "c2"], **arguments),
    ]


def train_some(pair: Pair, steps: int = 8) -> None:
    """Batches that come back after others have taken their slots."""
    for step in range(steps):
        pair.train(Batch(37 * step, 60, 1 + step % 3))
        pair.step()
        if step % 4 == 3:
            pair.read(Batch(11 * step, 50, 2))
            pair.check()
    assert pair.moved(Tier.WRITTEN) > 100


@pytest.mark.parametrize("name", PLAIN)
def test_every_optimizer(name: str, new_storage: NewStorage) -> None:
    train_some(Pair(tables(), OPTIMIZERS[name], new_storage()))


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - set(PLAIN)))
@pytest.mark.long
def test_every_option_of_optimizers(name: str, new_storage: NewStorage) -> None:
    train_some(Pair(tables(), OPTIMIZERS[name], new_storage()))


LOW_PRECISION = {
    "bfloat16 rows": (torch.bfloat16, td.Adam(lr=0.1)),
    "float16 rows": (torch.float16, td.RowWiseAdagrad(lr=0.1)),
    "rounded stochastically": (torch.bfloat16, td.SGD(lr=0.1, stochastic_rounding=True)),
    "bfloat16 state": (
        torch.bfloat16,
        td.Adam(lr=0.1, state_dtype=torch.bfloat16, stochastic_rounding=True),
    ),
    "state of 8 bits": (torch.float16, td.Adam(lr=0.1, state_dtype=torch.uint8)),
    "steps of rows": (torch.bfloat16, td.Adam(lr=0.1, row_steps=True)),
}


@pytest.mark.parametrize("kind", LOW_PRECISION)
def test_low_precision(kind: str, new_storage: NewStorage) -> None:
    dtype, optimizer = LOW_PRECISION[kind]
    train_some(Pair(tables(dtype=dtype), optimizer, new_storage()))


POLICIES = {
    "least recent": td.Policy(score="step", capacity=150),
    "least frequent": td.Policy(score="frequency", capacity=150),
    "oldest": td.Policy(score="timestamp", capacity=150),
    "two scores": td.Policy(score=("frequency", "timestamp"), capacity=150, ttl=4),
    "default": td.Policy(capacity=150, on_full="default"),
    "admitted at the second": td.Policy(score="step", admission=td.AdmitFrequent(2), capacity=100),
    "sketch": td.Policy(score="step", admission=td.AdmitFrequentSketch(2, memory=4096)),
    "by chance": td.Policy(score="frequency", admission=td.AdmitByChance(0.5), capacity=120),
    "ttl": td.Policy(ttl=3),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_policies(kind: str, new_storage: NewStorage) -> None:
    """Evictions do not depend on the place of rows."""
    policy = POLICIES[kind]
    timed = policy.ttl is not None or "timestamp" in str(policy.score)
    pair = Pair(tables(policy=policy), td.Adam(lr=0.1), new_storage(), timed=timed)
    train_some(pair, steps=12)


def test_tables_in_memory_beside_tiered_ones(new_storage: NewStorage) -> None:
    pair = Pair(tables(), td.Adam(lr=0.1), new_storage(), in_memory=["c"])
    train_some(pair)
    assert len(pair.tiered.group.config.slabs) == 3  # of 3 columns, and two of 4


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.long
def test_norms_of_gradients_sorted_table_by_table(lookups: int, new_storage: NewStorage) -> None:
    """Those of a lookup with very many ids; after two lookups they are sorted as one."""
    pair = Pair(
        [td.TableConfig(name, 1, initializer=UNIFORM) for name in ("a", "b")],
        td.SGD(lr=0.1),
        new_storage(),
        split=True,
        max_rows=1 << 17,
    )
    count = 36_000
    offsets = torch.arange(count + 1)
    for step in range(2):
        for module in pair.modules:
            for k in range(lookups):
                ids = torch.arange(count) * (1 - 2 * step) + step * count + 5 * k
                module({"a": (ids + 1, offsets), "b": (ids, offsets)}).sin().sum().backward()
            module.group.erase(0, torch.arange(0, 30_000, 7))  # b gets some of their rows
        pair.micro_batches()
        pair.step()


@pytest.mark.parametrize("trainable", [True, False])
def test_weights_of_ids_that_learn(trainable: bool, new_storage: NewStorage) -> None:
    """Their gradient reads rows in the backward."""
    bags = [
        td.DynamicEmbeddingBag(
            4,
            name="t",
            mode="sum",
            optimizer=td.Adam(lr=0.1),
            initializer=UNIFORM,
            trainable=trainable,
            max_rows=4096,
            storage=storage,
        )
        for storage in (None, new_storage())
    ]
    for step in range(8):
        ids = (torch.arange(45).reshape(15, 3) * (1 + step % 3) + 37 * step) % 300
        results = []
        for bag in bags:
            weights = torch.linspace(0.5, 1.5, 45).reshape(15, 3).requires_grad_()
            output = bag(ids, per_sample_weights=weights)
            output.sin().sum().backward()
            bag.optimizer.step()
            results.append((output.detach(), weights.grad))
        assert all(map(same_bits, *results))


# -- sequences -----------------------------------------------------------------------------------

BATCHES = st.builds(
    Batch, st.integers(0, 299), st.sampled_from([0, 1, 20, 40, 60]), st.sampled_from([0, 1, 3, 7])
)
CALLS = st.one_of(
    st.tuples(st.just("train"), BATCHES),
    st.tuples(st.just("train"), BATCHES),
    st.tuples(st.just("train, no step"), BATCHES),
    st.tuples(st.just("read"), BATCHES),
    st.tuples(st.just("forward alone"), BATCHES),
    st.tuples(st.just("prefetch"), BATCHES, st.integers(1, 3)),
    st.tuples(st.just("prefetch, train"), BATCHES, BATCHES),
    st.tuples(st.just("step")),
    st.tuples(st.just("erase"), BATCHES),
    st.tuples(st.just("assign"), BATCHES),
    st.tuples(st.just("remove"), st.sampled_from([0.8, 1.5])),
    st.tuples(st.just("compact")),
    st.tuples(st.just("read rows"), BATCHES),
    st.tuples(st.just("micro-batches"), BATCHES, BATCHES),
    st.tuples(st.just("two lookups"), BATCHES, BATCHES),
)


def run(pair: Pair, call: tuple[Any, ...]) -> None:
    split = pair.plain.group.config.split
    match call:
        case ("train", batch):
            pair.train(batch)
            pair.step()
        case ("train, no step", batch):
            pair.train(batch)
        case ("read", batch):
            pair.read(batch)
        case ("forward alone", batch):
            pair.forward(batch)
        case ("prefetch", batch, ahead):
            pair.prefetch(batch, ahead)
        case ("prefetch, train", batch, other):
            pair.prefetch(batch)
            pair.prefetch(batch)
            pair.train(other)
            pair.prefetch(batch, ahead=2)
            pair.step()
        case ("step",):
            pair.step()
        case ("erase", batch):
            pair.groups(lambda group: [group.erase(t, batch.ids()) for t in range(3)])
        case ("assign", batch):
            values = torch.linspace(-1, 1, 4 * batch.count).reshape(-1, 4)
            ids = batch.ids().unique()
            pair.groups(lambda group: group.insert_or_assign(2, ids, values[: len(ids)]))
        case ("remove", norm):
            pair.groups(lambda group: [group.remove(t, norm_below=norm) for t in range(3)])
        case ("compact",):
            pair.step()  # it is called between steps
            pair.compact()
        case ("read rows", batch):
            pair.groups(lambda group: group.read(0, batch.ids()))
        case ("micro-batches", batch, other) if split:
            pair.micro_batches(batch, other)
            pair.step()
        case ("two lookups", batch, other) if split:
            pair.train(batch, other)
            pair.step()


def check_sequence(pair: Pair, calls: list[tuple[Any, ...]]) -> None:
    for call in calls:
        run(pair, call)
    pair.check()
    pair.step()
    pair.train(Batch(0, 200, 1))
    pair.step()
    pair.check()


KINDS = {
    "plain": ({}, td.Adam(lr=0.1), {}),
    "split": ({}, td.Adam(lr=0.1), {"split": True}),
    "capacity": ({"policy": POLICIES["least frequent"]}, td.Adagrad(lr=0.1), {}),
    "split capacity": (
        {"policy": POLICIES["least recent"], "dtype": torch.bfloat16},
        td.RowWiseAdagrad(lr=0.1, stochastic_rounding=True),
        {"split": True, "mode": "mean"},
    ),
    "ttl": ({"policy": POLICIES["two scores"]}, td.SGD(lr=0.1), {"timed": True}),
}


def pair_of(kind: str, new_storage: NewStorage) -> Pair:
    of_tables, optimizer, arguments = KINDS[kind]
    return Pair(tables(**of_tables), optimizer, new_storage(), **arguments)


@pytest.mark.parametrize(("calls", "stale"), [(["erase", "assign"], 1), (["assign"], 0)])
def test_gradients_of_rows_that_got_another_id(
    calls: list[str], stale: int, new_storage: NewStorage
) -> None:
    pair = pair_of("split", new_storage)
    run(pair, ("train, no step", Batch(122, 1, 1)))
    for call in calls:
        run(pair, (call, Batch(122 if call == "erase" else 0, 1, 1)))
    pair.step()
    assert pair.plain.group.usage.stale_gradients() == stale
    assert pair.tiered.group.usage.stale_gradients() == stale
    pair.check()


@every_store
@pytest.mark.parametrize("kind", KINDS)
@given(calls=st.lists(CALLS, min_size=4, max_size=12))
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_sequences(kind: str, new_storage: NewStorage, calls: list[tuple[Any, ...]]) -> None:
    check_sequence(pair_of(kind, new_storage), calls)


@every_store
@pytest.mark.parametrize("kind", KINDS)
@given(calls=st.lists(CALLS, min_size=10, max_size=40))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.long
def test_long_sequences(kind: str, new_storage: NewStorage, calls: list[tuple[Any, ...]]) -> None:
    check_sequence(pair_of(kind, new_storage), calls)
