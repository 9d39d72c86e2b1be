"""Interleaved timing: the one place where a benchmark reads the clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tqdm import tqdm


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


def once_ms(run: Callable[[], object]) -> float:
    """Milliseconds of a single call."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def interleave_rounds(
    candidates: Mapping[str, Callable[[int], float]], *, rounds: int, warmup: int
) -> dict[str, Timing]:
    """Lets candidates that time themselves take turns.

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
        for number in tqdm(range(warmup + rounds), desc="rounds", leave=False, position=1):
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
    calls: int,
    warmup: int = 1,
) -> dict[str, Timing]:
    """Times candidates against each other in this process.

    In each round every candidate runs ``calls`` times; the round's time is the mean of its calls.

    Args:
        candidates: name -> function of the call's number, which counts up from 0 over warm-up and
            rounds, for candidates that need fresh input every call.
        rounds: timed rounds.
        calls: calls a round.
        warmup: rounds that are not timed.

    Returns:
        name -> timing of one call.
    """

    def timed(run: Callable[[int], object]) -> Callable[[int], float]:
        def round_of(number: int) -> float:
            def work() -> None:
                for call in range(number * calls, (number + 1) * calls):
                    run(call)

            return once_ms(work) / calls

        return round_of

    timed_candidates = {name: timed(run) for name, run in candidates.items()}
    return interleave_rounds(timed_candidates, rounds=rounds, warmup=warmup)
