"""Processes of torchrec_step.py: training steps of static and dynamic tables, in turn."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common.id_streams import spread
from common.timing import Timing, elapsed_ms, interleave_rounds
from sharded.batches import BATCHES, NewIds, numbers_of
from sharded.collections import WORLD_SIZE, Sizes, Step, fill, jagged, training_step
from sharded.sent import Sent, sent_by
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

DYNAMIC = {"dynamic": False, "dynamic, dedup": True}  # name: use_index_dedup


class Measured(NamedTuple):
    """A comparison: times, and what is sent, of "ours" and the "peer"."""

    timings: dict[str, Timing]
    sent: dict[str, Sent]


def time_steps(
    sizes: Sizes, steps: Mapping[str, Callable[[int], None]], rounds: int
) -> dict[str, Timing]:
    """Let steps take turns; a round lasts until the last rank is done.

    Args:
        steps: name -> step of a number.
        rounds: rounds that count.
    """

    def timed(step: Callable[[int], None]) -> Callable[[int], float]:
        def round_of(number: int) -> float:
            def work() -> None:
                for call in range(number * sizes.calls, (number + 1) * sizes.calls):
                    step(call)
                dist.barrier()

            dist.barrier()
            return elapsed_ms(work) / sizes.calls

        return round_of

    return interleave_rounds(
        {name: timed(step) for name, step in steps.items()}, rounds=rounds, warmup=1
    )


def compared(
    sizes: Sizes,
    steps: Mapping[str, Step],
    batches: Mapping[str, Callable[[int], Tensor]],
    bag: int,
) -> Measured:
    """Time "ours" against the "peer".

    Args:
        steps: by those names.
        batches: by those names, the ids of a step's number.
        bag: ids of a bag.
    """
    lengths = torch.full((sizes.tables * sizes.batch,), bag, dtype=torch.int64)

    def run(name: str, call: int) -> None:
        steps[name](jagged(sizes, batches[name](call), lengths))

    timings = time_steps(
        sizes,
        {name: lambda call, name=name: run(name, call) for name in steps},  # type: ignore[misc]
        sizes.rounds,
    )
    last = sizes.calls * (sizes.rounds + 1)
    sent = {name: sent_by(lambda name=name: run(name, last)) for name in steps}  # type: ignore[misc]
    return Measured(timings, sent)


def case_name(sharding: str, optimizer: str, bag: int, share: float) -> str:
    new = f", {100 * share:g} % new ids" if share else ""
    return f"{sharding} {optimizer} L={bag}{new}"


def measure(
    rank: int, sizes: Sizes, wanted: list[tuple[str, str, str, int, float]]
) -> Iterator[Measured]:
    """Compare dynamic tables with static ones.

    Args:
        wanted: (sharding, optimizer, key of :data:`DYNAMIC`, ids of a bag, share of new ids), those
            with the same tables together.
    """
    peer: tuple[Any, ...] | None = None
    ours: tuple[Any, ...] | None = None
    numbers: dict[int, list[Tensor]] = {}
    models: dict[str, DistributedModelParallel] = {}
    steps: dict[str, Step] = {}
    unseen = sizes.rows
    for sharding, optimizer, kind, bag, share in wanted:
        if peer != (sharding, optimizer):
            models.clear()
            steps.clear()
            gc.collect()
            models["peer"], steps["peer"] = training_step(sizes, sharding, optimizer, dedup=None)
        if ours != (sharding, optimizer, kind):
            models.pop("ours", None)
            steps.pop("ours", None)
            gc.collect()
            models["ours"], steps["ours"] = training_step(
                sizes, sharding, optimizer, dedup=DYNAMIC[kind]
            )
            fill(sizes, steps["ours"], rank)
            unseen = sizes.rows
        peer, ours = (sharding, optimizer), (sharding, optimizer, kind)
        numbers = numbers if bag in numbers else {bag: numbers_of(sizes, bag, rank)}
        static = numbers[bag]
        dynamic = [spread(batch) for batch in static]
        if share:
            arriving = NewIds(unseen, share, rank)
            last = sizes.calls * (sizes.rounds + 1)
            dynamic = [arriving.of(dynamic[call % BATCHES]) for call in range(last + 1)]
            unseen = arriving._next
        batches: dict[str, Callable[[int], Tensor]] = {
            "ours": lambda call, ids=dynamic: ids[call % len(ids)],  # type: ignore[misc]
            "peer": lambda call, ids=static: ids[call % len(ids)],  # type: ignore[misc]
        }
        yield compared(sizes, steps, batches, bag)


def work(
    pipe: Connection,
    rank: int,
    store: str,
    sizes: Sizes,
    wanted: list[tuple[str, str, str, int, float]],
) -> None:
    """Run the process of a rank: it sends measurements, or a traceback as text, then None."""
    os.environ.update(
        LOCAL_WORLD_SIZE=str(WORLD_SIZE),
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE
        )
        for measured in measure(rank, sizes, wanted):
            pipe.send(measured if rank == 0 else "")
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(None)
    except BaseException:  # the parent reports it
        pipe.send(traceback.format_exc())
