"""Marks what a forked process has got from its parent."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_dynemb.table.group_parts import GroupParts

_groups: weakref.WeakSet[GroupParts] = weakref.WeakSet()


def watch(group: GroupParts) -> None:
    """Has a fork mark the group in the child."""
    _groups.add(group)


def _mark() -> None:
    for group in _groups:
        group.forked = True


def check_own(group: GroupParts) -> None:
    """Raises RuntimeError in a process that got the group by a fork, where changes are lost."""
    if group.forked:
        raise RuntimeError(
            "this process is a fork of the one that made the tables and has a copy of them, which "
            "can be read: a change would reach neither the tables nor other processes. Train where "
            "the module was made, or in threads of that process; or make the module after the "
            "fork (copy.deepcopy(module) is this process's own)"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark)

__all__ = ["check_own", "watch"]
