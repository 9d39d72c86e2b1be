"""Lookups whose backward, which updates the rows, is still to come.

A backward updates the rows once for a lookup. The gradients of a second lookup of the same tables
in the same backward would then meet rows that have changed since it read them. The kernels refuse
those, but only after the first update; here both are refused before any row changes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

# By the id of the tables' row_clock: the node of the autograd graph that was opened last. An open
# node has the tensors of its tables, so while it is alive, no other tensor gets that id.
_open: dict[int, weakref.ref[Any]] = {}
# By the same key, all nodes where several are open: empty in a program that looks tables up once a
# forward.
_several: dict[int, list[weakref.ref[Any]]] = {}
# By the same key, the backward that has updated the rows last.
_last_backwards: dict[int, int] = {}
_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_ref = weakref.ref
_task = torch._C._current_graph_task_id
_REENTRANT = CheckpointFunction.backward.__code__


def name_tables(row_clock: Tensor, names: Sequence[str]) -> None:
    """Tell how tables are called in errors.

    Args:
        row_clock: of the tables.
        names: one for each table.
    """
    _names[row_clock] = list(names)


def lookup_opened(row_clock: Tensor, node: Any) -> None:
    """Note a lookup whose backward will update the rows.

    Args:
        row_clock: of the tables.
        node: of the autograd graph, with the lookup as ``lookup``.

    Raises:
        RuntimeError: a checkpoint repeats the lookup in a backward that has updated the rows.
    """
    key = id(row_clock)
    task = _task()
    if task >= 0 and _last_backwards.get(key, -1) >= task and _in_reentrant_checkpoint():
        raise RuntimeError(
            f"dynemb: a checkpoint with use_reentrant=True looks up {_described([node])} again, "
            "whose rows another one has updated earlier in this backward: construct the module "
            "with split=True, or look the concatenated ids up once and split the result"
        )
    last = _open.get(key)
    _open[key] = opened = _ref(node)
    if last is not None:
        nodes = [ref for ref in _several.get(key, [last]) if ref() is not None]
        if nodes:
            _several[key] = [*nodes, opened]


def update_begins(row_clock: Tensor, node: Any) -> None:
    """Check that a backward updates no rows twice, and note that this lookup has had its own.

    Args:
        row_clock: of the tables.
        node: as :func:`lookup_opened` got it.

    Raises:
        RuntimeError: the backward that runs has several lookups of the same tables; of these or of
            others. No row has changed.
    """
    if _several:
        _refuse_several()
    key = id(row_clock)
    _last_backwards[key] = _task()
    _open.pop(key, None)
    if _several and key in _several:
        nodes = [ref for ref in _several.pop(key) if ref() is not None and ref() is not node]
        if nodes:
            _open[key] = nodes[-1]
        if len(nodes) > 1:
            _several[key] = nodes


def _refuse_several() -> None:
    """Raise RuntimeError if the backward that runs has several lookups of the same tables."""
    for refs in list(_several.values()):
        nodes = [node for ref in refs if (node := ref()) is not None]
        # a graph that is kept, such as a loss to be printed later, is not part of this backward
        meeting = [node for node in nodes if torch._C._will_engine_execute_node(node)]
        if len(meeting) > 1:
            raise RuntimeError(
                f"dynemb: {len(meeting)} lookups of {_described(meeting)} meet in one backward, "
                "which updates the rows once for a lookup, so that the second one would not fit "
                "them: construct the module with split=True, which sums gradients until "
                "optimizer.step(), or look the concatenated ids up once and split the result. No "
                "row has changed"
            )


def _in_reentrant_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return True
        frame = frame.f_back
    return False


def _described(nodes: Sequence[Any]) -> str:
    """Return the names of the tables of lookups; in code that is compiled only their numbers."""
    tables = sorted({table for node in nodes for table in node.lookup.tables})
    names = _names.get(nodes[0].lookup.rows.row_clock)
    if names is None:
        dims = sorted({dim for node in nodes for dim in node.lookup.dims})
        return f"compiled tables (numbers {tables} of their group, dims {dims})"
    return f"tables {[names[table] for table in tables]}"


__all__ = ["lookup_opened", "name_tables", "update_begins"]
