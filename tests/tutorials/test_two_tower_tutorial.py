"""The tutorial of two towers runs, and its sampled losses come near that of all items."""

from __future__ import annotations

import json
import sys

import pytest

from tutorials import two_tower

pytestmark = pytest.mark.cpu_only("a program that names no device")


@pytest.mark.long
def test_sampled_losses_come_near_that_of_all_items(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["two_tower", "--json"])
    two_tower.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    values = {line["loss"]: line["ndcg"] for line in lines}
    static = values[two_tower.STATIC]
    for name in ("all items", "256 uniform", "256 by frequency", "in-batch and 256 uniform"):
        assert values[name] > 0.9 * static
    assert values["in-batch, not corrected"] < 0.95 * values["in-batch"]


def test_every_loss_is_trained() -> None:
    data = two_tower.generate(30, 40, 600)
    for name in (two_tower.STATIC, *two_tower.LOSSES):
        assert 0 <= two_tower.trained(data, 8, 1, name) <= 1
