"""One of two ranks dies in a save: the other fails soon, and one checkpoint is there."""

from __future__ import annotations

from pathlib import Path

import killed_ranks
import pytest
from killed_ranks import Point
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("is about files, which know no device")


def check_points(ranks: Ranks, folder: Path, step: int) -> None:
    """Kills each rank in turn at every so manyth call, and at the first one's last calls."""
    calls = ranks.run(killed_ranks.calls, str(folder))
    points = [
        Point(victim, number)
        for victim, of_rank in enumerate(calls)
        for number in range(1, len(of_rank) + 1)
        if number % step == 0 or (victim == 0 and number > len(of_rank) - 5)
    ]
    results = ranks.run(killed_ranks.killed, str(folder), points)
    for (victim, number), *of_ranks in zip(points, *results, strict=True):
        where = f"rank {victim}, call {number} ({calls[victim][number - 1]})"
        assert of_ranks[victim][0] == "Killed", where
        assert of_ranks[1 - victim][0] in ("RuntimeError", "DistBackendError"), where
        epochs = {epoch for _, epoch in of_ranks}
        assert len(epochs) == 1, where
        # a crash before the second rename of the first rank leaves the old one
        renames = victim == 0 and number > len(calls[0]) - 4
        assert epochs <= ({0, 1} if renames else {0}), where


@pytest.mark.long
def test_one_of_two_ranks_dies(two_ranks: Ranks, tmp_path: Path) -> None:
    check_points(two_ranks, tmp_path, 5)


@pytest.mark.long
def test_one_of_two_ranks_dies_at_any_call(two_ranks: Ranks, tmp_path: Path) -> None:
    check_points(two_ranks, tmp_path, 1)


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_are_told_that_one_has_no_room(
    victim: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    told = two_ranks.run(killed_ranks.without_room, str(tmp_path), victim)
    assert told[0] == told[1]
    message, left = told[0]
    assert "bytes are free: make room" in message
    assert f"/r00{victim}-of-002" in message
    assert left == ["last"]
