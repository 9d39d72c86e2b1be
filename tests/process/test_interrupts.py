"""Ctrl-C: a call that changes a table in several steps does so as a whole or not at all."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from interrupting import (
    after_op,
    at_line,
    interrupt_unheld,
)
from loaded_content import write_content
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import GENERATION_BITS, Clock
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table import extension
from torch_dynemb.table.content import read_content, read_counts
from torch_dynemb.table.state import check

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("ctrl_c")]

Module = td.DynamicEmbeddingBagCollection
Snapshot = dict[str, Any]


def make() -> Module:
    """Three tables in two slabs, with holes, scores, counted and evicted ids."""
    counted = td.Policy(score="frequency", capacity=30, admission=td.AdmitFrequent(2))
    module = Module(
        [
            td.TableConfig("a", 4, policy=counted),
            td.TableConfig("b", 8),
            td.TableConfig("c", 4, policy=td.Policy(score="custom")),
        ],
        optimizer=td.Adam(lr=0.1),
        max_rows=400,
    )
    module.group.scores.set_batch(2, 3)
    module.group.evicted.record(100)
    for first in (0, 20):
        train(module, first)
    for table, count in ((0, 10), (1, 50), (2, 20)):
        module.group.erase(table, torch.arange(count))
    return module


def train(module: Module, first: int) -> None:
    ids = torch.arange(first, first + 40).reshape(4, 10)
    for _ in range(2):
        features = dict.fromkeys(module.feature_names, ids)
        output = module(features)
        (output * torch.arange(output.shape[1])).sum().backward()
        module.optimizer.step()


def snapshot(module: Module) -> Snapshot:
    """Everything that a user could tell apart, but for where rows lie."""
    group = module.group
    group.materialize()
    result: Snapshot = {
        "tables": [table.description() for table in group.config.tables],
        "optimizer": group.config.optimizer,
        "groups": module.optimizer.state_dict(),
        "hyper": group.rows.hyper,
        "steps": group.rows.row_clock,
        "clock": group.index.clock,
        "features": [module.feature_names, module.feature_dims, module.feature_policies],
        "trainable": module.trainable,
    }
    for table, name in enumerate(group.names):
        result[f"content of {name}"] = read_content(group.tables, table)
        result[f"counts of {name}"] = read_counts(group.tables, table)
    return copy.deepcopy(result)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Case(NamedTuple):
    """A call, and what it takes, made before it."""

    call: Callable[[Module, Any], object]
    prepare: Callable[[Module], Any] = lambda module: None


def other_state(module: Module) -> dict[str, Tensor]:
    other = copy.deepcopy(module)
    train(other, 200)
    other.group.remove(1, predicate=lambda ids, _: ids % 3 == 0)
    return dict(other.state_dict())


def other_content(module: Module) -> Any:
    other = copy.deepcopy(module)
    train(other, 60)
    other.group.materialize()
    content, counts = read_content(other.group.tables, 0), read_counts(other.group.tables, 0)
    return content, counts, int(other.group.index.clock[Clock.STEP])


def other_rates(module: Module) -> dict[str, Any]:
    state = copy.deepcopy(module.optimizer.state_dict())
    for number, group in enumerate(state["param_groups"]):
        group.update(lr=0.5 + number, betas=(0.5, 0.25), eps=0.125)
    return state


def write(module: Module, given: Any) -> None:
    content, counts, step = given
    with defer_signals():
        write_content(module.group.tables, 0, content, counts)
        module.group.index.clock[Clock.STEP] = step


CASES = {
    "compact": Case(lambda m, _: m.group.compact()),
    "remove": Case(
        lambda m, _: m.group.remove(1, predicate=lambda ids, _: ids % 2 == 0, batch_size=8)
    ),
    "clear": Case(lambda m, _: m.group.clear(0)),
    "fill": Case(lambda m, _: m.group.fill(1, 2.5)),
    "reset_counts": Case(lambda m, _: m.group.reset_counts(0)),
    "set_batch_score": Case(lambda m, _: m.group.scores.set_batch(2, 9)),
    "insert_or_assign": Case(
        lambda m, rows: m.group.insert_or_assign(1, torch.arange(40, 60), rows),
        lambda m: torch.arange(160.0).reshape(20, 8),
    ),
    "load_state_dict": Case(lambda m, state: m.load_state_dict(state), other_state),
    "load_state_tensors": Case(lambda m, state: m.group.state.load(state), other_state),
    "write_content": Case(write, other_content),
    "set_optimizer": Case(lambda m, _: m.set_optimizer(td.RowWiseAdagrad(lr=0.3))),
    "add_table": Case(lambda m, _: m.add_table(td.TableConfig("d", 16, ["x", "y"]))),
    "load_state_dict of the optimizer": Case(
        lambda m, state: m.optimizer.load_state_dict(state), other_rates
    ),
}


class Trial:
    """What a call makes of a module where nothing interrupts it, and where something does."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.start = make()
        done = self._module()
        self._given = case.prepare(done)
        case.call(done, self._given)
        self._after = snapshot(done)
        train(done, 10)
        self._after_training = snapshot(done)
        undone = self._module()
        self._before = snapshot(undone)
        train(undone, 10)
        self._before_training = snapshot(undone)

    def _module(self) -> Module:
        module = copy.deepcopy(self.start)
        module.group.insert(1, torch.arange(1000, 1010))  # rows that no backward has written
        module.group.insert(0, torch.arange(700, 705))  # not admitted, but counted
        return module

    def run(
        self,
        interrupted: Callable[[Callable[[], object]], int],
        *,
        empty: bool = False,
        trains_on: bool = True,
    ) -> int:
        """Checks what an interrupted call leaves; returns what ``interrupted`` returns.

        Args:
            empty: it may also leave no ids.
            trains_on: check that, too.
        """
        module = self._module()
        result = interrupted(lambda: self._case.call(module, self._given))
        now = snapshot(module)
        undone, done = same(now, self._before), same(now, self._after)
        if empty and module.sizes() == dict.fromkeys(module.sizes(), 0):
            module.load_state_dict(self._module().state_dict())
            undone = same(snapshot(module), self._before)
        assert undone or done
        check(module.group.tables, module.group.state.tensors())
        if not trains_on:
            return result
        twin = copy.deepcopy(module)  # saves and loads
        for each in (module, twin):
            train(each, 10)
            expected = self._before_training if undone else self._after_training
            assert same(snapshot(each), expected)
        return result


@pytest.fixture(scope="module")
def trials() -> Callable[[str], Trial]:
    made: dict[str, Trial] = {}

    def trial(name: str) -> Trial:
        if name not in made:
            made[name] = Trial(CASES[name])
        return made[name]

    return trial


def test_the_calls_change_something(trials: Callable[[str], Trial]) -> None:
    for name in CASES:
        trial = trials(name)
        assert same(trial._before, trial._after) == (name == "compact"), name


def some(steps: int) -> list[int]:
    """A few of all steps, and more of the last ones, where changes become seen."""
    return sorted(
        {*range(1, steps + 1, max(1, steps // 4)), *range(max(1, steps - 24), steps + 1, 3)}
    )


@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_at_some_lines(name: str, trials: Callable[[str], Trial]) -> None:
    trial = trials(name)
    lines = trial.run(lambda call: at_line(call, 0))
    for line in some(lines):
        trial.run(lambda call, line=line: at_line(call, line))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_at_every_line(name: str, trials: Callable[[str], Trial]) -> None:
    trial = trials(name)
    for line in range(1, trial.run(lambda call: at_line(call, 0)) + 1):
        trial.run(lambda call, line=line: at_line(call, line), trains_on=line % 10 == 0)


@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_after_some_ops(name: str, trials: Callable[[str], Trial]) -> None:
    trial = trials(name)
    ops = trial.run(lambda call: after_op(call, 0))
    for number in some(ops):
        trial.run(lambda call, number=number: after_op(call, number))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_after_every_op(name: str, trials: Callable[[str], Trial]) -> None:
    trial = trials(name)
    for number in range(1, trial.run(lambda call: after_op(call, 0)) + 1):
        trial.run(lambda call, number=number: after_op(call, number), trains_on=number % 10 == 0)


@pytest.mark.long
def test_a_compaction_of_which_any_op_fails_keeps_all_ids_and_rows(
    trials: Callable[[str], Trial],
) -> None:
    trial = trials("compact")
    for number in range(1, trial.run(lambda call: after_op(call, 0)) + 1):
        trial.run(lambda call, number=number: after_op(call, number, interrupt_unheld))


@pytest.mark.long
def test_a_compaction_whose_ops_fail_keeps_all_ids_and_rows(
    trials: Callable[[str], Trial],
) -> None:
    trial = trials("compact")
    for number in range(1, trial.run(lambda call: after_op(call, 0)) + 1, 7):
        trial.run(lambda call, number=number: after_op(call, number, interrupt_unheld))


def test_a_load_whose_ops_fail_leaves_the_old_state_or_none(
    trials: Callable[[str], Trial],
) -> None:
    trial = trials("load_state_tensors")
    ops = trial.run(lambda call: after_op(call, 0))
    for number in range(ops - 40, ops + 1, 3):
        trial.run(lambda call, number=number: after_op(call, number, interrupt_unheld), empty=True)


def test_assigned_rows_are_there_or_not_where_an_op_fails(
    trials: Callable[[str], Trial],
) -> None:
    module = make()
    new = torch.arange(500, 520)
    before = snapshot(module)

    def call() -> None:
        module.group.insert_or_assign(1, new, torch.ones(20, 8))

    ops = after_op(call, 0)
    assert bool(module.group.contains(1, new).all())
    for number in range(1, ops + 1):
        module.group.erase(1, new)
        after_op(call, number, interrupt_unheld)
        there = module.group.contains(1, new)
        assert bool(there.all()) or not bool(there.any())
    module.group.erase(1, new)
    assert same(snapshot(module)["content of b"], before["content of b"])


def test_ids_do_not_share_rows_after_set_handles_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), name="t")
    table(torch.arange(1000)).sum().backward()
    table.group.erase(0, torch.arange(500))
    real = td.ops.set_handles_

    def stop(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("torch_dynemb.table.compaction.ops.set_handles_", stop)
        with pytest.raises(KeyboardInterrupt):
            table.group.compact()
    table(torch.arange(5000, 5400)).sum().backward()
    found = table.group.find(table.ids(), torch.tensor([0, len(table)]), [0]).handles
    assert (found >> GENERATION_BITS).unique().numel() == len(table) == 900
    assert table.group.compact() > 0


def test_evicted_ids_are_returned_or_kept() -> None:
    start = make()
    kept = int(start.group.index.evicted[0, 0])
    assert kept > 0

    def trial(line: int) -> int:
        module = copy.deepcopy(start)
        module.group._become(extension.take_over(module.group.tables, start.group.tables))
        taken: list[Any] = []

        def call() -> None:
            taken.append(module.group.evicted.take())

        lines = at_line(call, line)
        left = int(module.group.index.evicted[0, 0])
        # a result that the interrupted call could not return any more is lost with its caller
        assert left in (0, kept)
        assert not taken or left == 0
        train(module, 60)
        assert int(module.group.index.evicted[0, 0]) >= left
        return lines

    for line in range(1, trial(0) + 1, 9):
        trial(line)


def described(group: td.TableGroup) -> list[Any]:
    config = group.config.optimizer
    assert config is not None
    shapes = [tensor.shape for tensor in group.tables.tensors()]
    return [group.names, config.name, group.config.optimizer_code, shapes, group.state.tensors()]


@pytest.mark.parametrize("split", [False, True])
def test_a_group_of_its_own_gets_an_optimizer_or_a_table_at_once(split: bool) -> None:
    def group() -> td.TableGroup:
        made = td.TableGroup(
            [td.TableConfig("a", 4)], optimizer=td.SGD(lr=0.1), split=split, seed=1, max_rows=100
        )
        made.insert(0, torch.arange(9))
        return made

    changes: list[Callable[[td.TableGroup], object]] = [
        lambda made: made.set_optimizer(td.Adam(lr=0.1)),
        lambda made: made.add_table(td.TableConfig("b", 8)),
    ]
    before = described(group())
    for change in changes:
        done = group()
        lines = at_line(functools.partial(change, done), 0)
        after = described(done)
        for line in range(1, lines + 1, max(1, lines // 12)):
            made = group()
            at_line(functools.partial(change, made), line)
            assert same(described(made), before) or same(described(made), after)
            assert not same(before, after)


def test_groups_of_modules_are_changed_through_the_module() -> None:
    module = make()
    changes: list[Callable[[], object]] = [
        lambda: module.group.set_optimizer(td.SGD(lr=1.0)),
        lambda: module.group.add_table(td.TableConfig("d", 4)),
        lambda: module.group.to(torch.device("cpu")),
    ]
    before = snapshot(module)
    for twin in (module, copy.deepcopy(module)):
        assert twin.group.owner == "DynamicEmbeddingBagCollection"
    for change in changes:
        with pytest.raises(RuntimeError, match="part of a DynamicEmbeddingBagCollection, which"):
            change()
    assert same(snapshot(module), before)
