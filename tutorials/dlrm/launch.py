"""Start the job on many processes: by itself on one machine, or by torchrun on one or several.

torchrun's elastic launcher starts the processes in both cases. What differs is who calls it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tutorials.dlrm.checkpoint import CheckpointError
from tutorials.dlrm.criteo import DataError, check_paths
from tutorials.dlrm.options import Options
from tutorials.ranks import run_on_ranks, silence, started_by_torchrun

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_EXPECTED = (CheckpointError, DataError, FileNotFoundError, ValueError)
"""Errors that a user can do something about: no traceback."""


_TAKEN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(opts: Options) -> dict[str, Any] | None:
    """Train on many processes.

    Returns:
        What the program prints at its end, in the process that is to print it: the one that was
        called, or, with torchrun, rank 0. None in the others.

    Raises:
        ValueError: The options do not fit to this machine, or what a rank says about data.
        FileNotFoundError: A file is not there.
        KeyboardInterrupt: Ctrl-C has ended the processes.
    """
    _check(opts)
    if started_by_torchrun():
        return work(opts)
    # here, since it takes half a second and the job of one process does without
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # the launcher takes the handlers of these, and keeps them
    handlers = {signum: signal.getsignal(signum) for signum in _TAKEN_SIGNALS}
    try:
        result: dict[str, Any] = run_on_ranks(
            opts.nproc or _default_nproc(opts), work, opts, forked_from=_forked_from(opts)
        )
    except ChildFailedError as failed:
        _reraise(failed)
    except SignalException as signalled:
        if signalled.sigval == signal.SIGINT:  # the processes have ended by now
            raise KeyboardInterrupt from None
        raise
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    return result


def work(opts: Options) -> dict[str, Any] | None:
    """Be a rank; the result is rank 0's."""
    silence()
    from tutorials.dlrm import torchrec_train  # imports TorchRec, which takes seconds

    try:
        return torchrec_train.run(opts)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends one, too
        raise


def check_alone() -> None:
    """Refuse to train the same model in each of many processes.

    Raises:
        ValueError: torchrun has started several.
    """
    if started_by_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, each of which would train "
            "a model of its own: add --torchrec"
        )


def _forked_from(opts: Options) -> str | None:
    """Return the module to import before ranks are forked, which those of GPUs cannot be.

    What imports it may ask the driver how many GPUs there are, and forks cannot use one then.
    """
    return "tutorials.dlrm.rank_imports" if opts.device == "cpu" else None


def _default_nproc(opts: Options) -> int:
    return torch.cuda.device_count() if opts.device == "cuda" else 1


def _check(opts: Options) -> None:
    if importlib.util.find_spec("torchrec") is None:
        raise ValueError(
            "--torchrec: TorchRec is not installed; use make train ARGS=--torchrec, which installs "
            "it, or see pyproject.toml"
        )
    opts.rows.config(opts.lr)  # raises if there is no such optimizer
    if opts.data:
        check_paths(opts.data)
    if started_by_torchrun():
        if opts.nproc is not None:
            raise ValueError(
                f"--nproc {opts.nproc}: torchrun has started the processes: leave --nproc out, or "
                "give torchrun --nproc-per-node"
            )
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    else:
        local_size = opts.nproc or _default_nproc(opts)
    if opts.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device; use --device cpu")
        if local_size > torch.cuda.device_count():
            raise ValueError(
                f"--device cuda: {local_size} processes want a GPU each, but this machine has "
                f"{torch.cuda.device_count()}: start fewer processes"
            )


def _reraise(failed: ChildFailedError) -> NoReturn:
    """Raise what the first rank to fail has raised, if that is for the user."""
    _, failure = failed.get_first_failure()
    if isinstance(failure.message, dict):
        kind, _, message = failure.message["message"].partition(": ")
        if kind in {error.__name__ for error in _EXPECTED}:
            raise ValueError(message) from None
    raise failed
