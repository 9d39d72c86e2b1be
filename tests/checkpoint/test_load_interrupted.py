"""An error or Ctrl-C in any load leaves what there was, and a second load gives what a first does.

Loads of checkpoints into the same group and another one, migration, followers that train, and
tables that are gathered. TorchRec's state dicts are in ``test_sharded_load_interrupted``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from failed_loads import WAYS, Load, check_failing_load, same
from table_content import content
from whole_model import WholeModel, make, save_trained, whole_state

import torch_dynemb as td
from torch_dynemb import checkpoint, migrate, serving
from torch_dynemb.delta_log import DeltaLog, follow
from torch_dynemb.ops.columns import Table
from torch_dynemb.rows.loader import RowLoader
from torch_dynemb.table.content import read_counts

pytestmark = pytest.mark.any_device


def of_checkpoint(folder: Path, kind: str) -> Load:
    path = save_trained(folder / "saved")
    return Load(lambda: make(kind), lambda model: checkpoint.load(path, model), whole_state)


def of_migration(folder: Path) -> Load:
    ids = torch.arange(30) * 3
    rows = torch.arange(120.0).view(30, 4)
    state = {"exp_avg": rows / 8, "exp_avg_sq": rows / 4, "step": ids.int()}
    scored = migrate.read_tensors(ids, rows, state=state, scores={"frequency": ids + 1})
    sources = {
        "tables.scored": scored,
        "tables.counted": migrate.read_tensors(ids, rows + 1),
        "bag": migrate.read_tensors(ids, -rows),
    }

    def load(model: WholeModel) -> object:
        return migrate.load(model, sources, replace=True, batch_size=8)

    return Load(lambda: make("filled"), load, whole_state)


def of_follower(folder: Path) -> Load:
    def new() -> td.DynamicEmbeddingBagCollection:
        configs = [
            td.TableConfig("plain", 4),
            td.TableConfig(
                "counted",
                4,
                policy=td.Policy(score="custom", capacity=30, admission=td.AdmitFrequent(2)),
            ),
        ]
        torch.manual_seed(3)
        return td.DynamicEmbeddingBagCollection(configs, optimizer=td.Adam(lr=0.1), max_rows=80)

    def train(model: td.DynamicEmbeddingBagCollection, step: int) -> None:
        model.group.scores.set_batch(1, 100 + step)
        ids = (torch.arange(16) % 9 + 3 * step).view(8, 2).to(model.group.device)
        model({"plain": ids, "counted": ids}).square().sum().backward()
        model.optimizer.step()
        model.group.erase(0, ids[0])

    published = new()
    log = DeltaLog(folder / "log", optimizer_state=True)
    train(published, 0)
    log.attach(published)
    train(published, 2)
    log.publish()
    log.close()

    def load_base() -> td.DynamicEmbeddingBagCollection:
        model = new()
        checkpoint.load(folder / "log" / "base", model)
        return model

    def seen(model: td.DynamicEmbeddingBagCollection) -> Any:
        group = model.group
        counted = read_counts(group.tables, 1)
        exported = next(group.export(1))
        scores = sorted(zip(exported.ids.tolist(), exported.scores.tolist(), strict=True))
        return content(model), counted, scores, group.rows.row_clock[:2].tolist()

    def done(now: Any, after: Any) -> bool:  # but for counts of ids that have a row by then
        return same((now[0], now[2:]), (after[0], after[2:]))

    return Load(load_base, lambda model: follow(folder / "log", model).update(), seen, done)


def of_gathering(folder: Path) -> Load:
    """The model that is gathered stays; the copy is there whole, or not at all."""

    def new() -> list[Any]:
        return [make("filled")]

    def load(models: list[Any]) -> None:
        frozen = serving.freeze(models[0].bag)
        models.append(frozen)

    def seen(models: list[Any]) -> Any:
        found = [whole_state(models[0])]
        ids = torch.arange(60, device=models[0].bag.group.device).view(30, 2)
        return found + [frozen(ids).clone() for frozen in models[1:]]

    return Load(new, load, seen)


LOADS = {
    "checkpoint, same group": lambda folder: of_checkpoint(folder, "filled"),
    "checkpoint, other group": lambda folder: of_checkpoint(folder, "filled and other"),
    "migration": of_migration,
    "follower": of_follower,
    "gathering": of_gathering,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOADS)
def test_a_load_that_fails_changes_nothing(name: str, way: str, tmp_path: Path) -> None:
    check_failing_load(LOADS[name](tmp_path), way, points=5)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOADS)
def test_a_load_that_fails_anywhere_changes_nothing(name: str, way: str, tmp_path: Path) -> None:
    check_failing_load(LOADS[name](tmp_path), way, points=200)


@pytest.mark.parametrize("name", ["checkpoint, same group", "migration"])
def test_without_memory_for_both_a_failure_leaves_the_old_or_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowLoader, "_has_room_for_both", lambda _: False)
    load = LOADS[name](tmp_path)
    before = load.seen(load.make())

    def empty(state: dict[str, Any]) -> bool:
        """Each table by itself."""
        entries = ["tables.tables", "bag.tables"]
        now, then = (
            torch.cat([of[entry][:, Table.SIZE] for entry in entries]) for of in (state, before)
        )
        return bool(((now == 0) | (now == then)).all())

    check_failing_load(load, "an error", points=8, empty=empty)
