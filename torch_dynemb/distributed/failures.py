"""Errors of one rank that all ranks raise, so that none waits for a rank that has failed.

A rank that cannot take part in an exchange still sends its sizes, each of them :data:`FAILED`. So
the others know of it without another collective. Only then do all ranks exchange the error.
"""

from __future__ import annotations

import pickle

import torch.distributed as dist

from torch_dynemb.distributed.ranks import from_all_ranks

FAILED = -1
"""Size that a rank sends if it has failed: no exchange has a negative one."""

# built-in classes that are made of a message
_OF_A_MESSAGE = (TypeError, ValueError, KeyError, IndexError, RuntimeError, NotImplementedError)


def raise_together(failure: Exception | None, process_group: dist.ProcessGroup) -> None:
    """Raise the error of the first rank that has one, on all ranks. All ranks call it.

    Args:
        failure: of this rank, or None.
        process_group: of the ranks.

    Raises:
        Exception: of the same class on all ranks. If it is one of Python's, its message begins with
            the rank.
    """
    failures = from_all_ranks(None if failure is None else sendable(failure), process_group)
    ranks = dist.get_process_group_ranks(process_group)
    for rank, of_rank in zip(ranks, failures, strict=True):
        if of_rank is None:
            continue
        named = _named(of_rank, rank)
        if failure is not None:
            raise named from failure
        raise named from RuntimeError(f"raised on rank {rank}: its output has the traceback")


def sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _named(error: Exception, rank: int) -> Exception:
    """Return an error with the rank in its message, if its class is made of a message."""
    arguments = error.args
    if type(error) not in _OF_A_MESSAGE or len(arguments) != 1:
        return error
    return type(error)(f"rank {rank}: {arguments[0]}")


__all__ = ["FAILED", "raise_together", "sendable"]
