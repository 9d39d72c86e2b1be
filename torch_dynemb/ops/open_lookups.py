"""Lookups of training steps before their backward, which updates the rows.

A backward updates the rows once for each lookup. Gradients of a second lookup of the same tables in
the same backward would meet rows that have changed since it read them. The kernels refuse those,
but only after the first update; here both are refused before any row changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torch_dynemb._library.error_names import known_names

# By the id of the tables' row_clock: the node of the autograd graph that was opened last. An open
# node owns the tensors of its tables, so while it is alive, that id is not reused.
OPEN: dict[int, weakref.ref[Any]] = {}
# By the same key, all nodes where several are open; empty in a program that looks tables up once
# per forward. Lookups access both directly, since a function call takes longer.
SEVERAL: dict[int, list[weakref.ref[Any]]] = {}


def opened_again(key: int, node: Any) -> None:
    """Record a lookup of tables that have or had an open one.

    Args:
        key: of the tables, in ``OPEN``.
        node: of the autograd graph; its attribute ``lookup`` is the lookup.
    """
    # entries of deleted tables may have the key, too: Python reuses ids
    refs = SEVERAL.pop(key, [])
    last = OPEN[key]
    nodes = [ref for ref in refs if ref is not last and ref() is not None]
    if last() is not None:
        nodes.append(last)
    if nodes:
        SEVERAL[key] = [*nodes, weakref.ref(node)]


def update_begins(key: int, node: Any) -> None:
    """Check that a backward updates no rows twice, and record this lookup's update.

    Args:
        key: of the tables, in ``OPEN``; 0: the backward does not update them.
        node: as :func:`opened_again` got it.

    Raises:
        RuntimeError: the running backward has several lookups of the same tables. No row has
            changed.
    """
    _refuse_several()
    OPEN.pop(key, None)
    nodes = [ref for ref in SEVERAL.pop(key, []) if ref() is not None and ref() is not node]
    if nodes:
        OPEN[key] = nodes[-1]
    if len(nodes) > 1:
        SEVERAL[key] = nodes


def _refuse_several() -> None:
    """Raise RuntimeError if the backward that runs has several lookups of the same tables."""
    for key, refs in list(SEVERAL.items()):
        nodes = [node for ref in refs if (node := ref()) is not None]
        if not nodes:
            del SEVERAL[key]
        # a graph that is kept, such as that of a loss to be printed later, is not part of this
        # backward
        meeting = [node for node in nodes if torch._C._will_engine_execute_node(node)]
        if len(meeting) > 1:
            raise RuntimeError(
                f"dynemb: {len(meeting)} lookups of {_described(meeting)} meet in one backward, "
                "which updates the rows once for a lookup, so that the second one would not fit "
                "them: construct the module with split=True, which sums gradients until "
                "optimizer.step(), or look the concatenated ids up once and split the result. No "
                "row has changed"
            )


def _described(nodes: Sequence[Any]) -> str:
    """Return the names of the tables of lookups; in compiled code only their numbers."""
    tables = sorted({table for node in nodes for table in node.lookup.tables})
    names = known_names(nodes[0].lookup.rows.meta)
    if names is None:
        dims = sorted({dim for node in nodes for dim in node.lookup.dims})
        return f"compiled tables (numbers {tables} of their group, dims {dims})"
    return f"tables {[names[table] for table in tables]}"


__all__ = ["OPEN", "SEVERAL", "opened_again", "update_begins"]
