"""Interleaved timing on CPU and GPU: the one place where a benchmark reads a clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .progress import progress

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, over the rounds of an interleaved measurement."""

    rounds_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.rounds_ms)

    @property
    def min_ms(self) -> float:
        return min(self.rounds_ms)


def elapsed_ms(run: Callable[[], object], device: torch.device = CPU) -> float:
    """Return milliseconds of a single call, by the CPU's clock or between two events on a GPU."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    elapsed: float = start.elapsed_time(stop)
    return elapsed


def interleave_rounds(
    candidates: Mapping[str, Callable[[int], float]], *, rounds: int, warmup: int
) -> dict[str, Timing]:
    """Let candidates that time themselves take turns.

    The candidate that goes first changes from round to round, so that noise of a shared machine
    meets all of them alike. The garbage collector is off meanwhile.

    Args:
        candidates: name -> function of the round's number, counted from 0 at the first warm-up
            round, that returns milliseconds.
        rounds: rounds that count.
        warmup: rounds before them.

    Returns:
        name -> timing.
    """
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number in progress(range(warmup + rounds), "rounds", depth=1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                elapsed = candidates[name](number)
                if number >= warmup:
                    times[name].append(elapsed)
    finally:
        if gc_was_enabled:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in times.items()}


def interleave(
    candidates: Mapping[str, Callable[[int], object]],
    *,
    rounds: int,
    calls: int | Mapping[str, int],
    warmup: int = 1,
    device: torch.device = CPU,
) -> dict[str, Timing]:
    """Time candidates against each other in this process.

    In each round every candidate runs ``calls`` times; the round's time is the mean of its calls.

    Args:
        candidates: name -> function of the call's number, which counts up from 0 over warm-up and
            rounds, for candidates that need fresh input every call.
        rounds: timed rounds.
        calls: calls a round, of all candidates or by name.
        warmup: rounds that are not timed.
        device: that they run on.

    Returns:
        name -> timing of one call.
    """

    def timed(run: Callable[[int], object], count: int) -> Callable[[int], float]:
        def round_of(number: int) -> float:
            def work() -> None:
                for call in range(number * count, (number + 1) * count):
                    run(call)

            return elapsed_ms(work, device) / count

        return round_of

    timed_candidates = {
        name: timed(run, calls if isinstance(calls, int) else calls[name])
        for name, run in candidates.items()
    }
    return interleave_rounds(timed_candidates, rounds=rounds, warmup=warmup)
