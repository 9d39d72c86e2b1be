"""Rows of new ids from a function, such as content vectors of items that no user has seen yet."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, flat_int64, float_rows, text
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.parts.owned_rows import OwnedRows, assign_all, rows_to_owners
from torch_dynemb.parts.table_parts import TablePart, parts_of
from torch_dynemb.table.removal import contains
from torch_dynemb.table.row_batch import RowBatch


@torch.no_grad()
def insert_new(
    model: nn.Module,
    table: str,
    ids: Tensor,
    rows_of: Callable[[Tensor], Tensor],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Insert those of some ids that a table lacks, with rows from a function.

    Call it before a lookup of the ids, so that they begin with these rows in place of the values of
    the initializer. An id in the table keeps its row. Admission does not apply; otherwise new ids
    are inserted as :meth:`torch_dynemb.TableGroup.insert_or_assign` does.

    All ranks that share the table call it together, each with its own ids. An error of one rank is
    raised on all of them, and no id is inserted.

    Args:
        model: a module of this library, a model with such modules, or a DistributedModelParallel.
        table: its name in its module, or in a checkpoint of the model, with or without the path;
            ``""`` for the only table.
        ids: int64 of any shape, also repeated ones. The padding id is skipped.
        rows_of: function of the ids that this rank owns and lacks, int64 [n], each once. It returns
            their rows, float [n, dim], without gradients. It is called once, or not at all if there
            are none. Ranks with other columns of the same ids each call it.
        process_group: of the ranks that call it together; default: all.

    Returns:
        Number of ids that were inserted on this rank.

    Raises:
        TypeError: an argument has another type, or ``rows_of`` has returned another one.
        ValueError: no table or several have this name, or ids or rows have a wrong shape or device.
        NotImplementedError: rows of the table are packed, as 8-bit rows of RecIS are.
        RuntimeError: called in compiled code, or while a CUDA graph is captured.
        NoRoomError: the table is full, or memory is short.
        Exception: of ``rows_of``.

    Example:
        >>> import torch, torch_dynemb as td
        >>> items = td.DynamicEmbedding(2, name="items", optimizer=td.SGD(lr=0.1))
        >>> ids = torch.tensor([7, 8, 7])
        >>> td.insert_new(items, "items", ids, lambda new: torch.stack([new, -new], 1).float())
        2
        >>> items(ids)[1].tolist()
        [8.0, -8.0]
        >>> td.insert_new(items, "items", ids, lambda new: torch.zeros(len(new), 2))
        0
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "insert_new: called in compiled code, which cannot call rows_of for the ids that a "
            "table lacks: call it before the compiled step"
        )
    ranks = ranks_of(process_group)
    parts, given = ranks.run(lambda: _checked(model, table, ids, rows_of))
    shards = ranks.gather([part.shard for part in parts])
    names = sorted({shard.name for of_rank in shards for shard in of_rank})
    if len(names) != 1:
        raise ValueError(
            f"insert_new: table is {table!r}, the name of {names or 'no table'}, expected that of "
            "one dynamic table of the model, with the path of its module if others have it, too"
        )
    arrived = rows_to_owners(parts, shards, RowBatch.without_rows(given), ranks)
    owned = ranks.run(lambda: [_with_rows(part, batch.ids, rows_of) for part, batch in arrived])
    assign_all("insert_new", owned, ranks)
    return sum(of.batch.ids.numel() for of in owned if of.part.first_column == 0)


def _checked(
    model: nn.Module, table: str, ids: Tensor, rows_of: object
) -> tuple[list[TablePart], Tensor]:
    """Return the parts of a table on this rank, and the ids as int64 [n]."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"insert_new: model is {described(model)}, expected a torch.nn.Module")
    name = text("insert_new: table", table)
    if not callable(rows_of):
        raise TypeError(f"insert_new: rows_of is {described(rows_of)}, expected a function")
    everything = parts_of(model)
    parts = [
        of
        for of in everything
        if name in ("", of.name, of.config.name) or of.name.endswith(f".{name}")
    ]
    for part in parts:
        if part.packed:
            raise NotImplementedError(
                f"insert_new: table {part.name!r} has packed rows, but columns of float32 are "
                "expected: set its rows by the functions of torch_dynemb.recis"
            )
        if part.group.tables.memory.is_capturing():
            raise RuntimeError(
                "insert_new: called while a CUDA graph is captured, but it waits for the ids that "
                "the table lacks: call it before each replay"
            )
    device = (parts or everything)[0].group.device if everything else torch.device("cpu")
    return parts, flat_int64("insert_new: ids", ids, device)


def _with_rows(part: TablePart, ids: Tensor, rows_of: Callable[[Tensor], Tensor]) -> OwnedRows:
    """Return the ids that a part lacks, with their rows."""
    ends = torch.arange(2, device=ids.device) * ids.numel()
    new = ops.unique_ids(ids, ends).ids
    absent = ~contains(part.group.tables, part.table, new)
    if part.config.padding_idx is not None:
        absent &= new != part.config.padding_idx
    new = new[absent]
    if new.numel() == 0:
        none = torch.empty(0, part.config.embedding_dim, device=ids.device)
        return OwnedRows(part, RowBatch(new, none))
    rows = float_rows("insert_new: the result of rows_of", rows_of(new), ids.device)
    if tuple(rows.shape) != (new.numel(), part.embedding_dim):
        raise ValueError(
            f"insert_new: rows_of returned shape {tuple(rows.shape)}, expected "
            f"({new.numel()}, {part.embedding_dim}), a row for each id that it was given"
        )
    return OwnedRows(part, RowBatch(new, rows[:, part.columns.start : part.columns.stop]))


__all__ = ["insert_new"]
