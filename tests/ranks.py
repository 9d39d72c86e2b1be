"""Processes that stay: a process group of several ranks on this machine, for many tests.

They run any function of a test module.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from started import start_server

TIMEOUT_S = 120  # of collectives: one rank may compile for longer than another
START_S = 60  # for imports, on a busy machine


class Ranks:
    """``world_size`` processes with a gloo group; they start when they are needed.

    Args:
        world_size: processes.
        local_size: how many of them a node is taken to have.
    """

    def __init__(self, world_size: int, local_size: int | None = None) -> None:
        self.world_size = world_size
        self._local_size = local_size or world_size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        context = start_server()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            group = _Group(
                rank,
                self.world_size,
                self._local_size,
                str(Path(self._directory.name) / "store"),
            )
            process = context.Process(target=_work, args=(theirs, group, sys.path), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process ends the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a module's function with (rank, *arguments) on all ranks; returns their results.

        If a rank fails, others may be left in the midst of a collective: the next call starts new
        processes.

        Raises:
            RuntimeError: with the tracebacks of the ranks that raised.
        """
        outcomes = self.outcomes(function, *arguments)
        failed = [f"rank {r}:\n{o}" for r, (good, o) in enumerate(outcomes) if not good]
        if failed:
            self.stop()
            raise RuntimeError("\n".join(failed))
        return [result for _, result in outcomes]

    def errors(self, function: Callable[..., Any], *arguments: Any) -> list[str]:
        """The tracebacks of a function that raises on all ranks before any of them communicates.

        Raises:
            AssertionError: it did not.
        """
        outcomes = self.outcomes(function, *arguments)
        if any(good for good, _ in outcomes):
            self.stop()
            raise AssertionError(f"not all ranks raised: {outcomes}")
        return [traceback for _, traceback in outcomes]

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """As :meth:`run`: per rank (True, result) or (False, traceback)."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, arguments))
        results: list[tuple[bool, Any]] = []
        limit_s = 2 * TIMEOUT_S + START_S
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(limit_s):
                self.stop()
                errors = [f"rank {r}:\n{o}" for r, (good, o) in enumerate(results) if not good]
                silent = f"rank {rank} did not answer within {limit_s} s"
                raise RuntimeError("\n".join([silent, *errors]))
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append((False, "the process has ended"))
        return results

    def stop(self) -> None:
        """Ends the processes."""
        if not self._processes:
            return
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []
        self._directory.cleanup()


class _Group(NamedTuple):
    """What a process must know to join the group."""

    rank: int
    world_size: int
    local_size: int
    store: str


def _work(pipe: Connection, group: _Group, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.update(
        LOCAL_WORLD_SIZE=str(group.local_size),
        LOCAL_RANK=str(group.rank % group.local_size),
        RANK=str(group.rank),
        WORLD_SIZE=str(group.world_size),
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{group.store}",
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(group.rank)  # ranks usually differ
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(group.rank, *arguments)))
        except BaseException:  # the parent reports it
            pipe.send((False, traceback.format_exc()))
