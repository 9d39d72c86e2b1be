"""Changes of rows beneath a cache of a GPU: increments, delta logs, saves in the background."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_groups import emulated_cuda
from execution import threads
from group_calls import same_bits
from tiered_pairs import Batch, Pair

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log
from torch_dynemb.table import changes

pytestmark = pytest.mark.own_device

UNIFORM = td.Uniform(-1.0, 1.0)
ALL = torch.arange(300)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def cached(rows: int = 40) -> td.HostStore:
    return td.HostStore(cache=f"{rows} rows")


def new_pair(**arguments: Any) -> Pair:
    tables = [td.TableConfig(name, 4, initializer=UNIFORM) for name in "ab"]
    return Pair(tables, td.Adam(lr=0.1), cached(), **arguments)


def new_table(storage: Any = None) -> td.DynamicEmbedding:
    return td.DynamicEmbedding(
        *(4,), name="t", optimizer=td.Adam(lr=0.1), storage=storage, max_rows=1000
    )


def train(table: td.DynamicEmbedding, first: int, steps: int = 3) -> None:
    for step in range(first, first + steps):
        table(torch.arange(60 * step, 60 * step + 100) % 250).sin().sum().backward()
        table.optimizer.step()


def content(table: td.DynamicEmbedding) -> list[torch.Tensor]:
    known = ALL[table.group.contains(0, ALL)]
    return [known, table.group.read(0, known)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.shape == y.shape and same_bits(x, y) for x, y in zip(a, b, strict=True))


def check_changes(pair: Pair, name: str) -> None:
    """Both groups name the same ids with the same rows, and then take them."""
    found = []
    for module in pair.modules:
        tables = module.group.tables
        reader = changes.reader_of(tables, name)
        assert reader is not None
        taken = changes.read_changes(tables, reader)
        of_tables = []
        for table, changed in enumerate(taken.tables):
            rows = changes.copy_rows(tables, table, changed, state=True, scores=[])
            order = rows.ids.argsort()
            tensors = [rows.ids, rows.rows, *rows.state.values()]
            of_tables += [tensor[order] for tensor in tensors] + [changed.removed.sort().values]
        changes.take_changes(tables, reader, taken, since="x")
        found.append(of_tables)
    assert same(*found)


def test_changes_are_those_of_rows_in_hbm() -> None:
    """Rows carry their dirty bits into slots, out of them, and at home."""
    with emulated_cuda():
        pair = new_pair()
        pair.train(Batch(0, 60, 1))
        pair.step()
        for module in pair.modules:
            for name in ("one", "other"):
                changes.record_changes(module.group.tables, name, scores=False)
        for step in range(6):
            pair.prefetch(Batch(31 * step, 20, 1))
            pair.train(Batch(37 * step, 60, 1 + step % 3))
            pair.step()
            check_changes(pair, "one")
            pair.read(Batch(90 * step, 60, 1))  # takes slots, and changes no row
            if step == 2:
                pair.groups(lambda group: [group.erase(t, ALL[:40]) for t in range(2)])
                values = torch.linspace(-1, 1, 80).reshape(20, 4)
                pair.groups(lambda group, v=values: group.insert_or_assign(0, ALL[30:50], v))
                check_changes(pair, "other")
        check_changes(pair, "other")
        check_changes(pair, "one")


def test_increments(tmp_path: Path) -> None:
    with emulated_cuda():
        table = new_table(cached())
        checkpoint.record_changes(table)
        train(table, 0)
        checkpoint.save(tmp_path / "base", table)
        train(table, 3, 1)
        table.group.erase(0, ALL[:10])
        checkpoint.save(tmp_path / "more", table, since=tmp_path / "base")
        checkpoint.merge([tmp_path / "base", tmp_path / "more"], tmp_path / "whole")
        for storage in (cached(), None):
            loaded = new_table(storage)
            checkpoint.load(tmp_path / "whole", loaded)
            assert same(content(loaded), content(table))


@pytest.mark.parametrize("resume", [False, True])
def test_delta_logs(resume: bool, tmp_path: Path) -> None:
    with emulated_cuda():
        table, other = new_table(cached()), new_table(cached(60))
        train(table, 0)
        log = delta_log.DeltaLog(tmp_path / "log", resume=resume)
        log.attach(table)
        for step in range(3, 6):
            train(table, step, 1)
            assert log.publish() == step - 2
        log.close()
        (delta_log.resume if resume else delta_log.replay)(tmp_path / "log", other)
        assert same(content(other), content(table))


def test_a_save_in_the_background_has_the_rows_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_cuda():
        table, loaded = new_table(cached()), new_table(cached())
        train(table, 0)
        table.group.insert(0, torch.arange(260, 300))  # without a value yet
        before = content(table)
        handle = checkpoint.save(tmp_path / "a", table, asynchronous=True)
        train(table, 3)
        handle.wait()
        checkpoint.load(tmp_path / "a", loaded)
        assert same(content(loaded), before)
        assert not same(content(table), before)
        monkeypatch.setattr(td.ops, "available_memory", lambda: 1 << 20)
        with pytest.raises(td.errors.HostMemoryError, match=r"asynchronous=True needs \d+ bytes"):
            checkpoint.save(tmp_path / "b", table, asynchronous=True)
        assert not (tmp_path / "b").exists()
