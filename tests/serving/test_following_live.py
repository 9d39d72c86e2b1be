"""Live tables that follow a delta log."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Literal

import pytest
import torch
from logged_models import IDS, Model, act, train
from publishing import FailingChanges
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log, ops, serving
from torch_dynemb.delta_log import DeltaLog, follow
from torch_dynemb.ops.columns import RowFormat

pytestmark = pytest.mark.cpu_only("live tables are on the CPU")


def test_live_tables_follow_and_refuse_what_they_have_no_room_for(tmp_path: Path) -> None:
    generator = torch.Generator(device="cpu").manual_seed(5)
    model = Model()
    train(model, generator)
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    live = serving.live(model, headroom=IDS)
    small = serving.live(model, headroom=2)
    follower = follow(tmp_path / "log", live)
    refused = follow(tmp_path / "log", small)
    a, b, one = (torch.arange(IDS).view(-1, 1) for _ in range(3))
    before = small.bags({"a": a, "b": b}), small.one(one)
    for _ in range(8):
        for _ in range(3):
            act(model, generator)
        log.publish()
        log.flush()
        assert follower.update() == 1
        model.eval()
        expected = model.bags({"a": a, "b": b}), model.one(one)
        assert torch.equal(live.bags({"a": a, "b": b}), expected[0])
        assert torch.equal(live.one(one), expected[1])
        model.train()
    with pytest.raises(serving.NoHeadroomError):
        refused.update()
    assert refused.sequence == 0
    assert torch.equal(small.bags({"a": a, "b": b}), before[0])
    assert torch.equal(small.one(one), before[1])
    log.close()


def answers(model: torch.nn.Module) -> Tensor:
    """What a model gives for all ids."""
    ids = torch.arange(IDS).view(-1, 1)
    with torch.no_grad():
        output: Tensor = model(ids, ids, ids)
    return output


def of_trainer(model: Model) -> Tensor:
    result = answers(model.eval())
    model.train()
    return result


@pytest.mark.long
def test_the_dense_part_follows_and_no_run_reads_two_versions(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    model = Model()
    train(model, generator)
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    live, keeping = serving.live(model, headroom=IDS), serving.live(model, headroom=IDS)
    follower = follow(tmp_path / "log", live)
    follow(tmp_path / "log", live)  # runs take turns with both
    keeps = follow(tmp_path / "log", keeping, dense="keep")
    expected, seen = {of_trainer(model).numpy().tobytes()}, []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            seen.append(answers(live).numpy().tobytes())

    readers = [threading.Thread(target=run) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(15):
            train(model, generator)
            log.publish()
            log.flush()
            expected.add(of_trainer(model).numpy().tobytes())
            assert follower.update() == 1
            assert torch.equal(answers(live), of_trainer(model))
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert len(seen) > 0
    assert set(seen) <= expected
    assert keeps.update() == 15
    assert (keeps.dense_behind, follower.dense_behind) == (15, 0)
    assert not torch.equal(answers(keeping), of_trainer(model))
    keeping.dense.load_state_dict(model.dense.state_dict())
    assert torch.equal(answers(keeping), of_trainer(model))
    log.close()


def test_a_run_that_raises_lets_commits_in(tmp_path: Path) -> None:
    model = Model()
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    live = serving.live(model, headroom=IDS)
    follower = follow(tmp_path / "log", live)
    with pytest.raises(TypeError, match="expected int64 or int32 ids"):
        live(torch.ones(2), torch.ones(2), torch.ones(2))
    other = copy.deepcopy(live)  # which has turns of its own
    train(model, torch.Generator().manual_seed(5))
    log.publish()
    log.close()
    assert follower.update() == 1
    assert torch.equal(answers(live), of_trainer(model))
    assert not torch.equal(answers(other), of_trainer(model))


@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_any_table_leaves_the_commit_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    model = Model()
    log = DeltaLog(tmp_path / "log")
    for _ in range(8):
        train(model, generator)
    log.attach(model)
    live = serving.live(model, headroom=IDS)
    follower = follow(tmp_path / "log", live)
    before = answers(live)
    sizes = [tables.sizes() for tables in serving.live_tables(live).values()]
    for _ in range(3):
        train(model, generator)
    model.bags.group.erase(1, torch.arange(0, IDS, 2))
    log.publish()
    log.close()
    failing = FailingChanges(monkeypatch, late=late)
    for fails_at in range(1, 20):
        failing.fail(fails_at)
        try:
            follower.update()
        except OSError:
            assert torch.equal(answers(live), before), fails_at
            assert [tables.sizes() for tables in serving.live_tables(live).values()] == sizes
            assert follower.sequence == 0
        else:
            break
    assert fails_at == 5  # three tables and the dense part
    assert follower.sequence == 1
    assert torch.equal(answers(live), of_trainer(model))


def test_an_error_leaves_quantized_rows_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = torch.randn(200_000, 4, generator=torch.Generator().manual_seed(5))
    once, twice = given, given
    for _ in range(2):
        packed = ops.quantize_rows(twice, RowFormat.INT8)
        once, twice = twice, ops.dequantize_rows(packed, RowFormat.INT8, 4)
    given = given[(once != twice).any(1)][:20]  # such rows change if they are quantized again
    ids = torch.arange(len(given))
    assert len(ids) > 5
    model = Model()
    model.bags.group.insert_or_assign(1, ids, given)
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    live = serving.live(model, headroom=IDS, rows="int8")
    follower = follow(tmp_path / "log", live)
    before = live.bags({"a": ids.view(-1, 1), "b": ids.view(-1, 1)})
    model.bags.group.erase(1, ids[::2])
    model.bags.group.insert_or_assign(1, ids[1::2], given[::2][: len(ids) // 2])
    model.one(torch.arange(IDS))  # most changes, so it comes last
    log.publish()
    log.close()
    failing = FailingChanges(monkeypatch, late=False)
    failing.fail(3)  # after the dense part and the first table
    with pytest.raises(OSError, match="injected"):
        follower.update()
    assert torch.equal(live.bags({"a": ids.view(-1, 1), "b": ids.view(-1, 1)}), before)
    assert follower.update() == 1
    assert not torch.equal(live.bags({"a": ids.view(-1, 1), "b": ids.view(-1, 1)}), before)


def test_dense_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = Model()
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    live = serving.live(model, headroom=IDS)
    live.dense = torch.nn.Linear(3, 1)
    follower = follow(tmp_path / "log", live)
    train(model, torch.Generator().manual_seed(5))
    log.publish()
    log.close()
    with pytest.raises(ValueError, match=r"'dense.weight' of torch.float32 \(1, 16\), and"):
        follower.update()
    live.dense = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"'dense.weight', of which the model has none.*'keep'"):
        follower.update()
    assert follower.sequence == 0
    with pytest.raises(ValueError, match="follow: dense is None, expected 'follow' or 'keep'"):
        follow(tmp_path / "log", live, dense=None)  # type: ignore[arg-type]


def test_rows_that_a_format_cannot_hold_refuse_the_commit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    model = Model()
    train(model, generator)
    log = DeltaLog(tmp_path / "log", dense=False)
    log.attach(model)
    live = serving.live(model, headroom=IDS, rows="int8")
    follower = follow(tmp_path / "log", live)
    ids = torch.arange(IDS).view(-1, 1)
    before = live.bags({"a": ids, "b": ids}), live.one(ids)
    model.bags.group.insert_or_assign(0, torch.tensor([1]), torch.ones(1, 4))
    model.one.group.insert_or_assign(0, torch.tensor([1]), torch.full((1, 8), torch.nan))
    log.publish()
    log.flush()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="with NaN, infinity, or a range that no"):
            follower.update()
    assert torch.equal(live.bags({"a": ids, "b": ids}), before[0])
    assert torch.equal(live.one(ids), before[1])
    log.close()


def test_a_thread_follows_until_it_is_stopped_or_fails(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    model = Model()
    log = DeltaLog(tmp_path / "log", every_seconds=1e-9)
    log.attach(model)
    live = serving.live(model, headroom=IDS)
    follower = follow(tmp_path / "log", live)
    with pytest.raises(ValueError, match="every_seconds is 0"):
        follower.start(0)
    follower.start(0.001)
    with pytest.raises(RuntimeError, match="a thread is updating already"):
        follower.start()
    for step in range(1, 4):
        train(model, generator)
        assert log.step(100 + step) == step
        while follower.step != 100 + step:
            follower.check()
    follower.stop()
    follower.stop()
    small = follow(tmp_path / "log", serving.live(Model(), headroom=0))
    small.start()
    assert small._thread is not None
    small._thread.join(60)
    with pytest.raises(serving.NoHeadroomError):
        small.check()
    with pytest.raises(serving.NoHeadroomError):
        small.stop()
    log.close()


def test_a_live_copy_takes_the_rows_of_increments(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = td.DynamicEmbedding(4, name="ids", optimizer=td.SGD(lr=0.1))
    model(torch.arange(20)).sum().backward()
    model.optimizer.step()
    checkpoint.record_changes(model)
    checkpoint.save(tmp_path / "base", model)
    served = serving.live(model, headroom=10)
    model(torch.tensor([3, 21])).sum().backward()
    model.optimizer.step()
    model.group.erase(0, torch.tensor([5]))
    checkpoint.save(tmp_path / "one", model, since=tmp_path / "base")
    with pytest.raises(ValueError, match="is an increment"):
        delta_log.follow(tmp_path / "one", served, base=tmp_path / "base")
    follower = delta_log.follow(tmp_path / "one", served, base=tmp_path / "base", dense="keep")
    assert follower.update() == 1
    asked = torch.arange(22)
    assert torch.equal(served(asked), model.eval()(asked))


@pytest.mark.parametrize("kind", ["int8", "fp16", "int4", None])
@pytest.mark.parametrize("form", ["int8", "fp16"])
def test_rows_in_other_forms(
    form: Literal["int8", "fp16"], kind: Literal["int8", "fp16", "int4"] | None, tmp_path: Path
) -> None:
    """Rows of int8 are taken as they are by tables of int8, and as floats by others."""
    torch.manual_seed(0)
    model = td.DynamicEmbedding(16, optimizer=td.SGD(lr=0.1), name="items")
    model(torch.arange(30)).sum().backward()
    model.optimizer.step()
    served = serving.live(model, rows=kind, headroom=100)
    expected = serving.live(model, rows=kind, headroom=100)
    with DeltaLog(tmp_path / "log", rows=form) as log:
        log.attach(model)
        follower = follow(tmp_path / "log", served)
        ids = torch.arange(10, 40)
        rows = model(ids)
        (rows * torch.randn_like(rows)).sum().backward()
        model.optimizer.step()
        log.publish()
    assert follower.update() == 1
    values = model.eval()(ids).detach()
    if form == "fp16":
        values = values.half().float()
    else:
        packed = ops.quantize_rows(values, RowFormat.INT8)
        values = ops.dequantize_rows(packed, RowFormat.INT8, 16)
    if form == kind == "int8":
        assert torch.equal(served(ids), values)  # not quantized a second time
    else:
        expected.frozen_tables.update("items", ids, values)
        assert torch.equal(served(ids), expected(ids))
