"""Whole tables in one process, gathered from the ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.distributed.together import Ranks as Together
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.errors import HostMemoryError
from torch_dynemb.nn.module_kinds import Choices, KeptTables
from torch_dynemb.ops.columns import BUCKET_WORDS
from torch_dynemb.parts.kept_ids import kept_ids, scored_part
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.policy.policy import Policy
from torch_dynemb.rows.read import batches_of
from torch_dynemb.rows.row_update import RowUpdate
from torch_dynemb.rows.travel import to_all_ranks
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.row_batch import RowBatch

_BATCH_BYTES = 8 << 20  # of rows per exchange
_ALONE = Together(None, 0, 1)


def whole_config(config: TableConfig) -> TableConfig:
    """Return the config of a read-only table: without a policy, with all rows in memory.

    Args:
        config: of the table, or of a part that has all its columns.
    """
    return replace(config, policy=Policy(), feature_policies={}, storage=None)


def gathered(
    owner: str,
    parts: Sequence[TablePart],
    configs: Sequence[TableConfig],
    *,
    names: Sequence[str],
    seed: int,
    device: torch.device,
    process_group: dist.ProcessGroup | None,
    choices: Choices,
) -> TableGroup | None:
    """Gather whole tables for a read-only copy; the parts do not change.

    All ranks of the process group call it, unless ``choices.ranks`` is ``"own"`` and all ids are
    copied, which exchanges nothing.

    Args:
        owner: prefix of error messages.
        parts: of the tables on this rank.
        configs: of the whole tables, see :func:`whole_config`; the same on all ranks.
        names: of the parts of each of them.
        seed: of initial values.
        device: of the rows.
        process_group: of the ranks that share the tables; None: this process has all of them.
        choices: ranks that get rows, and rules for their ids.

    Returns:
        The tables; None on ranks that get no rows.

    Raises:
        ValueError: ``ranks`` is ``"own"``, and this rank has only some columns of a table.
        HostMemoryError: the rows do not fit in memory.
    """
    ranks = choices.ranks
    alone = ranks == "own" or process_group is None
    together = _ALONE if alone else ranks_of(process_group)
    gets = ranks == "all" or together.rank == 0
    by_table = [[part for part in parts if part.name == name] for name in names]
    if ranks == "own":
        _check_columns(owner, parts)
    kept = None
    if choices.keep is not None:
        sharing = _ALONE if process_group is None else ranks_of(process_group)
        kept = _kept(owner, choices.keep, parts, sharing)
    here = [sum(_size(part, kept) for part in of) for of in by_table]
    sizes = [sum(of_ranks) for of_ranks in zip(*together.gather(here), strict=True)]

    def new_group() -> TableGroup | None:
        if not gets:
            return None
        _check_room(owner, configs, sizes, device)
        most = max(1, sum(sizes))
        group = TableGroup(configs, optimizer=None, max_rows=most, seed=seed, device=device)
        for table, size in enumerate(sizes):
            group.reserve(table, min(size, most))
        return group

    group = together.run(new_group)
    for table, of in enumerate(by_table):
        own = (batch for part in of for batch in _batches(part, kept))
        for batch in to_all_ranks(own, together, device, only_first=ranks == "first"):
            assert group is not None
            RowUpdate(
                f"{owner}: table {names[table]!r}",
                group.tables,
                table,
                batch,  # other ranks have the other columns
            ).apply()
    return group


def whole_group(
    owner: str, group: TableGroup, process_group: dist.ProcessGroup | None, choices: Choices
) -> TableGroup | None:
    """Gather the whole tables of a group that is spread by ids over ranks; see :func:`gathered`.

    Args:
        owner: prefix of error messages.
        group: of this rank, with the same tables as the groups of the others.
        process_group: of the ranks; None: this process has all ids.
        choices: ranks that get rows, and rules for their ids.

    Returns:
        The group itself if nothing has to be gathered; None on ranks that get no rows.
    """
    if choices.keep is None and (process_group is None or choices.ranks == "own"):
        return group
    config = group.config
    return gathered(
        owner,
        [
            TablePart(table.name, group, number, table.embedding_dim)
            for number, table in enumerate(config.tables)
        ],
        [whole_config(table) for table in config.tables],
        names=config.names,
        seed=config.seed,
        device=group.device,
        process_group=process_group,
        choices=choices,
    )


def _kept(
    owner: str, keep: KeptTables, parts: Sequence[TablePart], sharing: Together
) -> dict[tuple[int, int], Tensor]:
    """Return the ids to copy of each part, int64 [m], ascending. All ranks call it."""
    found = [keep.rules[id(part.group), part.table] for part in parts]
    names = [name for name, _ in found]
    scored = sharing.run(
        lambda: [
            scored_part(owner, part, rule) for part, (_, rule) in zip(parts, found, strict=True)
        ]
    )
    keep.names.update(name for of_rank in sharing.gather(names) for name in of_rank)
    ids = kept_ids(scored, names, sharing)
    return {(id(part.group), part.table): of for part, of in zip(parts, ids, strict=True)}


def _size(part: TablePart, kept: dict[tuple[int, int], Tensor] | None) -> int:
    if kept is None:
        return part.group.size(part.table)
    return kept[id(part.group), part.table].numel()


def _check_columns(owner: str, parts: Sequence[TablePart]) -> None:
    for part in parts:
        if len(part.columns) < part.embedding_dim:
            raise ValueError(
                f"{owner}: ranks is 'own', but this rank has columns {part.columns.start} to "
                f"{part.columns.stop - 1} of table {part.name!r} only, which has "
                f"{part.embedding_dim}: freeze with ranks='all' or 'first', or shard the table by "
                "rows"
            )


def _check_room(
    owner: str, configs: Sequence[TableConfig], sizes: Sequence[int], device: torch.device
) -> None:
    """Raise HostMemoryError if the rows of all ranks do not fit in the memory of this one."""
    if device.type != "cpu":
        return  # the device's allocator reports this
    # in the group, and again in its copy; an index is at least half full
    needed = 2 * sum(
        size * (config.embedding_dim * config.dtype.itemsize + 4 + 2 * BUCKET_WORDS * 8 // 4)
        for config, size in zip(configs, sizes, strict=True)
    )
    free = ops.available_memory()
    if needed > free:
        raise HostMemoryError(
            f"{owner}: the rows of all ranks take {needed} bytes while they are brought together, "
            f"but {free} bytes of memory are free: freeze with ranks='first' on a machine with "
            "more memory, with ranks='own', or save the model with torch_dynemb.checkpoint.save",
            tables=[config.name for config in configs],
        )


def _batches(part: TablePart, kept: dict[tuple[int, int], Tensor] | None) -> Iterator[RowBatch]:
    """Yield the rows of a part, without expired ids; of kept ids only."""
    row_bytes = part.config.embedding_dim * part.config.dtype.itemsize
    return batches_of(
        part.group.tables,
        part.table,
        max(1, _BATCH_BYTES // row_bytes),
        first_column=part.first_column,
        state=False,
        scores=False,
        only=None if kept is None else kept[id(part.group), part.table],
    )


__all__ = ["gathered", "whole_config", "whole_group"]
