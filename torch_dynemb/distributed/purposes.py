"""Purposes of exchanges: ranks must not take those of different tables for one another.

A message begins with the identity of its purpose, so no exchange is needed to compare it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_dynemb.distributed.failures import raise_together
from torch_dynemb.distributed.ranks import from_all_ranks

HEADER = 64
"""Numbers that a rank sends first, for any purpose: gloo ends a process that gets too many."""

_SHOWN_NAMES = 3
_PRIME = (1 << 48) - 59


class Purpose(NamedTuple):
    """Purpose of an exchange, the same on all ranks.

    Attributes:
        call: such as ``"training lookup"``.
        tables: names.
        seed: of the tables; those of modules without a name differ in it.
    """

    call: str
    tables: tuple[str, ...]
    seed: int = 0

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.tables[:_SHOWN_NAMES]))
        more = len(self.tables) - _SHOWN_NAMES
        also = f" and {more} more" if more > 0 else ""
        return f"a {self.call} of table{'s' * (len(self.tables) > 1)} {names}{also}"


def identity_of(purpose: Purpose) -> int:
    """Return 48 bits of a purpose, the same in every process; compiled code traces it."""
    identity = _traced_identity if torch.compiler.is_compiling() else _cached_identity
    return identity(*purpose)


def _traced_identity(call: str, tables: tuple[str, ...], seed: int) -> int:
    number = seed
    for byte in "\0".join((call, *tables)).encode():
        number = (number * 257 + byte) % _PRIME
    return number


_cached_identity = functools.cache(_traced_identity)


def check_alike(
    purpose: Purpose,
    identities: list[int],
    process_group: dist.ProcessGroup,
    failure: Exception | None = None,
) -> None:
    """Raise an error on all ranks unless all of them have begun an exchange for one purpose.

    Args:
        purpose: of this rank.
        identities: that arrived, by rank: one below 0 comes from a rank that has failed.
        process_group: of the ranks.
        failure: of this rank, or None.

    Raises:
        Exception: a rank has failed; of the class of its error.
        RuntimeError: ranks look up different tables, or one trains and another one reads.
    """
    own = identity_of(purpose)
    if all(identity == own for identity in identities):
        return
    raise_together(failure, process_group)
    purposes = from_all_ranks(purpose, process_group)
    other = next(rank for rank, of in enumerate(purposes) if of != purposes[0])
    same = str(purposes[0]) == str(purposes[other])  # unnamed tables
    numbers = dist.get_process_group_ranks(process_group)
    first, second = (
        f"rank {numbers[rank]} begins {purposes[rank]}"
        + (f" (of seed {purposes[rank].seed})" if same else "")
        for rank in (0, other)
    )
    raise RuntimeError(
        f"{first}, but {second}: look up the same tables in the same order on all ranks (the order "
        "of a set differs between processes), also without ids, and train and freeze the same ones "
        "on all. No row has changed"
    )


__all__ = ["HEADER", "Purpose", "check_alike", "identity_of"]
