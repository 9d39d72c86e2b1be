"""The comparison of initial rows: its interactions can be learned, its command prints a table."""

from __future__ import annotations

import sys

import pytest

import torch_dynemb as td
from tutorials import initial_rows

pytestmark = pytest.mark.cpu_only("a tutorial")


def test_interactions_can_be_learned() -> None:
    data = initial_rows.generate(users=60, items=80, count=3000)
    optimizer = td.Adagrad(lr=0.1)
    chance = initial_rows.LAST / 80
    assert initial_rows.recall(data, 8, td.Uniform(-0.3, 0.3), optimizer) > 1.5 * chance


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--users", "20", "--items", "30", "--interactions", "300"]
    monkeypatch.setattr(sys, "argv", ["", *sizes, "--dims", "4", "--optimizers", "SGD"])
    initial_rows.main()
    heading, line = capsys.readouterr().out.splitlines()
    assert "Normal(0, 1)" in heading
    assert line.split()[:2] == ["SGD", "D=4"]
    assert len(line.split()) == 2 + len(initial_rows.INITIALIZERS)
