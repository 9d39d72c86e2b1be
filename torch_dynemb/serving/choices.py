"""What :func:`torch_dynemb.freeze` was asked for, as the makers of read-only copies are told."""

from __future__ import annotations

from typing import Literal, NamedTuple

Ranks = Literal["all", "first", "own"]
RANKS: tuple[Ranks, ...] = ("all", "first", "own")


class Choices(NamedTuple):
    """How tables are copied.

    Attributes:
        ranks: of tables that several ranks share: ``"all"``: every rank gets all rows, ``"first"``:
            the first rank does, ``"own"``: every rank those that it has.
    """

    ranks: Ranks = "all"


__all__ = ["RANKS", "Choices", "Ranks"]
