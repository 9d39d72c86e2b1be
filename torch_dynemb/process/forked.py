"""Marks on objects that a forked process inherits from its parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from torch_dynemb.errors import ForkedProcessError


class Forkable(Protocol):
    """An object that a fork marks."""

    forked: bool


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch(thing: Forkable) -> None:
    """Mark an object in the child after each fork."""
    _watched.add(thing)


def _mark() -> None:
    for thing in _watched:
        thing.forked = True


def check_own(thing: Forkable) -> None:
    """Raise ForkedProcessError if this process got the object by a fork, where changes are lost."""
    if thing.forked:
        raise ForkedProcessError(
            "this process is a fork of the one that made the tables and has a copy of them, which "
            "can be read: a change would reach neither the tables nor other processes. Train where "
            "the module was made, or in threads of that process; or make the module after the "
            "fork (copy.deepcopy(module) is this process's own)"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark)

__all__ = ["check_own", "watch"]
