"""``python -m torch_dynemb inspect``: what it says about a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_dynemb as td
from torch_dynemb.__main__ import main
from torch_dynemb.checkpoint import inspect as inspection

pytestmark = pytest.mark.cpu_only("a program, in a process of its own")


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


@pytest.mark.long
def test_as_a_command(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoint.pt", score="none")
    command = [sys.executable, "-m", "torch_dynemb", "inspect", str(path)]
    reply = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.users: optimizer Adam, step 2" in reply.stdout
    assert "scores of" not in reply.stdout


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "inspect" in capsys.readouterr().out


def test_files_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    for name, said in (
        ("linear.pt", "has no tables of torch_dynemb"),
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


NAMES = [
    "dim4",
    "dimension",
    "tables",
    "format",
    "a.b",
    "clock",
    "dim4.weights",
    "a.format",
    "dim8",
]


def named() -> td.DynamicEmbeddingBagCollection:
    """Tables with the names of entries, and of their beginnings."""
    torch.manual_seed(3)
    module = td.DynamicEmbeddingBagCollection(
        [
            td.TableConfig(name, 4, policy=td.Policy(score="step", admission=td.AdmitFrequent(1)))
            for name in NAMES
        ],
        optimizer=td.Adam(lr=0.1),
    )
    ids = {name: torch.arange(10 * k + 10)[None] for k, name in enumerate(NAMES)}
    module(ids).sum().backward()
    module.optimizer.step()
    return module


@pytest.mark.parametrize("prefix", ["", "format.", "dim4.", "a.b."])
def test_tables_named_as_entries_are_counted_exactly(prefix: str) -> None:
    state = {f"{prefix}{name}": tensor for name, tensor in named().state_dict().items()}
    state |= {f"{prefix}dim4.other": torch.zeros(9999), f"{prefix}dimmer": torch.zeros(9999)}
    state["head.format"] = torch.zeros(3)
    (group,) = inspection.saved_groups(state)
    assert group.prefix == prefix.rstrip(".")
    said = inspection.describe(group)
    rows = sum(10 * k + 10 for k in range(len(NAMES)))
    assert f"rows and optimizer state: {rows * (3 * 4 * 4 + 4) / 1024:.1f} KiB" in said
    for k, name in enumerate(NAMES):
        line = next(line.split() for line in said.splitlines() if line.split()[:1] == [name])
        assert line[:4] == [name, "4", "float32", str(10 * k + 10)]


def test_tables_named_as_entries_are_saved_extended_and_loaded() -> None:
    module, twin = named(), named()
    twin.load_state_dict(module.state_dict())
    for one in (module, twin):
        one.group.erase(0, torch.arange(3))
        one.group.compact()
        one.add_table(td.TableConfig("dim4.buckets", 4, policy=td.Policy(score="frequency")))
        one.set_optimizer(td.SGD(lr=0.1))
    states = module.group.state.tensors(), twin.group.state.tensors()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert module.sizes() == {
        **{name: 10 * k + 10 - 3 * (k == 0) for k, name in enumerate(NAMES)},
        "dim4.buckets": 0,
    }
    ids = torch.arange(20)
    for table in range(len(NAMES)):
        assert torch.equal(module.group.read(table, ids), twin.group.read(table, ids))


def test_damaged_checkpoints_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = dict(named().state_dict())
    path = tmp_path / "damaged.pt"

    def said(**changes: torch.Tensor) -> str:
        torch.save({**state, **changes}, path)
        assert main(["inspect", str(path)]) == 1
        return capsys.readouterr().err

    def text(description: str) -> torch.Tensor:
        return torch.tensor(list(description.encode()), dtype=torch.uint8)

    assert "'format' is corrupted" in said(format=torch.zeros(3))
    assert "'format' is corrupted" in said(format=text("{"))
    assert "'format' is damaged" in said(format=text('{"tables": 3}'))
    assert "'format' is damaged" in said(format=text("[]"))
    assert "are inconsistent" in said(tables=torch.zeros(2))
    del state["dim4.weights"]
    assert "lack ['dim4.weights']" in said()


class _Pickled:
    pass


@pytest.mark.parametrize("kind", ["pickle", "text", "empty", "folder of nothing", "not UTF-8"])
@pytest.mark.parametrize(
    "command", [["inspect"], ["checkpoint", "inspect"], ["checkpoint", "verify"]]
)
def test_commands_refuse_other_files_in_a_line(
    command: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("\udcff" if kind == "not UTF-8" else "file")
    if kind in ("pickle", "not UTF-8"):
        torch.save({"a": _Pickled()}, path)
    elif kind == "folder of nothing":
        path.mkdir()
    else:
        path.write_text("" if kind == "empty" else "some text\n" * 100)
    assert main([*command, str(path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert len(told.splitlines()) == 1
