"""Timing by CUDA events, and results that are written as they come."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

Row = dict[str, Any]
T = TypeVar("T")


def progress(items: Iterable[T], description: str) -> Iterator[T]:
    """Goes over items with a progress bar on stderr, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        for number, item in enumerate(items):
            print(f"{description}: {number}", file=sys.stderr, flush=True)
            yield item
        return
    yield from tqdm(items, desc=description, file=sys.stderr)


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


@dataclass(frozen=True)
class Candidate:
    """Something to time: a function, and how many calls one run of it stands for."""

    run: Callable[[], object]
    calls: int


def elapsed_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one run, between two events on a GPU."""
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


def interleave(
    candidates: Mapping[str, Candidate],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 2,
) -> dict[str, Timing]:
    """Lets candidates take turns; who goes first changes from round to round.

    The garbage collector is off meanwhile.

    Args:
        candidates: by name.
        device: that they run on.
        rounds: rounds that count.
        warmup: rounds before them.

    Returns:
        name -> timing of one call.
    """
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(warmup + rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                elapsed = elapsed_ms(candidates[name].run, device) / candidates[name].calls
                if number >= warmup:
                    times[name].append(elapsed)
    finally:
        if gc_was_enabled:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in times.items()}


def short(value: float) -> float:
    """Five digits."""
    return float(f"{value:.5g}")


def _shortened(extra: Mapping[str, Any]) -> Row:
    return {key: short(v) if isinstance(v, float) else v for key, v in extra.items()}


def compare(
    bench: str,
    case: str,
    ours: Timing,
    peer_name: str | None,
    peer: Timing | None,
    *,
    target: float | None = None,
    **extra: Any,
) -> Row:
    """A row in the form of benchmarks/report.py (which needs tqdm); the peer may be missing.

    Args:
        bench: benchmark.
        case: what was timed.
        ours: our timing.
        peer_name: the peer.
        peer: its timing.
        target: largest ratio of medians, ours/peer, that meets the target; None: no target.
        extra: further keys of the row.

    Returns:
        The row.
    """
    row: Row = {
        "bench": bench,
        "case": case,
        "ours_ms": short(ours.median_ms),
        "peer": peer_name,
        "peer_ms": None if peer is None else short(peer.median_ms),
        "ratio": None if peer is None else short(ours.median_ms / peer.median_ms),
        "ours_min_ms": short(ours.min_ms),
        "peer_min_ms": None if peer is None else short(peer.min_ms),
        "ratio_min": None if peer is None else short(ours.min_ms / peer.min_ms),
        "rounds": len(ours.rounds_ms),
    }
    if target is not None and peer is not None:
        row |= {"target": target, "met": ours.median_ms / peer.median_ms <= target}
    return row | {"valid": True} | _shortened(extra)


def quantity(
    bench: str, case: str, value: float, unit: str, *, target: float | None = None, **extra: Any
) -> Row:
    """A row for a quantity other than a time; the target is the largest value wanted."""
    row: Row = {
        "bench": bench,
        "case": case,
        "ours_ms": None,
        "peer": None if target is None else "target",
        "peer_ms": None,
        "ratio": short(value / target) if target else None,
        "value": short(value),
        "unit": unit,
    }
    if target is not None:
        row |= {"target_value": target, "met": value <= target}
    return row | {"valid": True} | _shortened(extra)


class RowFile:
    """Rows in a file, a JSON line each, on disk as soon as they are there.

    Args:
        path: overwritten; None: rows go to stdout only.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = None if path is None else path.open("w")

    def add(self, row: Row) -> None:
        """Writes a row to the file and to stdout."""
        line = json.dumps(row)
        print(line, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()


def read_rows(path: Path) -> list[Row]:
    """Rows of a file; a last line that was cut off is left out."""
    rows: list[Row] = []
    if not path.is_file():
        return rows
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
