"""Saves beside a thread that trains are refused; the thread goes on, the last checkpoint stays."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_dynemb as td
from torch_dynemb.files.disk import Disk
from torch_dynemb.table.undisturbed import Undisturbed

pytestmark = pytest.mark.cpu_only("threads of the CPU")

saving: Any = sys.modules["torch_dynemb.checkpoint.saving.save"]
REFUSED = r"checkpoint.save: another thread trains or changes tables \['ads'\]"
IDS = torch.arange(50)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ads = td.DynamicEmbedding(4, name="ads", optimizer=td.SGD(lr=1.0))
        self.dense = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.dense(self.ads(ids))
        return result

    def step(self) -> None:
        self(IDS).sum().backward()
        self.ads.optimizer.step()


def in_another_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class DiskBesideTraining(Disk):
    """A disk that runs a function in another thread when the first file is created."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def create(self, path: Path) -> int:
        work, self._work = self._work, lambda: None
        in_another_thread(work)
        return super().create(path)


def dense_step(model: Model) -> None:
    with torch.no_grad():
        model.dense.weight.add_(1)


CHANGES = {
    "a step": Model.step,
    "new ids": lambda model: model.ads.group.insert(0, torch.arange(1000, 1100)),
    "removed ids": lambda model: model.ads.group.erase(0, IDS[:5]),
    "dense": dense_step,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_save_that_is_disturbed_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    model.step()
    path = tmp_path / "last"
    td.checkpoint.save(path, model)
    before = td.checkpoint.open(path).uuid
    monkeypatch.setattr(saving, "_DISK", DiskBesideTraining(lambda: CHANGES[change](model)))
    with pytest.raises(RuntimeError, match=REFUSED):
        td.checkpoint.save(path, model)
    assert td.checkpoint.open(path).uuid == before
    model.step()  # the training thread continues
    td.checkpoint.save(path, model)
    assert td.checkpoint.open(path).uuid != before


def test_a_snapshot_that_is_disturbed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = td.SSDStore(tmp_path, cache="100 rows", segment="64KiB")
    model = td.DynamicEmbedding(4, name="ads", optimizer=td.SGD(lr=1.0), storage=storage)

    def step() -> None:
        model(IDS).sum().backward()
        model.optimizer.step()

    step()
    td.checkpoint.save_snapshot(model, "one")
    snapshots: Any = sys.modules["torch_dynemb.checkpoint.snapshots.save"]
    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "_DISK", DiskBesideTraining(step))
        with pytest.raises(RuntimeError, match="save_snapshot: another thread trains"):
            td.checkpoint.save_snapshot(model, "two")
    assert td.checkpoint.snapshots(model) == ["one"]
    step()
    td.checkpoint.save_snapshot(model, "two")
    expected = model.eval()(IDS)
    model.train()
    step()
    td.checkpoint.load_snapshot(model)
    assert torch.equal(model.eval()(IDS), expected)


def test_a_copy_that_is_disturbed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    model.step()
    pin, work = saving.pin_rows, [model.step]

    def disturbed(groups: Any) -> None:
        if work:
            in_another_thread(work.pop())
        pin(groups)

    monkeypatch.setattr(saving, "pin_rows", disturbed)
    with pytest.raises(RuntimeError, match=REFUSED):
        td.checkpoint.save(tmp_path / "last", model, asynchronous=True)
    handle = td.checkpoint.save(tmp_path / "last", model, asynchronous=True)
    model.step()  # rows are kept as they were
    handle.wait()


def test_changes_after_the_last_check_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    td.checkpoint.record_changes(model)
    model.step()
    write = saving.write_checkpoint

    def then_train(*arguments: Any) -> None:
        write(*arguments)
        in_another_thread(model.step)

    with monkeypatch.context() as patched:
        patched.setattr(saving, "write_checkpoint", then_train)
        td.checkpoint.save(tmp_path / "base", model)
    with pytest.raises(RuntimeError, match="are known since no checkpoint"):
        td.checkpoint.save(tmp_path / "delta", model, since=tmp_path / "base")


def test_a_reader_is_refused_in_the_middle_of_a_call() -> None:
    """Until it meets one: a thread that only ever inserts has the table nearly always."""
    model = Model()
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            model.ads.group.insert(0, torch.arange(100_000))
            model.ads.group.erase(0, torch.arange(100_000))

    def read_until_refused() -> None:
        while True:
            with Undisturbed("read", [model.ads.group]):
                pass

    thread = threading.Thread(target=change)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"read: another thread trains .* \['ads'\]"):
            read_until_refused()
    finally:
        done.set()
        thread.join()
    with Undisturbed("read", [model.ads.group]) as reading:
        reading.check()
