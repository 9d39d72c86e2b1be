"""Processes of ranks that send what they have measured."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def measured(work: Callable[..., None], ranks: int, results: int, *more: Any) -> Iterator[Any]:
    """Start processes, and yield the measurements of rank 0.

    Args:
        work: called with a pipe, its rank, the path of a file for the process group, and ``more``.
            It sends each result (on other ranks ""), and None at the end, or a traceback as text.
        ranks: number of processes.
        results: number of results.

    Raises:
        RuntimeError: with the traceback of a rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(theirs, rank, store, *more), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            for _ in range(results + 1):
                answers = [pipe.recv() for pipe in reversed(pipes)]
                failed = [answer for answer in answers if isinstance(answer, str) and answer]
                if failed:
                    raise RuntimeError(f"a rank failed:\n{failed[0]}")
                if answers[-1] is not None:
                    yield answers[-1]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()


__all__ = ["measured"]
