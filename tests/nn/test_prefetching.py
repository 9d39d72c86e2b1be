"""``td.prefetched`` asks for the rows of later batches, each once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_dynemb as td

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_batches_are_prefetched_in_order(ahead: int, count: int) -> None:
    calls: list[str] = []
    for batch in td.prefetched(range(count), lambda b: calls.append(f"fetch {b}"), ahead=ahead):
        calls.append(f"train {batch}")

    assert [c for c in calls if c.startswith("train")] == [f"train {b}" for b in range(count)]
    fetched = [c for c in calls if c.startswith("fetch")]
    assert fetched == [f"fetch {b}" for b in range(1, count)]
    for batch in range(1, count):
        before = calls[: calls.index(f"fetch {batch}")]
        assert len([c for c in before if c.startswith("train")]) == max(batch - ahead, 0)


def test_a_batch_is_taken_from_the_loader_when_it_is_needed() -> None:
    taken: list[int] = []

    def loader() -> Iterator[int]:
        for i in range(9):
            taken.append(i)
            yield i

    batches = td.prefetched(loader(), lambda batch: None, ahead=2)
    assert taken == []
    next(batches)
    assert taken == [0, 1, 2]
    next(batches)
    assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize(("ahead", "error"), [(0, ValueError), (1.5, TypeError)])
def test_a_wrong_distance_is_refused_before_the_loop(ahead: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="prefetched: ahead"):
        td.prefetched([1, 2], print, ahead=ahead)
