"""Lookups with a backward still to come, and lookups of the same tables that meet in one backward.

A backward updates the rows once for a lookup. Where it reaches several lookups of the same tables,
all but the last leave their gradients here. The last one applies the sum once: the gradient of a
shared ``nn.Embedding`` is the sum over its uses, too.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.pending import PendingGradients, accumulate_grad_, merge_grad_
from torch_dynemb.ops.tensors import LookupBatch, RowTensors

# By the id of the tables' row_clock: the node of the autograd graph that was opened last. An open
# node owns the tensors of its tables, so while it is alive, that id is not reused.
OPEN: dict[int, weakref.ref[Any]] = {}
# By the same key, all nodes where several are open; empty in a program that looks tables up once
# per forward. Lookups access both directly, since a function call takes longer.
SEVERAL: dict[int, list[weakref.ref[Any]]] = {}

# By the same key, lookups that meet in the backward that compiled autograd runs next.
EXPECTED: dict[int, Meeting] = {}


class Gradient(NamedTuple):
    """Gradient of one lookup.

    Attributes:
        output: float32, of what the lookup returned.
        batch: of the lookup.
        handles: int64 [N], as the lookup got them.
        updates: int64 [1], how often the rows had been updated when they were looked up.
    """

    output: Tensor
    batch: LookupBatch
    handles: Tensor
    updates: Tensor


class Meeting:
    """Lookups of the same tables in one backward.

    Args:
        task: number of the backward, as the autograd engine counts them.
        lookups: how many meet.

    Attributes:
        gradients: of those that have been reached, in the order of the engine.
    """

    def __init__(self, task: int, lookups: int) -> None:
        self.task = task
        self.gradients: list[Gradient] = []
        self._left = lookups

    def join(self) -> None:
        """Add a lookup."""
        self._left += 1

    def ends_with(self, gradient: Gradient | None) -> bool:
        """Take the gradient of a lookup, if it got one; return whether it was the last lookup."""
        if gradient is not None:
            self.gradients.append(gradient)
        self._left -= 1
        return self._left == 0


def opened_again(key: int, node: Any) -> None:
    """Record a lookup of tables that have or had an open one.

    Args:
        key: of the tables, in ``OPEN``.
        node: of the autograd graph.
    """
    EXPECTED.pop(key, None)  # of a backward that failed
    # entries of deleted tables may have the key, too: Python reuses ids
    refs = SEVERAL.pop(key, [])
    last = OPEN[key]
    nodes = [ref for ref in refs if ref is not last and ref() is not None]
    if last() is not None:
        nodes.append(last)
    if nodes:
        SEVERAL[key] = [*nodes, weakref.ref(node)]


def meeting_of(key: int, node: Any) -> Meeting | None:
    """Return the meeting that a lookup is part of in the backward that runs.

    Args:
        key: of the tables, in ``SEVERAL``.
        node: of the lookup, which the engine has just reached.

    Returns:
        The same one for all its lookups; None for a lookup that meets no other.
    """
    task = torch._C._current_graph_task_id()
    meeting: Meeting | None = node.meeting
    if meeting is None or meeting.task != task:
        # a graph that is kept, such as a loss to be printed later, is not part of this backward
        others = [
            other
            for ref in SEVERAL[key]
            if (other := ref()) is not None
            and other is not node
            and torch._C._will_engine_execute_node(other)
        ]
        if not others:
            _close(key, lambda other: other is node)
            return None
        meeting = Meeting(task, 1 + len(others))
        for one in (node, *others):
            one.meeting = meeting
    return meeting


def expect(key: int, node: Any) -> None:
    """Note that compiled autograd is about to run the backward of one of several open lookups.

    It asks all nodes that it will run for a key, before it runs any. The engine does not run then,
    so :func:`meeting_of` could not ask it.

    Args:
        key: of the tables.
        node: of the lookup.
    """
    if key in SEVERAL or key in EXPECTED:
        EXPECTED.setdefault(key, Meeting(-1, 0)).join()
        _close(key, lambda other: other is node)


def end_meeting(key: int, meeting: Meeting) -> None:
    """Forget the lookups of a meeting; graphs that are kept stay open."""
    _close(key, lambda other: other.meeting is meeting)


def _close(key: int, closed: Any) -> None:
    """Forget the open lookups of tables for which ``closed`` is true."""
    OPEN.pop(key, None)
    refs = SEVERAL.pop(key, [])
    open_ones = [ref for ref in refs if (other := ref()) is not None and not closed(other)]
    if open_ones:
        OPEN[key] = open_ones[-1]
    if len(open_ones) > 1:
        SEVERAL[key] = open_ones


def sum_gradients(rows: RowTensors, gradients: list[Gradient]) -> PendingGradients:
    """Sum the gradients of several lookups by row.

    Args:
        rows: of the tables; nothing changes.
        gradients: of the lookups, in the order in which they are added.

    Returns:
        Entries of distinct rows, in tensors of their own.
    """
    ids = gradients[0].batch.ids
    room = sum(gradient.batch.ids.shape[0] for gradient in gradients)
    handles, row_ids, tables = ([ids.new_empty(room) for _ in rows.weights] for _ in range(3))
    pending = PendingGradients(
        handles,
        row_ids,
        tables,
        [ids.new_empty((room, weights.shape[1]), dtype=torch.float32) for weights in rows.weights],
        ids.new_zeros((len(rows.weights), 2)),
    )
    # one update follows, which counts once: the clock of the tables is left alone
    read = rows._replace(row_clock=rows.row_clock.clone())
    for gradient in gradients:
        accumulate_grad_(
            pending, read, gradient.output, gradient.batch, gradient.handles, gradient.updates
        )
    merge_grad_(pending, read)
    return pending


__all__ = [
    "EXPECTED",
    "OPEN",
    "SEVERAL",
    "Gradient",
    "Meeting",
    "end_meeting",
    "expect",
    "meeting_of",
    "opened_again",
    "sum_gradients",
]
