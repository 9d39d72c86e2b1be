"""Publishes beside a thread that trains: refused, or right, and nothing is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dynemb as td
from torch_dynemb.changes import changed_parts
from torch_dynemb.checkpoint import load
from torch_dynemb.delta_log import DeltaLog, follow, new_base, recorded
from torch_dynemb.delta_log import log as log_module

pytestmark = pytest.mark.cpu_only("threads of the CPU")

IDS = torch.arange(50)
REFUSED = r"DeltaLog.publish: another thread trains or changes tables \['ads'\]"


def make() -> td.DynamicEmbedding:
    options: dict[str, Any] = {"optimizer": td.SGD(lr=1.0), "eval_default": "zeros"}
    return td.DynamicEmbedding(4, name="ads", **options)


def step(model: td.DynamicEmbedding) -> None:
    model(IDS).sum().backward()
    model.optimizer.step()


def beside(call: Callable[..., Any], work: Callable[[], object], *, late: bool) -> Any:
    """The call, during which another thread does something, once."""
    todo = [work]

    def disturbed(*args: Any, **options: Any) -> Any:
        result = call(*args, **options) if late else None
        while todo:
            thread = threading.Thread(target=todo.pop())
            thread.start()
            thread.join()
        return result if late else call(*args, **options)

    return disturbed


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["read_changes", "copy_rows", "take_changes"])
def test_what_another_thread_changes_meanwhile_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, late: bool
) -> None:
    model, copy = make(), make()
    step(model)
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    load(tmp_path / "log" / "base", copy)
    follower = follow(tmp_path / "log", copy)
    step(model)
    with monkeypatch.context() as patch:
        module = changed_parts if name == "copy_rows" else recorded
        call = getattr(module, name)
        patch.setattr(module, name, beside(call, lambda: step(model), late=late))
        before = model.group.read(0, IDS)
        if name == "take_changes":  # what was read is whole
            assert log.publish() == 1
            log.flush()
            follower.update()
            assert torch.equal(copy.group.read(0, IDS), before)
        else:
            with pytest.raises(RuntimeError, match=REFUSED):
                log.publish()
            assert log.sequence == 0
    log.publish()
    log.close()
    follower.update()
    assert torch.equal(copy.group.read(0, IDS), model.group.read(0, IDS))


def test_a_log_does_not_begin_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    step(model)
    log = DeltaLog(tmp_path / "log")
    with monkeypatch.context() as patch:
        save = log_module.save
        patch.setattr(log_module, "save", beside(save, lambda: step(model), late=True))
        with pytest.raises(RuntimeError, match=r"DeltaLog.attach: another thread trains"):
            log.attach(model)
        with pytest.raises(RuntimeError, match="the log has no model"):
            log.publish()
    log.attach(model)
    with monkeypatch.context() as patch:
        save = new_base.save
        patch.setattr(new_base, "save", beside(save, lambda: step(model), late=False))
        with pytest.raises(RuntimeError, match="another thread trains or changes"):
            log.save()
    assert [path.name for path in (tmp_path / "log").glob("base*")] == ["base"]
    assert log.save() == 2
    log.close()
    copy = make()
    assert td.delta_log.replay(tmp_path / "log", copy) == 3
    assert torch.equal(copy.group.read(0, IDS), model.group.read(0, IDS))


def test_one_thread_publishes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    errors = []

    def publish() -> None:
        for call in (log.publish, log.flush, log.save, log.close):
            with pytest.raises(RuntimeError, match="another thread is calling the log") as error:
                call()
            errors.append(error)

    read = recorded.read_changes
    monkeypatch.setattr(recorded, "read_changes", beside(read, publish, late=False))
    assert log.publish() == 1
    assert len(errors) == 4
    log.close()


def test_a_forked_child_does_not_publish(tmp_path: Path) -> None:
    model = make()
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    log.publish()
    child = os.fork()
    if child == 0:
        try:
            log.publish()
        except RuntimeError as error:
            log.close()  # and leaves the log to its parent
            os._exit(17 if "is a fork of the one that publishes" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    with pytest.raises(RuntimeError, match=f"has a writer, process {os.getpid()}"):
        DeltaLog(tmp_path / "log").attach(make())
    assert log.publish() == 2
    log.close()
