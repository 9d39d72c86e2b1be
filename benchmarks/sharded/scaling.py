"""Processes of scale_out.py: ranks count the bytes of steps, and time them and their links."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sharded.collections import Sizes, dynamic_sharder, jagged, step_of_plan
from sharded.placed import generators_of
from sharded.sent import counted
from sharded.stream import Stream

import torch_dynemb as td
from torch_dynemb.plan.ranks.layouts import Cluster, PlacedColumns, Sharding

_BATCHES = 4  # different batches, used in turn


class Case(NamedTuple):
    """A sharding of a stream's tables.

    Attributes:
        sharding: type of all tables.
        dedup: whether ids are sent once.
        pieces: places of the tables.
        stream: of the ids.
        dim: columns.
        batch: lines of a rank.
    """

    sharding: Sharding
    dedup: bool
    pieces: list[PlacedColumns]
    stream: Stream
    dim: int
    batch: int


class Round(NamedTuple):
    """Seconds of a call in a round: until the last rank was done, and of this rank's processor."""

    wall: float
    processor: float


def run_case(case: Case, cluster: Cluster, rounds: int) -> tuple[dict[str, int], list[Round]]:
    """Train; return the bytes that this rank sends in a step by kind, and the time of rounds.

    Bytes are means of several batches.
    """
    stream = case.stream
    sizes = Sizes(
        stream.tables, stream.rows, case.dim, case.batch, (stream.bag,), 0.0, rounds, _BATCHES
    )
    sharder = dynamic_sharder(sizes, td.RowWiseAdagrad(lr=0.01), dedup=case.dedup)
    generators = generators_of(case.sharding, case.pieces, cluster, sizes.names)
    _, step = step_of_plan(sizes, sharder, generators)
    batches = []
    for number in range(_BATCHES):
        ids, lengths = stream.lines(case.batch, seed=number * cluster.ranks + dist.get_rank())
        batches.append((torch.cat(ids), lengths.flatten()))

    def steps() -> None:
        for ids, lengths in batches:
            step(jagged(sizes, ids, lengths))

    steps()
    sent, _ = counted(steps)
    timed = _timed(steps, _BATCHES, rounds)
    return {kind: count // _BATCHES for kind, count in sent.items()}, timed


def links(bytes_to_each: int, rounds: int) -> tuple[None, list[Round]]:
    """Return the time of an all-to-all with so many bytes to each rank."""
    ranks = dist.get_world_size()
    sent = torch.zeros(ranks * bytes_to_each // 4)
    received = torch.empty_like(sent)
    calls = max(1, (1 << 20) // max(bytes_to_each, 1 << 14))

    def exchange() -> None:
        for _ in range(calls):
            dist.all_to_all_single(received, sent)

    exchange()
    return None, _timed(exchange, calls, rounds)


def _timed(run: Callable[[], None], calls: int, rounds: int) -> list[Round]:
    """Return the time of a call in each round, which has so many."""
    timed = []
    for _ in range(rounds):
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        run()
        dist.barrier()
        spent = time.perf_counter() - wall, time.process_time() - processor
        timed.append(Round(spent[0] / calls, spent[1] / calls))
    return timed


def work(pipe: Connection, rank: int, store: str, cluster: Cluster) -> None:
    """Run the process of a rank: it calls functions with their arguments, one after another.

    Each answer is a result, or a traceback as text.
    """
    os.environ.update(
        LOCAL_WORLD_SIZE=str(cluster.local),
        LOCAL_RANK=str(rank % cluster.local),
        RANK=str(rank),
        WORLD_SIZE=str(cluster.ranks),
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=cluster.ranks
        )
        while (call := pipe.recv()) is not None:
            function, arguments = call
            result: Any = function(*arguments)
            gc.collect()
            pipe.send(result)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # the parent reports it
        pipe.send(traceback.format_exc())
