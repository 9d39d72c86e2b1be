"""Prefetches on a stream of their own: every wait between streams is there, and needed.

Work of the emulator's streams is done as late as possible. The same calls on one stream leave the
same bits in every tensor. One wait less, and they do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from emulated_groups import EmulatedMemory, emulated_cuda
from emulator.mode import (
    Stream,
    forbidden_calls,
    ignore_wait,
    set_capturing,
    set_lazy,
    waits,
)
from execution import threads
from group_calls import same_bits
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops

pytestmark = pytest.mark.own_device

MAX_ROWS = 600
IDS = torch.arange(200)
GRADIENT = torch.linspace(-1, 1, 4 * 200).reshape(-1, 4)
EVENT = "cudaStreamWaitEvent"
STREAM = "cudaStreamSynchronize"


@pytest.fixture(autouse=True)
def no_setting_after_a_test() -> Iterator[None]:
    with threads(1):
        yield
    for name in (EVENT, STREAM):
        ignore_wait(name, 0)
    set_lazy(None)
    set_capturing(False)


@functools.cache
def streams() -> tuple[Stream, Stream]:
    """Of training, and of another part of a program."""
    return Stream.new(), Stream.new()


class Program:
    """Training of a table with a cache for some of its rows.

    Args:
        ignored: the name of a wait to leave out, and its number after :meth:`mark`.
    """

    def __init__(self, ignored: tuple[str, int] | None) -> None:
        self.ignored = ignored
        self.kept: list[Tensor] = []
        self.table = td.DynamicEmbedding(
            4,
            name="t",
            optimizer=td.Adam(lr=0.1),
            initializer=td.Uniform(-1.0, 1.0),
            storage=td.HostStore(cache="40 rows"),
            max_rows=MAX_ROWS,
        )
        self.train(IDS[:60])

    def mark(self) -> None:
        """The wait to leave out is one of those after this call."""
        if self.ignored is not None:
            ignore_wait(*self.ignored)

    def look_up(self, ids: Tensor) -> Tensor:
        output = self.table(ids)
        self.kept.append(output)
        return output

    def train(self, ids: Tensor) -> None:
        output = self.look_up(ids)
        output.backward(GRADIENT[: len(ids)])
        self.table.optimizer.step()

    @property
    def index(self) -> ops.IndexTensors:
        return self.table.group.index

    def content(self) -> list[Tensor]:
        """Used parts of all tensors of the cache and the rows, and of the index."""
        tiers = self.table.group.tables.tiers
        assert tiers is not None
        places, slots, free_slots, clock = tiers.tensors
        used, rows = int(clock[1, ops.columns.Tier.USED]), int(self.index.slabs[0, 0])
        numbers = torch.cat([torch.arange(used), len(slots[0]) + torch.arange(rows)])
        group = self.table.group
        tensors = [places[0][:rows], slots[0][:used], free_slots[0][:used], clock]
        tensors += [tensor[numbers] for tensor in (*group.rows.weights, *group.rows.generations)]
        buckets = int(self.index.tables[0, ops.columns.Table.BUCKET_COUNT])
        return [tensor.clone() for tensor in (*tensors, self.index.buckets[:buckets])]


def lookup_after_prefetch(program: Program) -> None:
    program.table.prefetch(IDS[20:60])
    program.mark()
    program.train(IDS[20:60])


def step_after_prefetch(program: Program) -> None:
    output = program.look_up(IDS[30:60])
    program.table.prefetch(IDS[:10])
    output.backward(GRADIENT[:30])
    program.mark()
    program.table.optimizer.step()
    program.train(IDS[:60])


def prefetch_after_lookup(program: Program) -> None:
    """The prefetch is called on a third stream, as TorchRec's pipelines do."""
    output = program.look_up(IDS[60:100])
    with streams()[1].chosen():
        program.mark()
        program.table.prefetch(IDS[60:80], ahead=2)
    output.backward(GRADIENT[:40])
    program.table.optimizer.step()


def prefetch_of_computed_ids(program: Program) -> None:
    ids = torch.zeros(20, dtype=torch.int64)
    program.kept.append(ids)
    Stream.current().copy_(ids, IDS[:20])
    program.mark()
    program.table.prefetch(ids)
    program.table.optimizer.step()


def erasure_after_prefetch(program: Program) -> None:
    program.table.prefetch(IDS[:20])
    program.mark()
    program.kept.append(ops.erase_(program.index, IDS[:10], IDS[:0], [0]))
    program.table.optimizer.step()


def reading_after_prefetch(program: Program) -> None:
    program.table.prefetch(IDS[:20])
    program.mark()
    program.kept.append(program.table.group.find(IDS, IDS[:0], [0]).handles)
    program.train(IDS[20:60])


CASES: list[tuple[Callable[[Program], None], str, int]] = [
    (lookup_after_prefetch, EVENT, 1),
    (step_after_prefetch, EVENT, 1),
    (prefetch_after_lookup, EVENT, 2),  # the first one is for the stream of the call
    (prefetch_of_computed_ids, EVENT, 1),
    (erasure_after_prefetch, EVENT, 1),
    (reading_after_prefetch, EVENT, 1),
]


def run(
    calls: Callable[[Program], None], lazy: str | None, ignored: tuple[str, int] | None = None
) -> list[Tensor]:
    set_lazy(lazy)
    main = streams()[0]
    with emulated_cuda(), main.chosen():
        program = Program(ignored)
        calls(program)
        if ignored is not None:
            ignore_wait(ignored[0], 0)
        set_lazy(None)
        return program.content()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.shape == y.shape and same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("calls", "wait", "number"), CASES)
def test_a_removed_wait_is_found(calls: Callable[[Program], None], wait: str, number: int) -> None:
    expected = run(calls, None)
    assert same(run(calls, "oldest"), expected)
    assert same(run(calls, "newest"), expected)
    without = [run(calls, order, (wait, number)) for order in ("oldest", "newest")]
    assert not all(same(result, expected) for result in without)


def test_memory_is_cleared_before_it_is_used() -> None:
    with emulated_cuda():
        set_lazy("oldest")
        kept = []  # their end would wait for the device
        for removed in (False, True):
            ignore_wait(STREAM, int(removed))
            memory = EmulatedMemory().reserve([4], torch.int64, huge_pages=False)
            kept.append(memory)
            assert bool((memory == 0).all()) is not removed
        set_lazy(None)


# -- captures ------------------------------------------------------------------------------------


def test_captures_wait_for_their_own_work_alone() -> None:
    before = forbidden_calls()
    with emulated_cuda():
        program = Program(None)
        program.table.prefetch(IDS[:20])
        set_capturing(True)
        output = program.look_up(IDS[:60])  # not of the prefetch: CUDA would refuse that
        fork = streams()[1]
        fork.wait_stream(Stream.current())
        with fork.chosen():
            program.table.prefetch(IDS[60:80])
        Stream.current().wait_stream(fork)
        output.backward(GRADIENT[:60])
        set_capturing(False)
        program.table.optimizer.step()
    assert forbidden_calls() == before


def test_replays_come_after_prefetches() -> None:
    """They wait for nothing, so the stream of the steps waits for each prefetch at once."""
    with emulated_cuda():
        program = Program(None)
        set_capturing(True)
        program.look_up(IDS[:60]).backward(GRADIENT[:60])
        set_capturing(False)
        program.table.optimizer.step()
        before = waits()[EVENT]
        program.table.prefetch(IDS[60:80])
        # of the call's stream, of the last call on another stream twice, and of the steps' stream
        # after the search and after the moves
        assert waits()[EVENT] - before == 4
