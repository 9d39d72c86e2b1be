"""Live tables that follow a delta log."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from logged_models import IDS, Model, act, train

from torch_dynemb import serving
from torch_dynemb.checkpoint import DeltaLog, follow

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
    with pytest.raises(RuntimeError, match="a thread updates already"):
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
