"""Background saves that fail: the error is raised once, and training can continue."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from held_disk import HeldDisk, files_of, full, held_disk
from interrupting import ctrl_c_raises
from saved_models import Net, contents, differences, train
from torch import nn

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.files.disk import Disk
from torch_dynemb.table.background import BackgroundWork

pytestmark = pytest.mark.any_device


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    with held_disk(monkeypatch) as held:
        yield held


def failed(path: Path, model: Any, disk: HeldDisk) -> checkpoint.SaveHandle:
    """Return a save that failed on a full disk, with an error that was not raised yet."""
    handle = checkpoint.save(path, model, asynchronous=True)
    disk.let_go(full())
    assert handle._ended.wait(60)
    return handle


def test_wait_raises_it_and_then_no_step(tmp_path: Path, disk: HeldDisk) -> None:
    model = Net()
    train(model, range(2))
    handle = failed(tmp_path / "c", model, disk)
    assert handle.done()
    for _ in range(2):  # the handle raises it each time
        with pytest.raises(OSError, match="No space left on device") as raised:
            handle.wait()
        assert "in create" in str(raised.value.__cause__)  # where it was raised, in the thread
    train(model, range(2, 4))
    disk.error = None
    checkpoint.save(tmp_path / "c", model).wait()


def state_of(model: Net) -> Any:
    return {name: table._asdict() for name, table in contents(model).items()}


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_the_next_step_raises_it_and_does_nothing(
    tmp_path: Path, disk: HeldDisk, split: bool
) -> None:
    model = Net(split=split)
    train(model, range(2))
    twin = copy.deepcopy(model)
    failed(tmp_path / "c", model, disk)
    ids = {name: torch.arange(8)[None] for name in model.features.group.names}
    for net in (model, twin):
        net.features(ids).sum().backward()
        net.user(torch.arange(1, 9)).sum().backward()
    before, steps = state_of(model), model.features.group.steps
    with pytest.raises(ValueError, match="expected at least 0"):  # which is looked at before
        model.features.optimizer.step(now=-1)
    with pytest.raises(RuntimeError, match=r"/c has failed .*no step was made.*No space") as raised:
        model.features.optimizer.step(now=200)
    assert isinstance(raised.value.__cause__, OSError)
    assert differences(before, state_of(model)) == []
    assert model.features.group.steps == steps
    for net in (model, twin):
        net.features.optimizer.step(now=200)
        net.user.optimizer.step()
    assert differences(state_of(model), state_of(twin)) == []
    disk.error = None
    checkpoint.save(tmp_path / "c", model)  # the error was raised already


def test_any_table_of_the_model_raises_it_once(tmp_path: Path, disk: HeldDisk) -> None:
    model = Net()
    train(model, range(2))
    failed(tmp_path / "c", model, disk)
    with pytest.raises(RuntimeError, match="no step was made"):
        model.user.optimizer.step()
    train(model, range(2, 4))


def test_other_tables_do_not_tell_it(tmp_path: Path, disk: HeldDisk) -> None:
    model, other = Net(), Net(seed=1)
    failed(tmp_path / "c", model, disk)
    train(other, range(2))
    with pytest.raises(RuntimeError, match="no step was made"):
        model.user.optimizer.step()


@pytest.mark.parametrize("call", ["save", "asynchronous", "load"])
def test_else_the_next_save_or_load_raises_it(tmp_path: Path, disk: HeldDisk, call: str) -> None:
    model = Net()
    train(model, range(2))
    failed(tmp_path / "c", model, disk)
    disk.error = None

    def next_call() -> object:
        if call == "load":
            return checkpoint.load(tmp_path / "d", model)
        return checkpoint.save(tmp_path / "d", model, asynchronous=call == "asynchronous")

    with pytest.raises(RuntimeError, match=r"/c has failed .*nothing was done now.*No space"):
        next_call()
    assert not (tmp_path / "d").exists()
    checkpoint.save(tmp_path / "d", model).wait()
    next_call()
    train(model, range(2, 4))


def changed_optimizer(model: Net) -> None:
    model.user.set_optimizer(td.SGD(lr=0.1))


def with_a_table(model: Net) -> None:
    model.features.add_table(td.TableConfig("new", 4))


@pytest.mark.parametrize("change", [changed_optimizer, with_a_table])
def test_tables_that_were_made_anew_tell_it(tmp_path: Path, disk: HeldDisk, change: Any) -> None:
    model = Net()
    train(model, range(2))
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    change(model)
    disk.let_go(full())
    assert handle._ended.wait(60)
    module = model.user if change is changed_optimizer else model.features
    with pytest.raises(RuntimeError, match="no step was made"):
        module.optimizer.step()
    module.optimizer.step()


def test_copies_of_a_model_know_nothing_of_it(tmp_path: Path, disk: HeldDisk) -> None:
    model = Net()
    train(model, range(2))
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    disk.let_go(full())
    assert handle._ended.wait(60)
    twins += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        train(twin, range(2, 3))
        assert differences(contents(twin), contents(twins[0])) == []
    with pytest.raises(OSError, match="No space"):
        handle.wait()


@pytest.mark.long
def test_an_error_that_nobody_was_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    work, told = BackgroundWork("the asynchronous checkpoint a"), BackgroundWork("b")
    for of in (work, told):
        of.fail(ValueError("broken"))
    assert isinstance(told.error(), ValueError)
    assert told.unreported_error() is None
    with caplog.at_level(logging.ERROR, "torch_dynemb"):
        del work, told, of
        gc.collect()
    (record,) = caplog.records
    assert "the asynchronous checkpoint a has failed" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


# -- interrupts and forks ------------------------------------------------------------------------


class InterruptingDisk(HeldDisk):
    """Presses Ctrl-C as soon as the test says so, and then waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def create(self, path: Path) -> int:
        if not self.reached.is_set():
            self.reached.set()
            assert self.waits.wait(60)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
        return super().create(path)


def test_ctrl_c_ends_the_wait_and_not_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    train(model, range(2))
    with held_disk(monkeypatch, InterruptingDisk()) as disk, ctrl_c_raises():
        assert isinstance(disk, InterruptingDisk)
        handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)

        def wait() -> None:
            disk.waits.set()
            handle.wait()

        with pytest.raises(KeyboardInterrupt):
            wait()
        assert not handle.done()
        train(model, range(2, 3))
        disk.let_go()
        handle.wait()
    assert handle.done()
    assert "manifest.json" in files_of(tmp_path / "c")
    checkpoint.load(tmp_path / "c", Net())


def test_a_forked_process_does_not_wait_for_a_thread_it_has_not(
    tmp_path: Path, disk: HeldDisk
) -> None:
    model = torch.nn.Linear(2, 2)
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            handle.wait()
        except RuntimeError as error:
            code = 7 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    disk.let_go()
    handle.wait()


@pytest.mark.long
def test_who_has_waited_for_an_error_can_let_go_of_the_model(tmp_path: Path) -> None:
    """The error has the frames through which it was raised, and they have the model."""

    def fail_to_save() -> weakref.ref[nn.Module]:
        model = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), max_rows=64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Disk, "create", _fails)
            handle = checkpoint.save(tmp_path / "other", model, asynchronous=True)
            with pytest.raises(OSError, match="no disk"):
                handle.wait()
        return weakref.ref(model)

    gone = fail_to_save()
    gc.collect()
    assert gone() is None


def _fails(disk: Disk, path: Path) -> int:
    raise OSError("no disk")
