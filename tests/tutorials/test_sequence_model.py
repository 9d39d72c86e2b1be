"""The tutorial of a sequence model: from the command line, compiled, and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Ranks

from tutorials import sequence_model
from tutorials.sequence.data import LONGEST, Batch, ClickStream
from tutorials.sequence.options import parse
from tutorials.sequence.train import Trained, train

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")

KEYS = [
    *("auc", "baseline_auc", "best_auc", "history", "ids"),
    *("steps", "samples", "seconds", "world_size", "compiled"),
]
SMALL = ["--steps", "12", "--batch-size", "64", "--embedding-dim", "4", "--log-every", "1"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(*arguments: str, history: bool = True) -> Trained:
    return train(parse([*SMALL, *arguments]), "test", history=history)


def trained_on_rank(_: int, *arguments: str) -> Trained:
    return trained(*arguments)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict:
    sequence_model.main([*SMALL, *map(str, arguments)])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.long
def test_history_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learning = ["--steps", "160", "--batch-size", "384", "--embedding-dim", "8", "--lr", "0.03"]
    result = run(capsys, *learning, "--out", tmp_path)
    assert list(result) == KEYS
    assert 0.53 < result["baseline_auc"] < 0.68
    assert result["baseline_auc"] + 0.05 < result["auc"] < result["best_auc"] < 0.95
    assert 300 < result["ids"]["item"] <= 300 + 160 + 30
    assert result["samples"] == 160 * 384
    assert (result["world_size"], result["compiled"]) == (1, False)
    assert [path.name for path in tmp_path.iterdir()] == ["training.png"]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_history_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = run(capsys, "--out", tmp_path)
    alone = run(capsys, "--out", tmp_path, "--no-history")
    assert alone["baseline_auc"] is None
    assert alone["history"] is False
    assert alone["auc"] == both["baseline_auc"] != both["auc"]


def test_seed_decides_everything() -> None:
    first, again, other = (trained("--seed", seed) for seed in ("3", "3", "4"))
    assert first.points == again.points != other.points
    assert first[1:4] == again[1:4]


def assert_same(ours: Trained, expected: Trained) -> None:
    assert len(ours.points) == len(expected.points) == 12
    for point, other in zip(ours.points, expected.points, strict=True):
        assert point.loss == pytest.approx(other.loss, rel=1e-5)
    assert ours.auc == pytest.approx(expected.auc, abs=2e-3)
    assert ours.ids == expected.ids


def test_two_ranks_do_the_steps_of_one(two_ranks: Ranks) -> None:
    arguments = ["--lr", "0.05"]
    result, other = two_ranks.run(trained_on_rank, *arguments)
    expected = trained(*arguments)
    assert_same(result, expected)
    assert other.points == result.points


@pytest.mark.long
def test_compiled_in_one_graph() -> None:
    """Also for batches with other numbers of clicks."""
    torch.compiler.reset()
    expected = trained()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(trained("--compile"), expected)


@pytest.mark.long
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_default_run(nproc: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sequence_model.main(["--nproc", nproc, "--out", str(tmp_path)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["world_size"] == int(nproc)
    assert result["auc"] == pytest.approx(0.7825, abs=2e-3)
    assert result["baseline_auc"] == pytest.approx(0.6244, abs=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nproc 3", "argument --batch-size: 64, expected a multiple of 3, the number of"),
        ("--nproc 2 --compile", "argument --compile: not with 2 processes"),
        ("--steps 0", "argument --steps: expected an integer from 1 on, got '0'"),
        ("--lr nan", "argument --lr: expected a number above 0, got 'nan'"),
        ("--seed -1", "argument --seed: -1, expected 0 or more"),
    ],
)
def test_options_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*SMALL, *arguments.split()])
    assert message in capsys.readouterr().err


# -- the generated clicks --------------------------------------------------------------------------


def rows(batch: Batch) -> list[list[int]]:
    return [part.tolist() for part in batch.history.tensor_split(batch.offsets[1:-1])]


def test_parts_are_the_whole_batch() -> None:
    stream = ClickStream(seed=0, batch_size=12)
    for _ in range(20):
        whole = stream.next_batch()
    parts = [whole.part(number, 3) for number in range(3)]
    for name in ("users", "candidates", "history", "recency", "labels", "chances"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
    assert [row for part in parts for row in rows(part)] == rows(whole)
    assert all(part.offsets[0] == 0 for part in parts)


def test_history_is_what_a_user_has_clicked() -> None:
    """Every click is the first of the user's next history, before what was there."""
    stream = ClickStream(seed=1, batch_size=16)
    known: dict[int, list[int]] = {}
    longest = seen_before = 0
    for _ in range(600):
        batch = stream.next_batch()
        assert len(set(batch.users.tolist())) == 16
        recency = batch.recency.tensor_split(batch.offsets[1:-1])
        assert all((part.diff() <= 0).all() and 0 < part[0] <= 1 for part in recency)
        for user, candidate, label, row in zip(
            batch.users.tolist(),
            batch.candidates.tolist(),
            batch.labels.tolist(),
            rows(batch),
            strict=True,
        ):
            if user in known:
                assert row == known[user]
                seen_before += 1
            assert 1 <= len(row) <= LONGEST
            longest = max(longest, len(row))
            known[user] = [*([candidate] if label else []), *row][:LONGEST]
    assert seen_before > 600 * 16 / 2
    assert longest > 20


def test_clicks_happen_as_planted() -> None:
    stream = ClickStream(seed=2, batch_size=256)
    batches = [stream.next_batch() for _ in range(40)]
    chances = torch.cat([batch.chances for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    for low in (0.0, 0.25, 0.5, 0.75):
        part = (chances >= low) & (chances < low + 0.25)
        deviation = (chances[part] * (1 - chances[part])).sum().sqrt() / part.sum()
        assert abs(labels[part].mean() - chances[part].mean()) < 4 * deviation
