"""The delta log of the DLRM tutorial: a follower has the rows of the job's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_dynemb as td
from tutorials.dlrm import options, train

pytestmark = [
    pytest.mark.cpu_only("the job of a tutorial, on the CPU"),
    pytest.mark.usefixtures("same_threads_afterwards", "no_report"),
]

SMALL = [
    *("--samples", "3000", "--batch-size", "256", "--embedding-dim", "4", "--threads", "1"),
    *("--no-baseline", "--progress-interval", "0", "--publish-every", "4"),
]


class Kept:
    """A target of a follower that keeps the commits."""

    def __init__(self) -> None:
        self.commits: list[td.delta_log.Commit] = []

    def check(self, commit: td.delta_log.Commit) -> None:
        assert commit.sequence == len(self.commits) + 1

    def apply(self, commit: td.delta_log.Commit) -> None:
        self.commits.append(commit)


@pytest.mark.long
@pytest.mark.parametrize("resumed", [False, True])
def test_who_follows_has_the_rows_of_the_checkpoint(
    tmp_path: Path, resumed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        *SMALL,
        "--samples-folder",
        str(tmp_path / "samples"),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--publish", str(tmp_path / "log")]
    train.main(command)
    if resumed:  # after the end there is nothing to do: the log has one more commit
        train.main([*command, "--resume"])
    capsys.readouterr()
    kept = Kept()
    td.delta_log.follow(tmp_path / "log", kept).update()
    assert [commit.sequence for commit in kept.commits] == [1, 2, 3, 4][: 3 + resumed]
    dense: dict[str, torch.Tensor] = {}
    for commit in kept.commits:
        dense |= commit.dense
    with td.checkpoint.open(tmp_path / "out" / "checkpoint") as saved:
        assert dense.keys() == saved.dense().keys()
        assert all(torch.equal(values, dense[name]) for name, values in saved.dense().items())
        for table in saved.tables.values():
            rows: dict[int, torch.Tensor] = {}
            for commit in kept.commits:
                delta = commit.tables[table.name]
                rows |= dict(zip(delta.changed.ids.tolist(), delta.changed.rows, strict=True))
            for batch in table.batches(1 << 20):
                assert set(rows) == set(batch.ids.tolist())
                assert torch.equal(torch.stack([rows[id] for id in batch.ids.tolist()]), batch.rows)


def test_files_of_rows_are_not_published(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        options.parse(["--publish", "here", "--storage", "ssd"])
    assert "--publish: here not with --storage ssd" in " ".join(capsys.readouterr().err.split())
