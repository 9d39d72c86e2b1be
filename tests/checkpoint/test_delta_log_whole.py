"""Models that train take a commit of a delta log whole or not at all, whatever fails."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_models import Content
from table_content import content as content_of_tables
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.checkpoint import load
from torch_dynemb.delta_log import DeltaLog, follow, replay
from torch_dynemb.rows import row_update
from torch_dynemb.table.content import read_counts

pytestmark = pytest.mark.any_device

POLICIES = {
    "custom": td.Policy(score="custom", capacity=12),
    "grows": td.Policy(score="step", capacity=5, on_full="grow"),
    "counts": td.Policy(score=("frequency", "step"), capacity=10, admission=td.AdmitFrequent(2)),
    "plain": td.Policy(),
}


class Model(nn.Module):
    """A table of each policy, and a dense state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        configs = [td.TableConfig(name, 4, policy=policy) for name, policy in POLICIES.items()]
        self.bags = td.DynamicEmbeddingBagCollection(
            configs, optimizer=td.Adam(lr=0.1), max_rows=100
        )
        self.dense = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        dense: Tensor = self.dense(self.bags(dict.fromkeys(POLICIES, ids)))
        return dense


def train(model: Model, step: int) -> None:
    """A step on ids some of which are new, after which others go."""
    group = model.bags.group
    group.scores.set_batch(0, 100 + step)
    ids = (torch.arange(8) % 6 + 3 * step).view(4, 2).to(group.device)
    model.zero_grad()
    model(ids).square().sum().backward()
    model.bags.optimizer.step()
    group.erase(3, ids[0])
    with torch.no_grad():
        model.dense.weight -= 0.1


def content(model: Model, *, scores: bool = False) -> Content:
    """All that a commit brings; with ``scores``, also what is a follower's own."""
    group = model.bags.group
    result: Content = dict(content_of_tables(model))
    result["dense"] = model.dense.weight.tolist(), model.dense.bias.tolist()
    for table, config in enumerate(group.config.tables):
        ids = next(group.export(table), None)
        if ids is None:
            continue
        found = ids.ids.sort().values
        for name in config.policy.scores:
            if name == "custom" or (scores and name != "none"):
                of_ids = group.scores.get(table, found, score=name).scores
                result[config.name, name] = found.tolist(), of_ids.tolist()
    if scores:
        counted = read_counts(group.tables, 2)
        assert counted is not None
        result["counts"] = counted.ids.tolist(), counted.counts.tolist()
    return result


def published(path: Path, steps: int = 2) -> Model:
    model = Model()
    log = DeltaLog(path, optimizer_state=True)
    train(model, 0)
    log.attach(model)
    for step in range(1, steps + 1):
        train(model, step)
        train(model, step)
        log.publish()
    log.close()
    return model


CHANGES = ["erase", "write_rows", "set_optimizer_steps"]
OPS = ["find_or_insert_", "set_scores_"]


class Failing:
    """Has the n-th call of what changes a table raise, before or after it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.fails_at, self.late = 0, 0, False
        self.error: BaseException = OSError(5, "injected")
        for owner, names in ((row_update, CHANGES), (row_update.ops, OPS)):
            for name in names:
                monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))
        load_dense = Model.load_state_dict
        monkeypatch.setattr(Model, "load_state_dict", self._wrapped(load_dense))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            self.calls += 1
            fails = self.calls == self.fails_at
            if fails and not self.late:
                raise self.error
            result = call(*args, **options)
            if fails:
                raise self.error
            return result

        return failing


@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_any_table_leaves_the_commit_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    model = published(tmp_path / "log")
    failing = Failing(monkeypatch)
    failing.late = late
    copy = Model(seed=9)
    load(tmp_path / "log" / "base", copy)
    follow(tmp_path / "log", copy).update(until=1)
    before = content(copy, scores=True)
    follower = follow(tmp_path / "log", copy, sequence=1)
    for fails_at in range(1, 100):
        failing.calls, failing.fails_at = 0, fails_at
        try:
            follower.update()
        except OSError:
            assert content(copy, scores=True) == before, fails_at
            assert follower.sequence == 1
        else:
            break
    assert follower.sequence == 2
    assert content(copy) == content(model)
    assert fails_at > 3 * len(POLICIES)


def test_an_interrupt_comes_before_or_after_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = published(tmp_path / "log", steps=1)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    write = row_update.write_rows

    def interrupted(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write(*args, **options)

    copy = Model(seed=9)
    load(tmp_path / "log" / "base", copy)
    follower = follow(tmp_path / "log", copy)
    monkeypatch.setattr(row_update, "write_rows", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            follower.update()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert follower.sequence == 1
    assert content(copy) == content(model)


def test_custom_scores_travel_with_their_ids(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "log")
    model = Model()
    train(model, 0)
    log.attach(model)
    group = model.bags.group
    ids = next(group.export(0)).ids[:3]
    group.scores.set(0, ids, torch.tensor([7, -8, 9], device=ids.device))  # and no row
    log.publish()
    log.close()
    copy = Model(seed=9)
    assert replay(tmp_path / "log", copy) == 1
    assert content(copy) == content(model)
    assert copy.bags.group.scores.get(0, ids).scores.tolist() == [7, -8, 9]
    group.scores.set(0, ids, torch.tensor([1, 2, 3], device=ids.device))  # while nothing records
    log.attach(model)
    log.publish()
    log.close()
    assert replay(tmp_path / "log", copy) == 2
    assert copy.bags.group.scores.get(0, ids).scores.tolist() == [1, 2, 3]


def test_tables_that_cannot_take_a_commit_are_named_before_any_changes(tmp_path: Path) -> None:
    model = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("a", 4), td.TableConfig("b", 4)], optimizer=td.SGD(lr=0.1)
    )
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    ids = torch.arange(30).view(-1, 1).to(model.group.device)
    model({"a": ids, "b": ids}).sum().backward()
    model.optimizer.step()
    log.publish()
    log.close()
    refusals = {
        "keeps custom scores, which the table in the log": {"policy": POLICIES["custom"]},
        "table 'b' has the padding id 3, which has no row": {"padding_idx": 3},
        "table 'b' has 0 ids and a capacity of 9": {"policy": td.Policy(capacity=9)},
    }
    for message, options in refusals.items():
        other = td.DynamicEmbeddingBagCollection(
            [td.TableConfig("a", 4), td.TableConfig("b", 4, **options)], optimizer=td.SGD(lr=0.1)
        )
        follower = follow(tmp_path / "log", other)
        with pytest.raises((ValueError, RuntimeError), match=message):
            follower.update()
        assert other.sizes() == {"a": 0, "b": 0}
        assert follower.sequence == 0
    # a budget is of all tables: what one has not got is known when it is asked for
    tight = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("a", 4), td.TableConfig("b", 4)],
        optimizer=td.SGD(lr=0.1),
        memory_budget=2240,
    )
    follower = follow(tmp_path / "log", tight)
    with pytest.raises(RuntimeError, match=r"table 'b' has no room for 30 new ids"):
        follower.update()
    assert tight.sizes() == {"a": 0, "b": 0}
