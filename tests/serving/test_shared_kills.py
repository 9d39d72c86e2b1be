"""Tables that processes share, one of which changes them and is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from forked import ended, forked, kill_at
from packaged import HEADROOM, SmallModel
from publishing import answer, new_trainer, publish, train
from shared_tables import Dense, U, assert_same, pooled, rows_of
from torch import Tensor

from torch_dynemb import serving

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")

CHANGED = ("shared_versions.py", "shared_memory.py", "shared_folder.py", "whole_commits.py")


class Commits:
    """A log of three commits, and what a model answers after each of them."""

    def __init__(self, package: Package, folder: Path) -> None:
        self.path = folder / "log"
        model, publisher = new_trainer(package, self.path)
        self.answers, self.rows = [answer(model)], [self._rows(model)]
        with publisher:
            for number in (1, 2, 3):
                train(model, number, dense=True)
                publish(publisher)
                self.answers.append(answer(model))
                self.rows.append(self._rows(model))
        self.ids = torch.arange(200)

    @staticmethod
    def _rows(model: SmallModel) -> Tensor:
        ids = torch.arange(200)
        given = {"u": (ids, torch.arange(201)), "v": torch.zeros(200, 3, dtype=torch.int64)}
        return answer(model, (given, torch.zeros(200, 1)))[1][:, :8]

    def check(self, served: serving.ServedModel, *, dense: bool, whole: bool) -> None:
        """Check that a model has the commit of its number, or else rows of commits about it."""
        at = served.sequence or 0
        if whole:
            assert_same(served, self.answers[at], dense=dense)
        found = rows_of(served, self.ids)
        known = [(found == rows).all(1) for rows in self.rows[at : at + 2]]
        assert bool(torch.stack(known).any(0).all())


def check_kill(package: Package, commits: Commits, place: Path, dense: Dense, line: int) -> bool:
    """Kill a writer at a line; return whether it had not ended before.

    Others then have whole rows, and with ``dense="follow"`` a whole version; the next writer leads
    all of them to the last commit.
    """
    path = package.path

    def write() -> None:
        kill_at(line, CHANGED)
        with serving.load(path, shared_memory=place, follow=commits.path, dense=dense) as writer:
            writer.follower.update(until=1)
            writer.follower.update(until=2)

    with serving.load(path, shared_memory=place) as reader:
        status = ended(forked(write))
        assert status in (0, -signal.SIGKILL), line
        commits.check(reader, dense=False, whole=status == 0 or dense == "follow")
        with serving.load(path, shared_memory=place) as late:
            commits.check(late, dense=False, whole=status == 0 or dense == "follow")
            before = reader.sequence or 0
            with serving.load(
                path, shared_memory=place, follow=commits.path, dense=dense
            ) as writer:
                for served in (writer, reader, late):
                    assert (served.sequence or 0) >= before, line
                    commits.check(served, dense=dense == "follow", whole=True)
                writer.follower.update()
                for served in (writer, reader, late):
                    assert served.sequence == 3
                    commits.check(served, dense=dense == "follow", whole=True)
                ids = torch.arange(10_000, 10_000 + writer.stats()[U].free_rows)
                writer.apply(U, ids, torch.ones(ids.numel(), 8))  # no row was lost
                assert writer.stats()[U].free_rows == 0
                assert bool((rows_of(reader, ids) == 1).all())
    assert not list(place.iterdir()), line
    return status != 0


@pytest.mark.long
@pytest.mark.parametrize("dense", ["keep", "follow"])
def test_a_writer_that_is_killed_at_any_line(
    live_package: Package, place: Path, tmp_path: Path, dense: Dense
) -> None:
    commits = Commits(live_package, tmp_path)
    killed = 0
    for line in range(1, 10_000, 13):  # once it was each line
        if not check_kill(live_package, commits, place, dense, line):
            break
        killed += 1
    assert killed > 15


@pytest.mark.long
@pytest.mark.parametrize("dense", ["keep", "follow"])
def test_a_writer_that_is_killed_at_any_time(
    live_package: Package, place: Path, tmp_path: Path, dense: Dense
) -> None:
    """Rows of one value each, which a process writes and removes in turn until it is killed."""
    path, log = live_package.path, tmp_path / "log"
    new_trainer(live_package, log)[1].close()
    ids = torch.arange(20_000, 20_000 + HEADROOM)

    def write() -> None:
        with serving.load(path, shared_memory=place, follow=log, dense=dense) as writer:
            for value in range(1, 1 << 20):
                writer.apply(U, ids, torch.full((HEADROOM, 8), float(value)))
                writer.erase(U, ids[value % 7 :: 7])

    torch.manual_seed(0)
    seen = 0
    with serving.load(path, shared_memory=place) as reader:
        missing = rows_of(reader, ids)
        base = pooled(reader)
        for _ in range(40):
            writer = forked(write)
            for _ in range(int(torch.randint(1, 400, ()))):
                found = rows_of(reader, ids)
                there = (found == found[:, :1]).all(1) & (found == found.round()).all(1)
                assert bool((there | (found == missing).all(1)).all())
                written = found[there & (found[:, 0] > 0), 0]
                seen += written.numel()
                if dense == "follow":  # a run reads one version
                    assert written.unique().numel() <= 1
            os.kill(writer, signal.SIGKILL)
            assert ended(writer) == -signal.SIGKILL
            with serving.load(path, shared_memory=place, follow=log, dense=dense) as new:
                new.erase(U, ids)
                assert new.stats()[U].free_rows == HEADROOM
                new.apply(U, ids, torch.full((HEADROOM, 8), 3.0))
                assert bool((rows_of(reader, ids) == 3).all())
                new.erase(U, ids)
                assert torch.equal(rows_of(reader, ids), missing)
                assert torch.equal(pooled(reader), base)
    assert seen > 1000
    assert not list(place.iterdir())
