"""Processes that stay: a process group of several ranks on this machine, for many tests.

A fresh pair of processes costs some seconds of imports; these run any function of a test module.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 60


class Ranks:
    """``world_size`` processes with a gloo group.

    Args:
        world_size: processes.
        local_size: how many of them a node is taken to have.
    """

    def __init__(self, world_size: int, local_size: int | None = None) -> None:
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = str(Path(self._directory.name) / "store")
            process = context.Process(
                target=_work,
                args=(theirs, rank, world_size, local_size or world_size, store, sys.path),
                daemon=True,
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a module's function with (rank, *arguments) on all ranks; returns their results.

        Raises:
            RuntimeError: with the tracebacks of the ranks that raised.
        """
        outcomes = self.outcomes(function, *arguments)
        failed = [f"rank {r}:\n{o}" for r, (good, o) in enumerate(outcomes) if not good]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [result for _, result in outcomes]

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """As :meth:`run`: per rank (True, result) or (False, traceback)."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, arguments))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(2 * TIMEOUT_S):
                self.stop()
                raise RuntimeError(f"rank {rank} did not answer within {2 * TIMEOUT_S} s")
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append((False, "the process has ended"))
        return results

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._directory.cleanup()


def _work(
    pipe: Connection, rank: int, world_size: int, local_size: int, store: str, path: list[str]
) -> None:
    sys.path[:] = path
    os.environ.update(
        LOCAL_WORLD_SIZE=str(local_size),
        LOCAL_RANK=str(rank % local_size),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(rank)  # ranks usually differ
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(rank, *arguments)))
        except BaseException:  # the parent reports it
            pipe.send((False, traceback.format_exc()))
