"""Processes of ranks on this machine that measure something together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
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
        answers = [pipe.recv() for pipe in pipes]
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            raise RuntimeError(f"a rank failed:\n{failed[0]}")
        return answers
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()


__all__ = ["run_ranks"]
