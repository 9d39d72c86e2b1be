"""Ctrl-C, or an error, at any point of a load: the model is the old one, or the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from interrupting import after_op, at_line, interrupt_unheld
from whole_group import check_whole
from whole_model import KINDS, WholeModel, content, make, same, save_trained, whole_state

from torch_dynemb import checkpoint

pytestmark = pytest.mark.any_device

Fail = Callable[[Callable[[], object], int], int]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("saved") / "last")


def sizes(model: WholeModel) -> list[int]:
    return [*model.tables.sizes().values(), *model.bag.sizes().values()]


def check_load(kind: str, path: Path, fail: Callable[[Callable[[], object]], object]) -> str:
    """Fails a load; returns which content the model has then: "old" or "new"."""
    model, loaded = make(kind), make(kind)
    checkpoint.load(path, loaded)
    all_sizes = sizes(loaded)
    assert any(all_sizes)
    before = whole_state(model)
    fail(lambda: checkpoint.load(path, model))
    for group in (model.tables.group, model.bag.group):
        check_whole(group)
    found, twin = "old", make(kind)
    if not same(whole_state(model), before):
        assert same(content(model), content(loaded))
        found, twin = "new", loaded
    for each in (model, twin):
        each.train_steps(range(20, 22))
    assert same(content(model), content(twin))
    checkpoint.load(path, model)
    assert sizes(model) == all_sizes
    return found


def count_of(kind: str, path: Path, fail: Fail) -> int:
    """How many lines or ops a load has."""
    model = make(kind)
    return fail(lambda: checkpoint.load(path, model), 0)


def check_points(kind: str, path: Path, fail: Fail, points: Iterable[int]) -> set[str]:
    return {
        check_load(kind, path, lambda call, number=number: fail(call, number)) for number in points
    }


def out_of_memory() -> None:
    raise MemoryError


def memory_error_after_op(call: Callable[[], object], number: int) -> int:
    """As :func:`after_op`, with an error that a load may raise anywhere."""

    def tried() -> None:
        with suppress(MemoryError, RuntimeError):  # the latter as load_state_dict raises it
            call()

    return after_op(tried, number, out_of_memory)


def unheld_after_op(call: Callable[[], object], number: int) -> int:
    return after_op(call, number, interrupt_unheld)


WAYS: dict[str, Fail] = {
    "Ctrl-C at a line": at_line,
    "Ctrl-C after an op": after_op,
    "an interrupt that nothing holds back": unheld_after_op,
    "no memory after an op": memory_error_after_op,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_failed_load_leaves_nothing_half(kind: str, way: str, saved: Path) -> None:
    count = count_of(kind, saved, WAYS[way])
    assert count > 100
    found = check_points(kind, saved, WAYS[way], range(7, count, count // 9))
    assert "old" in found


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_load_that_fails_anywhere_leaves_nothing_half(kind: str, way: str, saved: Path) -> None:
    count = count_of(kind, saved, WAYS[way])
    assert "old" in check_points(kind, saved, WAYS[way], range(1, count, max(1, count // 60)))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_dense_part_that_the_model_refuses_leaves_all_as_it_was(kind: str, saved: Path) -> None:
    model = make(kind)
    before = whole_state(model)
    taken: list[int] = []

    def refuse(*_: Any) -> None:
        taken.append(len(taken))
        if len(taken) == 1:
            raise RuntimeError("a hook refuses it")

    model.dense.register_load_state_dict_post_hook(refuse)
    with pytest.raises(RuntimeError, match="a hook refuses it"):
        checkpoint.load(saved, model)
    assert same(whole_state(model), before)
    checkpoint.load(saved, model)
    assert sum(sizes(model)) > 0
