"""``python -m torch_dynemb inspect``: what it says about a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_dynemb as td
from torch_dynemb import inspection
from torch_dynemb.__main__ import main


def saved(path: Path, score: str = "step") -> Path:
    """Two modules in a checkpoint with other things in it."""
    users = td.DynamicEmbedding(
        8,
        name="users",
        optimizer=td.Adam(lr=0.1),
        policy=td.Policy(score=score),  # type: ignore[arg-type]
    )
    pairs = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("items", 4), td.TableConfig("ads", 2)], optimizer=td.SGD(lr=0.1)
    )
    for first in (0, 50):
        users(torch.arange(first, first + 100)).sum().backward()
        users.optimizer.step()
    pairs({"items": torch.arange(7)[None], "ads": torch.arange(3)[None]}).sum().backward()
    pairs.group.erase(0, torch.arange(2))
    model = nn.ModuleDict({"users": users, "pairs": pairs, "top": nn.Linear(2, 1)})
    torch.save({"model": model.state_dict(), "epoch": 4}, path)
    return path


def test_a_checkpoint_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved(tmp_path / "checkpoint.pt"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model.users: optimizer Adam, step 2, format 3"
    assert lines[2].split()[:3] == ["users", "8", "float32"]
    assert lines[2].split()[3] == "150"
    assert lines[2].split()[5:8] == ["150", "0", "0"]
    assert lines[2].split()[-3:] == ["step", "-", "-"]
    assert "rows and optimizer state: 14.6 KiB" in lines[3]  # 150 * (3 * 8 * 4 + 4) bytes
    assert lines[5:8] == [
        "step of users:",
        "0   50  ####################",
        "1  100  ########################################",
    ]
    assert "model.pairs: optimizer SGD, step 0, format 3" in lines
    items = next(line.split() for line in lines if line.startswith("items"))
    assert items[:4] + items[5:8] == ["items", "4", "float32", "5", "7", "0", "2"]


def test_as_a_command(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoint.pt", score="none")
    command = [sys.executable, "-m", "torch_dynemb", "inspect", str(path)]
    reply = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.users: optimizer Adam, step 2" in reply.stdout
    assert "scores of" not in reply.stdout
    reply = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, check=True)
    assert "inspect" in reply.stdout


def test_files_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    for name, said in (
        ("linear.pt", "holds no table of torch_dynemb"),
        ("text.pt", "cannot be read as a checkpoint"),
        ("absent.pt", "cannot be read as a checkpoint"),
    ):
        assert main(["inspect", str(tmp_path / name)]) == 1
        assert said in capsys.readouterr().err


def test_histogram_of_any_scores() -> None:
    assert inspection.histogram(torch.empty(0, dtype=torch.int64)) == ["no ids"]
    assert inspection.histogram(torch.tensor([5, 5])) == ["5  2  " + "#" * 40]
    extremes = inspection.histogram(torch.tensor([-(2**63), 0, 2**63 - 1]))
    assert len(extremes) == inspection.BINS
    assert extremes[0].startswith(f"{-(2**63)} - ")
    assert extremes[-1].split()[2:4] == [str(2**63 - 1), "1"]
    spread = inspection.histogram(torch.arange(25))
    assert [int(line.split()[3]) for line in spread[:-1]] == [3] * (len(spread) - 1)
