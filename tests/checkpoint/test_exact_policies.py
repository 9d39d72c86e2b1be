"""Whatever decides which ids stay: a loaded model trains on exactly as the one that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from seeding import seeded

import torch_dynemb as td
from torch_dynemb.ops.columns import Slab

pytestmark = pytest.mark.any_device

POLICIES = {
    "all": td.Policy(),
    "step": td.Policy(score="step", capacity=100),
    "few": td.Policy(score="step", capacity=60, protected_steps=3),
    "frequency": td.Policy(score="frequency", capacity=100),
    "time": td.Policy(score=("timestamp", "frequency"), capacity=100, ttl=4),
    "expiring": td.Policy(ttl=4),
    "growing": td.Policy(score="step", capacity=100, on_full="grow"),
    "default": td.Policy(capacity=100, on_full="default"),
    "counted": td.Policy(score="step", capacity=100, admission=td.AdmitFrequent(2)),
    "sketched": td.Policy(
        score="frequency", capacity=100, admission=td.AdmitFrequentSketch(2, memory=4096)
    ),
    "chance": td.Policy(score="frequency", capacity=100, admission=td.AdmitByChance(0.5)),
}
BATCH = 100


def model_of(names: tuple[str, ...], **options: Any) -> td.DynamicEmbeddingBagCollection:
    """Its seed, from which new rows and chances are drawn, is another one each time."""
    dims = (8, 4, 8)  # tables of one dim share their rows
    return td.DynamicEmbeddingBagCollection(
        [
            td.TableConfig(name, dim, policy=POLICIES[name])
            for name, dim in zip(names, dims, strict=False)
        ],
        optimizer=td.Adam(lr=0.1),
        **options,
    )


def train(model: td.DynamicEmbeddingBagCollection, steps: range) -> None:
    """Train steps with batches that depend only on their numbers; every other one erases ids."""
    group = model.group
    for step in steps:
        generator = seeded(step)
        ids = (torch.rand(len(group.names), BATCH, 1, generator=generator) ** 3 * 400).long() + 1
        output = model(dict(zip(group.names, ids, strict=True)))
        factors = torch.randn(output.shape, generator=generator)
        model.optimizer.zero_grad()
        (output * factors.to(output.device)).sum().backward()
        model.optimizer.step(now=1000 + step if group.config.keeps_time else None)
        if step % 2:
            for table, of_table in enumerate(ids):
                group.erase(table, of_table[:30, 0])


def files(folder: Path) -> dict[str, bytes]:
    return {"/".join(of.parts[-2:]): of.read_bytes() for of in folder.glob("*/*/*")}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("all", "step", "few"), {}),
        (("frequency", "time", "growing"), {}),
        (("default", "expiring", "counted"), {}),
        (("sketched", "chance"), {}),
        (("counted", "frequency", "all"), {"split": True}),
        (("step", "frequency"), {"memory_budget": "40KB"}),
        (("all", "step"), {"memory_budget": "40KB"}),
    ],
    ids=str,
)
def test_evictions_go_on_as_if_nothing_had_happened(
    tmp_path: Path, names: tuple[str, ...], options: dict[str, Any]
) -> None:
    model = model_of(names, **options)
    train(model, range(6))
    td.checkpoint.save(tmp_path / "half", model)
    other = model_of(names, **options)
    report = td.checkpoint.load(tmp_path / "half", other)
    assert all(table.exact and not table.fresh for table in report.tables.values())
    for trained, name in ((model, "one"), (other, "two")):
        train(trained, range(6, 13))
        td.checkpoint.save(tmp_path / name, trained)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    stats = [of.group.usage.tables(wait=True) for of in (model, other)]
    for name in names:
        assert stats[0][name] == stats[1][name]
    turnover = [s.evicted + s.rejected + s.not_admitted for s in stats[0].values()]
    assert any(turnover)


def test_given_scores_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def bag() -> td.DynamicEmbeddingBag:
        policy = td.Policy(score="custom", capacity=100)
        return td.DynamicEmbeddingBag(8, mode="sum", optimizer=td.SGD(lr=0.1), policy=policy)

    def steps(model: td.DynamicEmbeddingBag, numbers: range) -> None:
        for step in numbers:
            ids = torch.randint(400, (BATCH, 1), generator=seeded(step))
            scores = torch.randint(1000, (BATCH, 1), generator=seeded(step))
            model(ids, scores=scores).sum().backward()
            model.optimizer.step()

    model = bag()
    steps(model, range(6))
    td.checkpoint.save(tmp_path / "half", model)
    other = bag()
    td.checkpoint.load(tmp_path / "half", other)
    for trained, name in ((model, "one"), (other, "two")):
        steps(trained, range(6, 13))
        td.checkpoint.save(tmp_path / name, trained)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert model.group.usage.tables(wait=True)[model.group.names[0]].evicted > 0


def test_ids_on_rows_that_others_had_before_a_load_begin_anew(tmp_path: Path) -> None:
    """Their handles are newer than those of earlier owners of the rows and of the checkpoint."""
    saved, filled, empty = (model_of(("all", "counted", "step"), max_rows=2000) for _ in range(3))
    train(saved, range(2))
    assert saved.group.index.slabs[:, Slab.FREE_COUNT].min() > 0
    td.checkpoint.save(tmp_path / "saved", saved)
    train(filled, range(2, 8))
    for model in (filled, empty):
        assert td.checkpoint.load(tmp_path / "saved", model).tables["all"].exact
    new = torch.arange(1000, 1090)
    for model in (filled, empty):
        model.group.insert_or_assign(2, new[:10], torch.ones(10, 8))
        for table in (0, 2):
            model.group.insert(table, new)
    for table in (0, 2):
        assert torch.equal(filled.group.read(table, new), empty.group.read(table, new))
    state = filled.state_dict()
    empty.load_state_dict(state)
    assert torch.equal(filled.group.read(0, new), empty.group.read(0, new))
