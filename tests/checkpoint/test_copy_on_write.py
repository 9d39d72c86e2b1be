"""Saves that read rows while training writes them: what they write is what there was before."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from copying_on_write import AskingDisk, in_thread, train_while, until, words_of
from held_disk import SECONDS, HeldDisk, files_of, give_disk, held_disk
from saved_models import Net, contents, differences, train
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import checkpoint, ops
from torch_dynemb.checkpoint.saving import staging
from torch_dynemb.ops import functional_copies
from torch_dynemb.ops.columns import COPY_ON_WRITE_COLUMNS, CopyMark, CopyOnWrite
from torch_dynemb.rows import read
from torch_dynemb.table import copy_on_write

pytestmark = pytest.mark.cpu_only("rows of other devices, and those in stores, are copied")


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests before may have compiled code that changes copies of rows, which is never forgotten."""
    monkeypatch.setattr(functional_copies, "_rows_copied", False)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    with held_disk(monkeypatch) as held:
        yield held


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for an eighth of the rows."""
    monkeypatch.setattr(copy_on_write, "_LEAST_BYTES", 0)
    monkeypatch.setattr(copy_on_write, "_SHARE", 8)


def saved_first(path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the files of a save without training meanwhile."""
    with monkeypatch.context() as patched:
        give_disk(patched)
        checkpoint.save(path, model)
    return files_of(path)


KINDS: dict[str, dict[str, Any]] = {
    "no state": {"optimizer": td.SGD(lr=0.1)},
    "fused": {},
    "split": {"split": True, "optimizer": td.RowWiseAdagrad(lr=0.1)},
    "8 bits": {"optimizer": td.Adam(lr=0.05, state_dtype=torch.uint8), "dtype": torch.bfloat16},
    "bfloat16": {"optimizer": td.Adagrad(lr=0.1, state_dtype=torch.bfloat16)},
    "row steps": {"split": True, "optimizer": td.Adam(lr=0.05, row_steps=True)},
    "recorded changes": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_between_any_two_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Some rows have been read then, and others not."""
    monkeypatch.setattr(read, "ROWS_BYTES", 1 << 10)
    model = Net(**KINDS[kind])
    if kind == "recorded changes":
        checkpoint.record_changes(model)
    train(model, range(6))
    # untrained rows: they get their initial values when they are read
    model.features({name: torch.arange(900, 950)[None] for name in model.features.feature_names})
    model.user(torch.arange(900, 950))
    twin = copy.deepcopy(model)
    expected = saved_first(tmp_path / "stopped", twin, monkeypatch)
    disk = AskingDisk()
    give_disk(monkeypatch, disk)
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    steps = train_while(handle, disk, model, range(6, 11))
    handle.wait()
    assert len(steps) == 5
    assert differences(files_of(tmp_path / "c"), expected) == []
    # and training has not noticed
    train(twin, steps)
    assert differences(contents(model), contents(twin)) == []


CHANGES: dict[str, Callable[[Net], object]] = {
    "assigned": lambda net: net.user.group.insert_or_assign(
        0, torch.arange(1, 41), torch.zeros(40, 4)
    ),
    "filled": lambda net: net.user.group.fill(0, 3.0),
    "cleared, and other ids": lambda net: (
        net.user.group.clear(0),
        net.user.group.insert_or_assign(0, torch.arange(5000, 5040), torch.zeros(40, 4)),
    ),
    "unwritten rows written": lambda net: net.user.group.materialize(),
    "saved as a state dict": lambda net: net.state_dict(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_else_writes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, change: str
) -> None:
    model = Net()
    train(model, range(4))
    model.user(torch.arange(900, 950))
    model.user.group.erase(0, torch.arange(7))
    model.user(torch.arange(950, 953))  # in rows that others had
    expected = saved_first(tmp_path / "stopped", copy.deepcopy(model), monkeypatch)
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    CHANGES[change](model)
    disk.let_go()
    handle.wait()
    assert differences(files_of(tmp_path / "c"), expected) == []


MOVES: dict[str, Callable[[Net, dict[str, Any]], object]] = {
    "compact": lambda net, state: net.user.group.compact(),
    "load_state_dict": lambda net, state: net.load_state_dict(state),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_of_rows_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, move: str
) -> None:
    model = Net()
    train(model, range(4))
    other = copy.deepcopy(model.state_dict())
    train(model, range(4, 6))
    model.user.group.erase(0, torch.arange(20))
    twin = copy.deepcopy(model)
    expected = saved_first(tmp_path / "stopped", twin, monkeypatch)
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    moving = in_thread(lambda: MOVES[move](model, other))
    moving.thread.join(0.2)  # as long as it takes where it does not wait
    disk.let_go()
    handle.wait()
    moving.result()
    assert differences(files_of(tmp_path / "c"), expected) == []
    MOVES[move](twin, other)
    assert differences(contents(model), contents(twin)) == []


@pytest.mark.parametrize("call", ["set_optimizer", "add_table"])
def test_tables_that_take_the_place_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, call: str
) -> None:
    group = td.TableGroup([td.TableConfig("items", 4)], optimizer=td.SGD(lr=0.1))

    class Items(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.group = group

    def tables_of_items(module: Items, path: str) -> Iterator[checkpoint.TablePart]:
        yield checkpoint.TablePart("items", module.group, 0, embedding_dim=4)

    td.register_module(Items, tables=tables_of_items)

    group.insert_or_assign(0, torch.arange(90), torch.randn(90, 4))
    model = Items()
    expected = saved_first(tmp_path / "stopped", model, monkeypatch)
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    if call == "set_optimizer":
        group.set_optimizer(td.Adagrad(lr=0.1))
    else:
        group.add_table(td.TableConfig("more", 4))
    group.fill(0, 1.0)
    disk.let_go()
    handle.wait()
    assert differences(files_of(tmp_path / "c"), expected) == []


# -- memory that is bounded ------------------------------------------------------------------------


def test_training_waits_for_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, few_places: None
) -> None:
    monkeypatch.setattr(read, "ROWS_BYTES", 1 << 10)
    model = Net()
    train(model, range(6))
    twin = copy.deepcopy(model)
    expected = saved_first(tmp_path / "stopped", twin, monkeypatch)
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    training = in_thread(lambda: train(model, range(6, 10)))
    until(lambda: any(int(words[CopyOnWrite.WAITS]) > 0 for words in words_of(model)))
    assert training.thread.is_alive()
    disk.let_go()
    training.result()
    handle.wait()
    assert differences(files_of(tmp_path / "c"), expected) == []
    train(twin, range(6, 10))
    assert differences(contents(model), contents(twin)) == []


def update_users(model: Net) -> None:
    """A backward that writes all rows, without a step, which would tell what a save has raised."""
    model.user(torch.arange(1, 40)).sum().backward()


def test_training_does_not_wait_for_a_save_that_has_failed(
    tmp_path: Path, disk: HeldDisk, few_places: None
) -> None:
    model = Net()
    train(model, range(6))
    twin = copy.deepcopy(model)
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    training = in_thread(lambda: update_users(model))
    until(lambda: any(int(words[CopyOnWrite.WAITS]) > 0 for words in words_of(model)))
    disk.let_go(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        handle.wait()
    training.result()
    update_users(twin)
    assert differences(contents(model), contents(twin)) == []
    assert not (tmp_path / "c").exists()


def test_nothing_waits_in_a_fork(tmp_path: Path, disk: HeldDisk, few_places: None) -> None:
    model = Net()
    train(model, range(6))
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    child = os.fork()
    if child == 0:  # only os._exit() may end it
        try:
            for module in model.modules_with_tables:
                module.group.tables.wait_until_read()
            active = [int(words[CopyOnWrite.ACTIVE]) for words in words_of(model)]
            os._exit(0 if active and not any(active) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(int(words[CopyOnWrite.ACTIVE]) == 1 for words in words_of(model))
    disk.let_go()
    handle.wait()


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_memory_is_given_back(tmp_path: Path, disk: HeldDisk, fails: bool) -> None:
    model = Net()
    train(model, range(6))
    handle = checkpoint.save(tmp_path / "c", model, asynchronous=True)
    disk.wait_until_reached()
    train(model, range(6, 8))
    assert all(int(words[CopyOnWrite.TAKEN]) > 0 for words in words_of(model))
    assert all(bool(words[COPY_ON_WRITE_COLUMNS:].any()) for words in words_of(model))
    disk.let_go(OSError("broken") if fails else None)
    assert handle._ended.wait(SECONDS)
    assert [int(words[CopyOnWrite.ACTIVE]) for words in words_of(model)] == [0] * len(
        words_of(model)
    )
    assert not any(bool(words[COPY_ON_WRITE_COLUMNS:].any()) for words in words_of(model))
    handle._work.unreported_error()
    disk.error = None
    words = words_of(model)
    checkpoint.save(tmp_path / "next", model, asynchronous=True).wait()
    assert all(a is b for a, b in zip(words, words_of(model), strict=True))


def test_no_rows_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, ...]] = []
    make_copy = staging._copy

    def noted(tensor: Tensor) -> Tensor:
        copied.append(tuple(tensor.shape))
        return make_copy(tensor)

    monkeypatch.setattr(staging, "_copy", noted)
    table = td.DynamicEmbedding(5, optimizer=td.Adam(lr=0.1))
    table(torch.arange(300)).sum().backward()
    checkpoint.save(tmp_path / "c", table, asynchronous=True).wait()
    assert [shape for shape in copied if len(shape) == 2 and shape[1] == 5 and shape[0] > 0] == []
    assert [shape for shape in copied if shape[0] == 300] == [(300,)]  # generations
    places = copy_on_write.places
    assert places(1 << 20, 512) == 1 << 18
    assert places(1 << 24, 512) == (1 << 30) // 512
    assert places(1000, 512) == 1000
    assert places(0, 512) == places(1, 4 << 30) == 1


def test_a_machine_without_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk
) -> None:
    def none(*_: object, **__: object) -> Tensor:
        raise RuntimeError("mmap: Cannot allocate memory")

    disk.let_go()
    model = Net()
    train(model, range(3))
    with monkeypatch.context() as patched:
        patched.setattr(ops, "reserve", none)
        with pytest.raises(RuntimeError, match=r"no addresses for \d+ bytes, the buffer of"):
            checkpoint.save(tmp_path / "c", model, asynchronous=True)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "c", model, asynchronous=True).wait()


# -- code that changes copies of tables ------------------------------------------------------------


def test_rows_are_copied_where_code_changes_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional_copies, "_rows_copied", True)
    model = Net()
    train(model, range(3))
    checkpoint.save(tmp_path / "c", model, asynchronous=True).wait()
    assert words_of(model) == []


@pytest.mark.traced
def test_code_that_changes_copies_is_refused_later(tmp_path: Path) -> None:
    torch._dynamo.reset()
    table = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), max_rows=64)
    table(torch.arange(9)).sum().backward()
    checkpoint.save(tmp_path / "c", table, asynchronous=True).wait()
    compiled = torch.compile(table, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="changes copies of tables that a save with asynchronous"):
        compiled(torch.arange(9)).sum().backward()
    assert not functional_copies.copies_rows()


@pytest.mark.traced
@pytest.mark.long
def test_code_of_inductor_changes_tables_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_places: None
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(read, "ROWS_BYTES", 1 << 12)
    assert hammer(tmp_path, 20_000, 3, compiled=True) > 3


# -- the ops ---------------------------------------------------------------------------------------


def copy_on_write_slab(rows: int, places: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Weights, state and words of a slab of so many rows, active."""
    weights = torch.arange(rows * 2, dtype=torch.float32).view(rows, 2)
    steps = torch.arange(rows, dtype=torch.int32)
    words = torch.zeros(512 + 512 + 512 + 2 * places, dtype=torch.int64)
    words[CopyOnWrite.ROWS], words[CopyOnWrite.PLACES], words[CopyOnWrite.ROW_BYTES] = (
        rows,
        places,
        16,
    )
    words[CopyOnWrite.MARKS], words[CopyOnWrite.FREE], words[CopyOnWrite.BUFFER] = 512, 1024, 1536
    words[CopyOnWrite.GIVEN], words[CopyOnWrite.ACTIVE] = places, 1
    words.view(torch.int32)[2048 : 2048 + places] = torch.arange(places, dtype=torch.int32)
    return weights, [steps], words


def taken(
    weights: Tensor, state: list[Tensor], words: Tensor, *rows: int
) -> tuple[list[float], list[int]]:
    out, steps = torch.empty(len(rows), 2), torch.empty(len(rows), dtype=torch.int32)
    ops.take_unchanged_rows_(weights, state, words, torch.tensor(rows), out, [steps])
    return out[:, 0].tolist(), steps.tolist()


def test_rows_are_copied_once_and_places_are_reused() -> None:
    weights, state, words = copy_on_write_slab(6, 2)
    marks = words.view(torch.int32)[1024:1030]
    ops.copy_before_write_(weights, state, words, torch.tensor([4, 1]))
    weights[[1, 4]] = -1.0
    state[0][[1, 4]] = 99
    ops.copy_before_write_(weights, state, words, torch.tensor([1, 4]))  # as they were is known
    assert marks.tolist() == [0, 2, 0, 0, 1, 0]
    assert taken(weights, state, words, 0, 1) == ([0.0, 2.0], [0, 1])
    assert taken(weights, state, words, 1, 0) == ([-1.0, 0.0], [99, 0])  # read before: as they are
    ops.copy_before_write_(
        weights, state, words, torch.tensor([1, 5])
    )  # 1 is read; 5 gets the place of 1
    weights[5] = -5.0
    assert marks.tolist() == [CopyMark.READ, CopyMark.READ, 0, 0, 1, 2]
    assert taken(weights, state, words, 5, 4) == ([10.0, 8.0], [5, 4])
    assert [int(words[k]) for k in (CopyOnWrite.TAKEN, CopyOnWrite.GIVEN, CopyOnWrite.WAITS)] == [
        3,
        5,
        0,
    ]
    ops.copy_before_write_(weights, state, words, torch.tensor([2, 3]))
    words[CopyOnWrite.ACTIVE] = 0
    before = words.clone()
    ops.copy_before_write_(weights, state, words, torch.tensor([0, 1, 2, 3]))
    assert torch.equal(words, before)


def test_rows_beyond_the_saved_ones_are_not_copied() -> None:
    weights, state, words = copy_on_write_slab(6, 2)
    words[CopyOnWrite.ROWS] = 4
    ops.copy_before_write_(weights, state, words, torch.tensor([4, 5]))
    assert int(words[CopyOnWrite.TAKEN]) == 0
    with pytest.raises(RuntimeError, match=r"take_unchanged_rows_: rows\[1\] is 4, expected 0 to"):
        taken(weights, state, words, 0, 4)
    with pytest.raises(RuntimeError, match=r"copy_before_write_: rows\[0\] is 6, expected 0 to 5"):
        ops.copy_before_write_(weights, state, words, torch.tensor([6]))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (CopyOnWrite.ROWS, 7),
        (CopyOnWrite.ROWS, -1),
        (CopyOnWrite.PLACES, 0),
        (CopyOnWrite.PLACES, 3),
        (CopyOnWrite.ROW_BYTES, 8),
        (CopyOnWrite.MARKS, 0),
        (CopyOnWrite.FREE, 513),
        (CopyOnWrite.BUFFER, 1 << 40),
    ],
)
def test_words_that_do_not_fit(word: CopyOnWrite, value: int) -> None:
    weights, state, words = copy_on_write_slab(6, 2)
    words[word] = value
    for call in (
        lambda: ops.copy_before_write_(weights, state, words, torch.tensor([0])),
        lambda: taken(weights, state, words, 0),
    ):
        with pytest.raises(RuntimeError, match="copy_on_write names"):
            call()


def test_tensors_that_do_not_fit() -> None:
    weights, state, words = copy_on_write_slab(6, 2)
    none = torch.tensor([0])
    out, steps = torch.empty(1, 2), torch.empty(1, dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "copy_on_write of slab 0 has 31 words": lambda: ops.copy_before_write_(
            weights, state, torch.zeros(31, dtype=torch.int64), none
        ),
        "in as many tensors, as weights": lambda: ops.take_unchanged_rows_(
            weights, state, words, none, out, []
        ),
        "out_weights has 1 rows, expected at least 2": lambda: ops.take_unchanged_rows_(
            weights, state, words, torch.tensor([0, 1]), out, [steps]
        ),
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message):
            call()


# -- many threads ----------------------------------------------------------------------------------


def hammer(tmp_path: Path, ids: int, saves: int, *, compiled: bool = False) -> int:
    """Saves while rows are written as fast as can be; returns how many steps were made.

    All values of a row are the same after every step, and say which step that was: a row that is
    torn, or of a later step, is found.
    """
    table = td.DynamicEmbedding(
        16, optimizer=td.SGD(lr=1.0), split=not compiled, initializer=td.initializers.Constant(0.0)
    )
    rows = torch.randperm(ids)
    forward = torch.compile(table, fullgraph=True) if compiled else table

    def step() -> None:
        forward(rows).sum().backward()
        table.optimizer.step()

    step()
    steps = 1
    for number in range(saves):
        handle = checkpoint.save(tmp_path / str(number), table, asynchronous=True)
        begun = steps
        while not handle.done() or steps == begun:
            step()
            steps += 1
        handle.wait()
        with checkpoint.open(tmp_path / str(number)) as saved:
            found = torch.cat([b.rows for b in saved.tables["embedding"].batches(1 << 16)])
        assert torch.equal(found, torch.full((ids, 16), -float(begun)))
    return steps


@pytest.mark.long
def test_no_row_is_torn_or_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_places: None
) -> None:
    monkeypatch.setattr(read, "ROWS_BYTES", 1 << 12)
    assert hammer(tmp_path, 20_000, 3) > 3


@pytest.mark.long
def test_no_row_is_torn_or_late_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_places: None
) -> None:
    monkeypatch.setattr(read, "ROWS_BYTES", 1 << 12)
    for places in (8, 64, 1024):
        monkeypatch.setattr(copy_on_write, "_SHARE", places)
        folder = tmp_path / str(places)
        folder.mkdir()
        assert hammer(folder, 200_000, 12) > 12
