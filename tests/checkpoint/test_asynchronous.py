"""Saves that go on while training does: what they write is what there was when they began."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from held_disk import HeldDisk, files_of, give_disk, held_disk
from saved_models import Net, contents, differences, train
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import checkpoint, ops
from torch_dynemb.checkpoint.saving import staging
from torch_dynemb.files import direct_disk
from torch_dynemb.ops import functional_copies
from torch_dynemb.ops.columns import CopyOnWrite
from torch_dynemb.table.state import used_tensors

pytestmark = pytest.mark.any_device


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where code changes copies of rows, saves copy them: no test decides that for another."""
    monkeypatch.setattr(functional_copies, "_rows_copied", False)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    with held_disk(monkeypatch) as held:
        yield held


def stopped(path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """Return the files of a save without training meanwhile."""
    with monkeypatch.context() as patched:
        give_disk(patched)
        checkpoint.save(path, model, **more)
    return files_of(path)


KINDS: dict[str, dict[str, Any]] = {
    "fused": {},
    "split": {"split": True, "optimizer": td.RowWiseAdagrad(lr=0.1)},
    "bf16": {"dtype": torch.bfloat16, "optimizer": td.Adam(lr=0.05, state_dtype=torch.uint8)},
    "row steps": {"optimizer": td.Adam(lr=0.05, row_steps=True)},
    "budget": {"policies": {"plain": td.Policy(score="frequency", capacity=60)}},
}


@pytest.mark.parametrize("least", [1, 4 << 20], ids=["large", "small"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, kind: str, least: int
) -> None:
    """Ids that come, are counted, evicted and erased meanwhile are not in it."""
    monkeypatch.setattr(staging, "_HUGE_FROM", least)
    monkeypatch.setattr(direct_disk, "WINDOW_BYTES", max(4096, least))
    model = Net(**KINDS[kind])
    train(model, range(6))
    twin = copy.deepcopy(model)
    for net in (model, twin):
        # untrained rows: they get their initial values when they are read
        net.features({name: torch.arange(900, 950)[None] for name in net.features.feature_names})
        net.user(torch.arange(900, 950))
    expected = stopped(tmp_path / "stopped", twin, monkeypatch)
    threads = torch.get_num_threads()
    handle = checkpoint.save(tmp_path / "while training", model, asynchronous=True)
    disk.wait_until_reached()
    assert torch.get_num_threads() == threads  # those of training
    train(model, range(6, 10))
    assert not handle.done()
    disk.let_go()
    handle.wait()
    assert handle.done()
    assert torch.get_num_threads() == threads
    assert differences(files_of(tmp_path / "while training"), expected) == []
    assert model.features.group.usage.tables(wait=True)["scored"].evicted > 0
    # and training has not noticed
    train(twin, range(6, 10))
    assert differences(contents(model), contents(twin)) == []


@pytest.mark.long
@pytest.mark.traced
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_compiled_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, split: bool
) -> None:
    torch._dynamo.reset()
    model = Net(split=split)
    twin = copy.deepcopy(model)
    forward = torch.compile(Net.forward, backend="aot_eager", fullgraph=True)

    with monkeypatch.context() as patched:
        patched.setattr(Net, "forward", forward)
        for net in (model, twin):
            train(net, range(4))
        expected = stopped(tmp_path / "stopped", twin, monkeypatch)
        handle = checkpoint.save(tmp_path / "while training", model, asynchronous=True)
        disk.wait_until_reached()
        train(model, range(4, 7))
    disk.let_go()
    handle.wait()
    assert differences(files_of(tmp_path / "while training"), expected) == []


def overwrite(model: Net) -> None:
    """Puts other values into all tensors of the tables."""
    for module in model.modules_with_tables:
        tables = module.group.tables
        for slab, words in enumerate(tables.rows.copy_on_write):
            # what every op does that writes rows
            used = torch.arange(tables.index.used_rows(slab))
            of_slab = tables.rows.state[slab :: len(tables.config.slabs)]
            ops.copy_before_write_(tables.rows.weights[slab], of_slab, words, used)
            assert int(words[CopyOnWrite.ACTIVE]) == 1
        constant = (tables.rows.hyper, tables.rows.meta, tables.rows.init_data)
        for tensor in (*(of for _, of in used_tensors(tables)), *constant):
            tensor.copy_(torch.ones_like(tensor) if tensor.dtype != torch.uint8 else tensor + 1)


def test_the_thread_reads_nothing_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk
) -> None:
    model = Net()
    train(model, range(4))
    state = {"tensor": torch.arange(4), "list": [1, 2], "nested": {"a": [torch.ones(2)]}}
    model.user(torch.arange(900, 950))
    twin = copy.deepcopy(model)  # to write the rows of the new ids in here only
    expected = stopped(tmp_path / "stopped", twin, monkeypatch, state=state)
    handle = checkpoint.save(tmp_path / "c", model, state=state, asynchronous=True)
    disk.wait_until_reached()
    overwrite(model)
    with torch.no_grad():
        model.top.weight.zero_()
    state["tensor"].zero_()  # type: ignore[attr-defined]
    state["list"].append(3)  # type: ignore[attr-defined]
    state["nested"]["a"][0].zero_()  # type: ignore[index]
    disk.let_go()
    handle.wait()
    assert differences(files_of(tmp_path / "c"), expected) == []


class ExtraState(nn.Module):
    """Tensors of dtypes and strides that tables do not have, and values other than tensors."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(40, 30, generator=seeded(3))
        for name, tensor in {
            "float64": values.double(),
            "truth": values > 0,
            "turned": values.t(),
            "expanded": values[:1].expand(20, 30),
            "part": values[::2, ::3],
            "complex64": torch.complex(values, -values),
            "scalar": values[0, 0],
            "none": values[:0],
            "int16": values.to(torch.int16),
            "float16": values.half(),
        }.items():
            self.register_buffer(name, tensor)
        self.seen = {"steps": [1, 2]}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("least", [1, 4 << 20], ids=["large", "small"])
def test_dense_tensors_of_every_kind_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, least: int
) -> None:
    monkeypatch.setattr(staging, "_HUGE_FROM", least)
    model = ExtraState()
    expected = stopped(tmp_path / "stopped", model, monkeypatch)
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    model.seen["steps"].append(3)
    for buffer in model.buffers():
        buffer.untyped_storage().fill_(1)
    disk.let_go()
    handle.wait()
    assert differences(files_of(tmp_path / "c"), expected) == []


@contextlib.contextmanager
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
    "default device": meta_by_default,
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["stopped", "asynchronous"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_change_nothing(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    asynchronous: bool,
) -> None:
    if mode == "default device" and request.config.getoption("--device") in ("marked", "cuda"):
        pytest.skip("the tests have a default device of their own there")
    monkeypatch.setattr(staging, "_HUGE_FROM", 1 << 10)
    model = Net()
    train(model, range(4))
    model.user(torch.arange(900, 950))
    twin = Net(seed=3)
    with MODES[mode]():
        checkpoint.save(tmp_path / "c", model, asynchronous=asynchronous).wait()
        checkpoint.load(tmp_path / "c", twin)
    assert differences(contents(twin), contents(model)) == []
    assert torch.equal(twin.top.weight, model.top.weight)
    train(twin, range(4, 6))
    expected = stopped(tmp_path / "stopped", model, monkeypatch)
    assert differences(files_of(tmp_path / "c"), expected) == []


# -- one at a time -------------------------------------------------------------------------------


def test_two_at_once_are_refused(tmp_path: Path, disk: HeldDisk) -> None:
    model = Net()
    train(model, range(3))
    first = checkpoint.save(tmp_path / "first", model, asynchronous=True)
    disk.wait_until_reached()
    calls: list[Callable[[], object]] = [
        lambda: checkpoint.save(tmp_path / "other", nn.Linear(2, 2)),
        lambda: checkpoint.save(tmp_path / "other", model, asynchronous=True),
        lambda: checkpoint.load(tmp_path / "other", model),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"of /.*/first has not ended yet: wait for it"):
            call()
    assert not (tmp_path / "other").exists()
    disk.let_go()
    first.wait()
    second = checkpoint.save(tmp_path / "other", model, asynchronous=True)
    second.wait()
    assert differences(files_of(tmp_path / "first"), files_of(tmp_path / "other")) == []
    checkpoint.load(tmp_path / "other", Net())


# -- memory --------------------------------------------------------------------------------------


def test_too_little_memory_is_said_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    train(model, range(3))
    before = contents(model)

    def no_copy(tensor: Tensor) -> Tensor:
        raise AssertionError("a copy was made")

    with monkeypatch.context() as patched:
        patched.setattr(ops, "available_memory", lambda: 12_345)
        patched.setattr(staging, "_copy", no_copy)
        with pytest.raises(
            RuntimeError, match=r"needs \d{6,} bytes .* 12345 bytes are free: save without asyn"
        ):
            checkpoint.save(tmp_path / "c", model, asynchronous=True)
    assert list(tmp_path.iterdir()) == []
    assert differences(before, contents(model)) == []
    checkpoint.save(tmp_path / "c", model, asynchronous=True).wait()


def test_copies_without_addresses_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> Tensor:
        raise RuntimeError("mmap: Cannot allocate memory")

    model = Net()
    train(model, range(3))
    with monkeypatch.context() as patched:
        patched.setattr(ops, "reserve", none)
        patched.setattr(staging, "_HUGE_FROM", 1 << 10)
        with pytest.raises(RuntimeError, match=r"no addresses for a copy of \d+ bytes"):
            checkpoint.save(tmp_path / "c", model, asynchronous=True)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "c", model, asynchronous=True).wait()


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_copies_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, fails: bool
) -> None:
    copies = []
    copy = staging._copy

    def noted(tensor: Tensor) -> Tensor:
        copied = copy(tensor)
        copies.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(staging, "_copy", noted)
    model = Net()
    train(model, range(3))
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    gc.collect()
    assert len(copies) > 20
    assert all(copied() is not None for copied in copies)
    disk.let_go(OSError("broken") if fails else None)
    if fails:
        with pytest.raises(OSError, match="broken"):
            handle.wait()
    else:
        handle.wait()
    gc.collect()
    assert [copied for copied in copies if copied() is not None] == []
