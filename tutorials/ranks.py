"""Run a function on several processes of this machine, as torchrun would."""

from __future__ import annotations

import logging
import multiprocessing
import os
import uuid
import warnings
from collections.abc import Callable
from typing import Any


def started_by_torchrun() -> bool:
    """Return whether this process is a rank already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on_ranks(
    nproc: int, function: Callable[..., Any], *arguments: Any, forked_from: str | None = None
) -> Any:
    """Start processes with torchrun's launcher and wait for them.

    Args:
        nproc: How many.
        function: Of a module; its process group is for it to make, from the environment.
        arguments: Of the function, picklable.
        forked_from: A module to import in one process, of which the ranks are forks: its import
            starts no threads that they would need, and touches no GPU. None: every rank starts
            from nothing.

    Returns:
        What the function returned on rank 0.

    Raises:
        ChildFailedError: A rank has failed; the others have been ended.
    """
    # here, since it takes half a second and programs of one process do without
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    start = {}
    if forked_from is not None:
        multiprocessing.set_forkserver_preload([forked_from])
        start["start_method"] = "forkserver"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # asks no name server
        max_restarts=0,
        **start,
    )
    return elastic_launch(config, function)(*arguments)[0]


def silence() -> None:
    """Leave out what TorchRec and torch have to say about each other, once per rank."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")
    for name in ("torchrec.distributed", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
