"""Processes of ranks on this machine that measure something together."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def run_ranks(work: Callable[..., None], ranks: int, *arguments: Any) -> list[Any]:
    """Start the ranks; return what each of them measured.

    Args:
        work: called with a pipe, the rank and the arguments; it sends its result, or a traceback as
            text.
        ranks: number of processes.
        arguments: of ``work``.

    Raises:
        RuntimeError: with the traceback of a rank that failed.
    """
    with _started(work, ranks, *arguments) as pipes:
        return _answers(pipes)


def measured(work: Callable[..., None], ranks: int, results: int, *more: Any) -> Iterator[Any]:
    """Start the ranks, and yield the measurements of rank 0.

    Args:
        work: called with a pipe, its rank, the path of a file for the process group, and ``more``.
            It sends each result (on other ranks ""), and None at the end, or a traceback as text.
        ranks: number of processes.
        results: number of results.

    Raises:
        RuntimeError: with the traceback of a rank that failed.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        _started(work, ranks, str(Path(directory) / "store"), *more) as pipes,
    ):
        for _ in range(results + 1):
            answer = _answers(pipes)[0]
            if answer is not None:
                yield answer


@contextmanager
def _started(work: Callable[..., None], ranks: int, *arguments: Any) -> Iterator[list[Connection]]:
    """Start processes; yield the pipe of each. They are ended at the end."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, rank, *arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()


def _answers(pipes: list[Connection]) -> list[Any]:
    """Return the next answer of each rank; raise RuntimeError if one is a traceback."""
    answers = [pipe.recv() for pipe in pipes]
    failed = [answer for answer in answers if isinstance(answer, str) and answer]
    if failed:
        raise RuntimeError(f"a rank failed:\n{failed[0]}")
    return answers


__all__ = ["measured", "run_ranks"]
