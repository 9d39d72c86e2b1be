"""Our kernels that a piece of a program launches, as torch's profiler sees it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.ledger import kernel_of, kernels_of_sources


@contextmanager
def recorded_launches() -> Iterator[set[str]]:
    """Fill a set with the names of our kernels that are launched within.

    CUDA's own record of launches is read, so that replays of graphs are seen too. The set stays
    empty where the profiler does not work, which is said on stderr: no launch is guessed.
    """
    names: set[str] = set()
    profiler = profile(activities=[ProfilerActivity.CUDA])
    try:
        profiler.start()
    except RuntimeError as error:
        print(f"no launches are recorded: torch's profiler: {error}", file=sys.stderr)
        yield names
        return
    try:
        yield names
        torch.cuda.synchronize()
    finally:
        profiler.stop()
    known = kernels_of_sources()
    launched = {event.name for event in profiler.events() or ()}
    names |= {name for name in (kernel_of(one, known) for one in launched) if name is not None}
    if not names:
        print(
            f"no launches are recorded: torch's profiler has {len(launched)} other names",
            file=sys.stderr,
        )
