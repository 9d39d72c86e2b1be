"""Losses and searches under torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("compilers and their view of ops")

DIM = 6


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TwoTowers(nn.Module):
    """Users against items."""

    def __init__(self, negatives: Any, *, split: bool = False) -> None:
        super().__init__()
        policy = td.Policy(score="frequency")
        optimizer = td.Adam(lr=0.1)
        self.users = td.DynamicEmbedding(DIM, name="users", optimizer=optimizer, split=split)
        self.items = td.DynamicEmbedding(
            DIM, name="items", optimizer=optimizer, policy=policy, split=split
        )
        self.loss = td.SampledSoftmaxLoss(self.items, negatives=negatives)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        result: Tensor = self.loss(self.users(users), items)
        return result


def trained(model: TwoTowers, function: Any, steps: int = 3) -> list[float]:
    """Losses of some steps, after one that is eager."""
    values = []
    for step in range(steps + 1):
        torch.manual_seed(step)
        users = torch.randint(0, 20, (8,), generator=seeded(step))
        items = torch.randint(0, 50, (8,), generator=seeded(100 + step))
        value = (function if step > 0 else model)(users, items)
        value.backward()
        for table in (model.users, model.items):
            table.optimizer.step()
        values.append(float(value.detach()))
    return values


UNIFORM, FREQUENCY = td.UniformNegatives(5), td.FrequencyNegatives(5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "negatives"),
    [
        ("eager", (UNIFORM, td.InBatchNegatives(), FREQUENCY)),
        # of two draws, Inductor may make the second one first
        *(("inductor", (of, td.InBatchNegatives())) for of in (UNIFORM, FREQUENCY)),
    ],
)
def test_a_compiled_loss_trains_as_an_eager_one(backend: str, negatives: Any) -> None:
    # eager numbers of torch's generator, also in compiled code
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(7)
        eager = TwoTowers(negatives)
        expected = trained(eager, eager)
        torch.manual_seed(7)
        model = TwoTowers(negatives)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        torch.testing.assert_close(trained(model, compiled), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.items.ids(), eager.items.ids())
    ids = model.items.ids()
    rows = [one.items.group.read(0, ids) for one in (model, eager)]
    torch.testing.assert_close(*rows, rtol=1e-3, atol=1e-4)


def test_samples_are_part_of_compiled_code() -> None:
    group = td.TableGroup([td.TableConfig("items", 4)], optimizer=td.SGD(lr=0.1))
    group.insert(0, torch.arange(5))
    compiled = torch.compile(lambda: group.sample_ids(0, 100), fullgraph=True, backend="aot_eager")
    for size in (5, 50):
        group.insert(0, torch.arange(size))
        ids, log_probabilities = compiled()
        assert ids.unique().numel() > 0.8 * min(size, 100)
        torch.testing.assert_close(log_probabilities.exp(), torch.full((100,), 1 / size))


def test_counts_are_summed_outside_of_compiled_code() -> None:
    model = TwoTowers(td.InBatchNegatives())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"counted.*run one training step without torch\.compile"):
        compiled(torch.arange(3), torch.arange(3))


class Retriever(nn.Module):
    """Results for users that have not seen them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 4)
        self.items = td.DynamicEmbedding(4, name="items", optimizer=td.SGD(lr=0.1))
        ids = torch.arange(500) * 3
        self.items.group.insert_or_assign(0, ids, torch.randn(500, 4, generator=seeded(1)))

    def forward(self, features: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        found = td.top_k(self.tower(features), self.items, 7, exclude=seen)
        return found.ids, found.scores


def inputs_of(n: int) -> tuple[Tensor, Tensor]:
    features = torch.randn(n, 3, generator=seeded(n))
    return features, torch.randint(0, 1500, (n, 4), generator=seeded(n))


@pytest.mark.parametrize("rows", [None, "int8"])
def test_a_search_is_exported_with_its_table(rows: Any) -> None:
    model = Retriever()
    frozen = td.freeze(model, rows=rows)
    batch = torch.export.Dim("batch")
    shapes = ({0: batch}, {0: batch})
    program = torch.export.export(frozen, inputs_of(5), dynamic_shapes=shapes).module()
    for n in (1, 5, 9):
        ids, scores = program(*inputs_of(n))
        expected_ids, expected_scores = frozen(*inputs_of(n))
        torch.testing.assert_close(scores, expected_scores)
        assert torch.equal(ids, expected_ids)


def check_updates(program: Any, served: Any, frozen: Any) -> None:
    """A program gives what a frozen copy gives, then what updates make of it."""
    for n in (2, 9):
        ids, scores = program(*inputs_of(n))
        expected_ids, expected_scores = frozen(*inputs_of(n))
        torch.testing.assert_close(scores, expected_scores)
        assert torch.equal(ids, expected_ids)
    features, seen = inputs_of(2)
    best = frozen.tower(features)[0] * 100
    best_ids = torch.tensor([-9, *range(5000, 5300)])
    rows = torch.zeros(len(best_ids), 4)
    rows[0] = best
    gone = frozen(features, seen)[0][0, :3]
    served.apply("items.items", best_ids, rows, erased=gone)
    ids, _ = program(features, seen)
    assert int(ids[0, 0]) == -9
    assert not bool(torch.isin(ids, gone).any())


class AsServed:
    """A live model with the calls of a package."""

    def __init__(self, live: nn.Module) -> None:
        self.tables = live.items.frozen_tables

    def apply(self, name: str, ids: Tensor, rows: Tensor, erased: Tensor) -> None:
        self.tables.update(name.rpartition(".")[2], ids, rows, erased=erased)


def test_exported_searches_read_updates() -> None:
    frozen = td.freeze(Retriever())
    live = td.serving.live(frozen, headroom=400)
    batch = torch.export.Dim("batch")
    program = torch.export.export(live, inputs_of(5), dynamic_shapes=({0: batch}, {0: batch}))
    check_updates(program.module(), AsServed(live), frozen)


@pytest.mark.long
def test_a_search_is_served_by_a_package(tmp_path: Path) -> None:
    frozen = td.freeze(Retriever())
    batch = torch.export.Dim("batch")
    shapes = ({0: batch}, {0: batch})
    td.serving.export(frozen, tmp_path / "items", inputs_of(5), dynamic_shapes=shapes, headroom=400)
    with td.serving.load(tmp_path / "items") as served:
        check_updates(served.run, served, frozen)


def test_all_items_are_listed_between_graphs() -> None:
    items = td.DynamicEmbedding(DIM, name="items", optimizer=td.SGD(lr=0.1))
    loss, ids = td.FullSoftmaxLoss(items), torch.arange(3)
    query = torch.randn(3, DIM, generator=seeded(2))
    expected = loss(query, ids)
    compiled = torch.compile(lambda query: 2 * loss(query, ids), backend="eager")
    torch.testing.assert_close(compiled(query), 2 * expected)
    whole = torch.compile(lambda query: loss(query, ids), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"lists all ids.*leave fullgraph=True out"):
        whole(query)
