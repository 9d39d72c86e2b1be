"""Readers of live tables beside a writer: no row is torn, stale, another's or missing.

A program of their own reads millions of rows, because Python's threads rarely meet.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import live_readers

import torch_dynemb as td
from torch_dynemb import serving

pytestmark = pytest.mark.cpu_only("live tables are in the memory of the CPU")


@pytest.mark.long_cases("1-1000000", "16-10000000")
@pytest.mark.parametrize(("dim", "reads"), [(1, 10**6), (16, 10**7), (100, 10**6)])
def test_every_row_is_one_that_the_id_had(dim: int, reads: int) -> None:
    seen = live_readers.run(live_readers.build(), reads=reads, validated=True, dim=dim)
    assert seen.wrong == 0, seen
    assert seen.reads >= reads
    assert seen.writes > 1000  # while it was read
    assert seen.rehashes > 1


@pytest.mark.long_cases("100")
@pytest.mark.parametrize("dim", [16, 100])
def test_readers_that_do_not_look_get_wrong_rows(dim: int) -> None:
    """That is, the test above would see them."""
    seen = live_readers.run(live_readers.build(), reads=10**7, validated=False, dim=dim)
    assert seen.torn > 0, seen


@pytest.mark.long
def test_a_hundred_million_reads() -> None:
    seen = live_readers.run(live_readers.build(), reads=10**8, validated=True, dim=16)
    assert seen.wrong == 0, seen


@pytest.mark.long
def test_no_two_threads_meet_in_a_live_table() -> None:
    """Under ThreadSanitizer, which ends the program where they do."""
    program = live_readers.build(sanitized=True)
    seen = live_readers.run(program, reads=10**6, validated=True, dim=16)
    assert seen.wrong == 0, seen
    assert seen.writes > 1000
    assert seen.rehashes > 1


@pytest.mark.long
def test_rows_are_read_after_their_handles() -> None:
    """Under ThreadSanitizer, which ends the program where nothing orders them."""
    program = live_readers.build(live_readers.PUBLISHED, sanitized=True)
    assert live_readers.printed(program) == {"right": 4}


def test_models_run_in_threads_while_rows_change() -> None:
    """All ids change at once from version to version; a bag adds up rows of at most two of them."""
    ids = torch.arange(256)
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
    model = serving.live(bag, headroom=600)
    tables = model.frozen_tables
    assert isinstance(tables, serving.LiveTables)
    tables.update("ads", ids, torch.zeros(256, 4))
    begun, ended, stop = [0], [0], threading.Event()
    errors: list[str] = []

    def read() -> None:
        while not stop.is_set():
            least = ended[0]
            output = model(ids.reshape(32, 8))
            most = begun[0]
            whole = bool((output == output[:, :1]).all())
            inside = bool((output >= 8 * least).all()) and bool((output <= 8 * most).all())
            if not whole or not inside:
                errors.append(f"{least} to {most}: {output.tolist()}")
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for version in range(1, 400):
            begun[0] = version
            tables.update("ads", ids, torch.full((256, 4), float(version)))
            ended[0] = version
            if version % 3 == 0:  # others come and go, so that the index is rehashed
                tables.update("ads", ids + version * 256, torch.ones(256, 4))
                tables.erase("ads", ids + version * 256)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert torch.equal(model(ids.reshape(32, 8)), torch.full((32, 4), 8 * 399.0))


def test_a_second_writer_is_refused_or_waits_its_turn() -> None:
    """Whatever the threads do, no update is lost or done twice."""
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
    tables = serving.live(bag, headroom=4000).frozen_tables
    assert isinstance(tables, serving.LiveTables)
    done, refusals = [0, 0], []

    def write(first: int) -> None:
        for i in range(200):
            ids = torch.arange(10) + first + i * 10
            try:
                tables.update("ads", ids, torch.ones(10, 4))  # type: ignore[operator]
            except RuntimeError as error:
                refusals.append(str(error))
            else:
                done[first // 2000] += 10

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tables.sizes() == {"ads": sum(done)}
    assert all("another thread is changing this table" in words for words in refusals)
