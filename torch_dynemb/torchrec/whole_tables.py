"""Whole dynamic tables of a model as a stream of rows, such as for an index of items.

A batch takes this way with ``gather=True``, if rank 0 has columns 0 to 7, and rank 1 the others:

1. Rank 0 reads some ids of its shard, with their rows, state and scores, and sends them to all.
2. Rank 1 finds these ids in its own index, and sends their rows and state to all.
3. Every rank puts the columns together.

Ranks with the first columns of other ids follow in turn. Every exchange begins with a collective
that carries errors, so an error of one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from torch_dynemb.argument_checks import described, flag, integer, text
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.nn.module_kinds import SharedRows, TablesOf, tables_in
from torch_dynemb.nn.table_optimizers import row_optimizers
from torch_dynemb.nn.wrappers import wrapped_by
from torch_dynemb.ops.columns import Clock, RowClock, Table
from torch_dynemb.parts.table_parts import TablePart, table_name
from torch_dynemb.rows.column_shards import whole_rows
from torch_dynemb.rows.read import batches_of
from torch_dynemb.rows.travel import to_all_ranks
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import IdSlots
from torch_dynemb.table.tables import one_table
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart
from torch_dynemb.torchrec.planning.choice import suggestion
from torch_dynemb.torchrec.planning.chosen_tables import configs_of
from torch_dynemb.torchrec.planning.options import is_dynamic

_ALONE = Ranks(None, 0, 1)


def table_rows(
    model: nn.Module, table: str, *, gather: bool = True, batch_rows: int = 1 << 16
) -> Iterator[RowBatch]:
    """Iterate over the ids of a dynamic table with rows, optimizer state and scores.

    With ``gather=True`` every rank gets the whole table, batch by batch: the same batches in the
    same order. It is collective. All ranks call it, and all of them iterate to the end, or stop
    after the same batch; otherwise the others wait. Ranks put column shards together by id. With
    ``gather=False`` a rank gets the rows of its own shards, and communicates with no other.

    Rows come in no particular order, and each id once. Expired ids are left out. A rank needs
    memory for two batches: its own, and one that arrives. Train again after the iteration: rows
    that change in between would give a mixture.

    Args:
        model: a DistributedModelParallel, a sharded collection, or any model with dynamic tables.
        table: name of the table, with or without the path of its collection in the model, as in
            :func:`table_sizes`.
        gather: whether every rank gets the rows of all ranks.
        batch_rows: most rows of a batch, at least 1.

    Returns:
        Batches; none if the table has no ids.

    Raises:
        TypeError: an argument has another type.
        ValueError: the model has no such dynamic table, or several of this name, or ``batch_rows``
            is less than 1, or ranks were given different arguments.
        NotImplementedError: rows of the table are packed, as 8-bit rows of RecIS are.
        RuntimeError: during the iteration, the table has changed, or its column shards have
            different ids. With ``gather=True`` all ranks raise.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb.torchrec import table_rows
        >>> ads = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1))
        >>> model = torch.nn.ModuleDict({"ads": ads})
        >>> ads(torch.arange(1000)).sum().backward()
        >>> sizes = [len(batch.ids) for batch in table_rows(model, "ads", batch_rows=300)]
        >>> sum(sizes), max(sizes) <= 300
        (1000, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"table_rows: model is {described(model)}, expected a torch.nn.Module")
    flag("table_rows: gather", gather)
    found = _tables_of(model)
    wanted = [found[table]] if isinstance(table, str) and table in found else []
    wanted = wanted or [of for name, of in found.items() if _is_named(name, table)]
    together = _ALONE
    if gather:
        # a rank with another argument raises together with the others, if the model is shared
        shared = [of.shared for of in (wanted or found.values()) if of.shared is not None]
        together = ranks_of(shared[0].ranks) if shared else _ALONE

    def checked() -> tuple[_SharedTable, int]:
        most = integer("table_rows: batch_rows", batch_rows, least=1)
        text("table_rows: table", table)
        if len(wanted) != 1:
            raise _unknown(model, table, list(found), [of.name for of in wanted])
        (of_name,) = wanted
        packed = [part for part in of_name.parts if part.packed]
        if packed:
            raise NotImplementedError(
                f"table_rows: table {table!r} has packed rows, but columns of float32 are "
                "expected: save the model with torch_dynemb.checkpoint.save, and read that"
            )
        return of_name, most

    of, most = together.run(checked)
    together.agree("table_rows", table=of.name, batch_rows=most)
    if gather:
        return _gathered(of, most, together)
    return (batch for part in of.parts for batch in _batches(part, most))


# -- the table in the model ----------------------------------------------------------------------


class _SharedTable(NamedTuple):
    """A dynamic table of a model.

    Attributes:
        name: with the path of its module.
        parts: on this rank.
        shared: the ranks that share it; None: this process has all of it.
    """

    name: str
    parts: list[TablePart]
    shared: SharedRows | None


def _tables_of(model: nn.Module) -> dict[str, _SharedTable]:
    """Return the dynamic tables of a model by name, also those without a part on this rank."""
    found: dict[str, _SharedTable] = {}
    for path, module, parts_of in _modules_with_tables(model, "", set()):
        shared = next(
            (of for inner in module.modules() if (of := row_optimizers(inner).shared) is not None),
            None,
        )
        here: dict[str, list[TablePart]] = {}
        if isinstance(module, DynamicPart):
            here = {table_name(path, name): [] for name in module.plan_of_tables.options}
        for part in parts_of(module, path):
            here.setdefault(part.name, []).append(part)
        found |= {name: _SharedTable(name, parts, shared) for name, parts in here.items()}
    return found


def _modules_with_tables(
    module: nn.Module, path: str, visited: set[int]
) -> Iterator[tuple[str, nn.Module, TablesOf]]:
    """Yield path, module and the function that lists its tables, as checkpoints find them."""
    if id(module) in visited:
        return
    visited.add(id(module))
    if isinstance(module, DistributedModelParallel):
        yield from _modules_with_tables(module.module, path, visited)
        return
    listing = tables_in(module)
    if listing is not None:
        yield path, module, listing
        return
    inner = wrapped_by(module)
    for name, child in module.named_children():
        within = path if name == inner else table_name(path, name)
        yield from _modules_with_tables(child, within, visited)


def _is_named(name: str, table: object) -> bool:
    return isinstance(table, str) and (name == table or name.endswith(f".{table}"))


def _unknown(model: nn.Module, table: str, known: list[str], several: list[str]) -> ValueError:
    """Return the error for a name that is not that of one dynamic table."""
    if several:
        return ValueError(
            f"table_rows: table is {table!r}, which several tables are called: give one of "
            f"{several}"
        )
    if any(_is_named(name, table) for name in _static_tables(model)):
        return ValueError(
            f"table_rows: table {table!r} is static, expected a dynamic one of {sorted(known)}: "
            "the weight of a static table is in model.state_dict()"
        )
    if not known:
        return ValueError(
            f"table_rows: model, a {type(model).__name__}, has no dynamic tables: give what "
            "DistributedModelParallel returns, with sharders of torch_dynemb.torchrec, or a model "
            "with modules of torch_dynemb"
        )
    short = [name.rpartition(".")[2] for name in known]
    return ValueError(
        f"table_rows: table is {table!r}, expected one of {sorted(known)}"
        f"{suggestion(table, [*known, *short])}"
    )


def _static_tables(model: nn.Module) -> Iterator[str]:
    """Yield the names of the static tables in TorchRec's collections."""
    for path, module in model.named_modules():
        planned = getattr(module, "module_sharding_plan", None)
        if isinstance(planned, Mapping):
            names = [name for name, sharding in planned.items() if not is_dynamic(sharding)]
        else:
            names = [config.name for config in configs_of(module)]
        yield from (table_name(path, name) for name in names)


# -- rows of this rank ---------------------------------------------------------------------------


def _batches(part: TablePart, batch_rows: int) -> Iterator[RowBatch]:
    """Yield the rows of a part, without expired ids.

    Raises:
        RuntimeError: the table has changed meanwhile.
    """
    before = _content_mark(part)
    tables, first = part.group.tables, part.first_column
    for batch in batches_of(tables, part.table, batch_rows, first_column=first):
        if _content_mark(part) != before:
            raise RuntimeError(
                f"table_rows: table {part.name!r} has changed while its rows are read, so that "
                "they would be a mixture: train after the iteration"
            )
        yield batch


def _content_mark(part: TablePart) -> tuple[int, int, int]:
    """Return numbers that training changes: steps, updates of rows, ids."""
    tables = part.group.tables
    updates = len(tables.config.tables) + RowClock.UPDATES
    return (
        int(tables.index.clock[Clock.STEP]),
        int(tables.rows.row_clock[updates]),
        int(tables.index.tables[part.table, Table.SIZE]),
    )


# -- rows of all ranks ---------------------------------------------------------------------------


class _ShardSpec(NamedTuple):
    """Facts of a part that all ranks know.

    Attributes:
        rank: that has it.
        columns, ids: of the part.
        size: number of ids.
        per_row: names of the optimizer state with one value per row.
    """

    rank: int
    columns: range
    ids: IdSlots
    size: int
    per_row: list[str]


def _described(part: TablePart, rank: int) -> _ShardSpec:
    optimizer = part.group.config.optimizer
    per_row = [of.name for of in (() if optimizer is None else optimizer.state) if of.per_row]
    return _ShardSpec(rank, part.columns, part.ids, part.group.size(part.table), per_row)


def _gathered(table: _SharedTable, batch_rows: int, together: Ranks) -> Iterator[RowBatch]:
    """Yield the rows of all ranks on every rank."""
    parts = table.parts
    specs = together.gather([_described(part, together.rank) for part in parts])
    by_ids: dict[IdSlots, list[_ShardSpec]] = {}
    for spec in sorted((of for of_rank in specs for of in of_rank), key=lambda of: of.columns[0]):
        by_ids.setdefault(spec.ids, []).append(spec)
    per_row = {name for of_rank in specs for of in of_rank for name in of.per_row}
    for first, *others in by_ids.values():
        for other in others:
            _check_same_ids(table.name, first, other)
    split = any(len(shards) > 1 for shards in by_ids.values())
    device = torch.device("cpu") if table.shared is None else table.shared.device
    own = (of for part in parts if part.first_column == 0 for of in _batches(part, batch_rows))
    for batch in to_all_ranks(own, together, device):
        pieces = [batch]
        if split:
            others_of = _read_columns(parts, batch.ids)
            pieces += to_all_ranks(others_of, together, device)
            pieces.sort(key=lambda piece: piece.first_column)
        yield whole_rows(pieces, per_row)


def _read_columns(parts: list[TablePart], ids: Tensor) -> Iterator[RowBatch]:
    """Yield further columns of ids from the parts on this rank.

    Raises:
        RuntimeError: a part lacks an id.
    """
    for part in parts:
        if part.first_column == 0 or not bool(part.ids.owned(ids).all()):
            continue
        tables = part.group.tables
        handles = find(tables, *one_table(tables, part.table, ids)).handles
        if bool((handles < 0).any()):
            lacking = ids[handles < 0][0].item()
            raise RuntimeError(
                f"table_rows: table {part.name!r} lacks id {lacking} in columns "
                f"{part.columns.start} to {part.columns.stop - 1}: evictions have made its column "
                "shards differ; shard a table that evicts by rows"
            )
        rows = read_rows(tables, part.table, ids, handles)
        yield rows._replace(first_column=part.first_column)


def _check_same_ids(table: str, first: _ShardSpec, other: _ShardSpec) -> None:
    if first.size != other.size:
        raise RuntimeError(
            f"table_rows: table {table!r} has {first.size} ids in its columns on rank "
            f"{first.rank} and {other.size} in those on rank {other.rank}: evictions have made "
            "its column shards differ; shard a table that evicts by rows"
        )


__all__ = ["table_rows"]
