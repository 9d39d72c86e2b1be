"""Loading of a group of tables in place: every id in its slot, every row in its place.

The file of a group has its index as ``table.state`` has it. The rows come from the files that any
group can load.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.checkpoint.loading.group import GroupLoad
from torch_dynemb.checkpoint.loading.part import Stream
from torch_dynemb.checkpoint.loading.table_plan import TablePlan
from torch_dynemb.checkpoint.manifest.records import Manifest, SavedGroup
from torch_dynemb.checkpoint.reading.read_ahead import Read, read_ahead
from torch_dynemb.checkpoint.reading.saved_rows import SavedRows, kinds_of
from torch_dynemb.errors import DamagedFileError, NoRoomError
from torch_dynemb.files.checksummed_files import read_tensors
from torch_dynemb.files.locations import Location
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    GENERATION_BITS,
    GENERATION_MASK,
    Meta,
    Slab,
    Table,
)
from torch_dynemb.parts.saved_tables import NO_GROUP, SavedPart
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.rows.tensor_names import WEIGHT, state_entry
from torch_dynemb.table import state as table_state
from torch_dynemb.table.config import SlabConfig
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.records import record_bytes
from torch_dynemb.table.row_access import handle_rows, state_tensors, write_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.state_check import check_content, check_counts


def saved_group_of(group: TableGroup, plans: Sequence[TablePlan], manifest: Manifest) -> int | None:
    """Return the number of the saved group with the same tables, parts and policies, or None.

    Args:
        group: group of the model.
        plans: plans of its tables that are loaded.
        manifest: manifest of the checkpoint.
    """
    config = group.config
    if sorted(plan.part.table for plan in plans) != list(range(len(config.tables))):
        return None
    found = set()
    for plan in plans:
        source = source_of(plan.part, plan.saved.parts)
        own = plan.part.optimizer
        optimizer = None if own is None else own.description()
        if (
            source is None
            or source.group == NO_GROUP
            or source.number != plan.part.table
            or plan.fresh
            or plan.saved.dtype != plan.part.dtype
            or plan.saved.padding_idx != plan.part.config.padding_idx
            or plan.saved.optimizer != optimizer
            or plan.saved.policy != plan.part.config.policy.description()
            or source.counters[Table.BUCKET_COUNT]
            > int(group.index.meta[plan.part.table, Meta.REGION_BUCKETS])
        ):
            return None
        found.add(source.group)
    if len(found) != 1:
        return None
    (number,) = found
    saved = manifest.groups[number]
    same = saved.score_words == list(config.layout.score_words)
    same = same and _saved_slabs(config, saved) is not None
    return number if same and len(saved.tables) == len(plans) else None


def _saved_slabs(config: GroupConfig, saved: SavedGroup) -> list[SlabConfig] | None:
    """Return the slabs of the saved group; None if its tables shared other slabs."""
    of_tables = [
        table.slab._replace(tiered=number in saved.stored)
        for number, table in enumerate(config.tables)
    ]
    slabs = sorted(set(of_tables), key=lambda slab: slab.order)
    numbers = [slabs.index(slab) for slab in of_tables]
    same = numbers == [config.slab_of(table) for table in range(len(config.tables))]
    return slabs if same else None


def source_of(part: TablePart, saved: Sequence[SavedPart]) -> SavedPart | None:
    """Return the saved part with the same columns and ids."""
    for of in saved:
        columns = range(of.first_column, of.first_column + of.columns)
        if of.id_slots == part.ids and columns == part.columns:
            return of
    return None


class _Saved(NamedTuple):
    """Source of a table.

    Attributes:
        plan: plan of the table.
        source: saved part with the same columns and ids.
    """

    plan: TablePlan
    source: SavedPart

    @property
    def table(self) -> int:
        """Number of the table in the group."""
        return self.plan.part.table

    @property
    def by_id(self) -> bool:
        """Whether its files are in the order of ids, not of rows."""
        return self.source.columns < self.plan.saved.embedding_dim


class ExactLoad(GroupLoad):
    """Loader of all tables of a group.

    Args:
        group: group of the model.
        plans: plans of all its tables.
        saved: the saved group.
        stream: access to the files.

    Raises:
        DamagedFileError: the file of the group is damaged or inconsistent.
        NoRoomError: too few rows are reserved.
    """

    exact = True

    def __init__(
        self, group: TableGroup, plans: Sequence[TablePlan], saved: SavedGroup, stream: Stream
    ) -> None:
        super().__init__(group, plans, stream)
        self._saved = []
        for plan in plans:
            source = source_of(plan.part, plan.saved.parts)
            assert source is not None
            self._saved.append(_Saved(plan, source))
        self._state = self._read_state(stream.folder / saved.file.path, saved)

    @property
    def counts(self) -> list[int]:
        return [of.source.ids for of in self._saved]

    # -- index -----------------------------------------------------------------------------------

    def _read_state(self, path: Location, saved: SavedGroup) -> dict[str, Tensor]:
        """Read and check the group's file. Names are those of this group's tables and slabs."""
        tables = self._tables
        state = _renamed(read_tensors(path, saved.file.sums), tables.config.names)
        slabs = _saved_slabs(tables.config, saved)
        assert slabs is not None
        free = {slab.name: state.pop(_free_rows(slab), None) for slab in slabs}
        for own, slab in zip(tables.config.slabs, slabs, strict=True):
            rows = free[slab.name]
            if rows is not None:
                state[_free_rows(own)] = rows
        try:
            state = table_state.entries_of(tables, state, rows=False)
            self._check_sizes(state)
            self._by_row = check_content(tables, state)
        except ValueError as error:
            raise DamagedFileError(f"{path}: {error}", path=path) from error
        return state

    def _check_sizes(self, state: dict[str, Tensor]) -> None:
        """Raise ValueError if ids differ from the manifest's, NoRoomError if there are too many
        rows.
        """
        config, rows = self._tables.config, [0] * len(state["slabs"])
        for of in self._saved:
            ids = int(state["tables"][of.table, Table.SIZE])
            if ids != of.source.ids:
                raise ValueError(
                    f"table {of.plan.part.name!r} has {ids} ids in its index, expected "
                    f"{of.source.ids}"
                )
            rows[config.slab_of(of.table)] += ids
        for s, slab in enumerate(config.slabs):
            used = rows[s] + state[_free_rows(slab)].shape[0]
            reserved = self._tables.reserved_rows(s)
            if used == int(state["slabs"][s, Slab.NEXT_ROW]) and used > reserved:
                raise NoRoomError(
                    f"checkpoint.load: slab {slab.name!r} has {used} rows, but the model reserves "
                    f"{reserved}: construct it with a larger max_rows, capacity or budget",
                    tables=config.names,
                )

    def _in_file_order(self, saved: _Saved) -> tuple[Tensor, Tensor]:
        """Return ids and handles of a table in the order of its files, int64 [n] each."""
        buckets = self._state[f"{self._tables.config.names[saved.table]}.buckets"]
        stored = buckets[:, BUCKET_WIDTH:].reshape(-1)
        slots = stored.nonzero()[:, 0]
        handles, ids = stored[slots] - 1, buckets[:, :BUCKET_WIDTH].reshape(-1)[slots]
        order = torch.argsort(ids if saved.by_id else handles)
        return ids[order], handles[order]

    def _handles(self, saved: _Saved) -> Tensor:
        """Return the handles alone, in the same order."""
        slab = self._tables.config.slab_of(saved.table)
        by_row = self._by_row[slab]
        alone = sum(self._tables.config.slab_of(of.table) == slab for of in self._saved) == 1
        if alone and not saved.by_id:  # faster than a sort
            return by_row[by_row != 0]
        return self._in_file_order(saved)[1]

    # -- rows ------------------------------------------------------------------------------------

    def stream(self) -> None:
        tables = self._tables
        tables.memory.bind(
            tables.index,
            tables.rows,
            self._state["tables"][:, Table.BUCKET_COUNT].tolist(),
            self._state["slabs"][:, Slab.NEXT_ROW].tolist(),
        )
        in_store = [
            saved
            for saved in self._saved
            if tables.stored(tables.config.slab_of(saved.table)) is not None
        ]
        read_ahead(self._reads([saved for saved in self._saved if saved not in in_store]))
        for saved in in_store:
            self._stream_to_store(saved)

    def _stream_to_store(self, saved: _Saved) -> None:
        """Write rows and state of a table to its store, piece by piece."""
        tables, table = self._tables, saved.table
        slab = tables.config.slab_of(table)
        state = state_tensors(tables, slab)
        weights = tables.rows.weights[slab]
        ids, handles = self._in_file_order(saved)
        with self._open(saved) as rows:
            for low, high in rows.ranges(record_bytes(tables.config, slab)):
                own = weights.new_empty(high - low, weights.shape[1])
                rows.read(WEIGHT, low, own)
                of_state = {}
                for name, tensor in state.items():
                    values = tensor.new_empty(high - low, *tensor.shape[1:])
                    rows.read(state_entry(name), low, values)
                    if values.dtype == torch.int32:
                        check_counts(state_entry(name), values)
                    of_state[name] = values
                of_rows = handles[low:high]
                newest = self.loader.newest
                newest[slab] = max(newest[slab], int((of_rows & GENERATION_MASK).max()))
                write_rows(tables, table, RowBatch(ids[low:high], own, of_state), of_rows)
                row_bytes = rows.section(WEIGHT).row_bytes
                row_bytes += sum(rows.section(state_entry(name)).row_bytes for name in state)
                self._stream.progress((high - low) * row_bytes)
            rows.finish()

    def _reads(self, in_memory: Sequence[_Saved]) -> Generator[Read, None, None]:
        """Iterate over rows and state of tables, piece by piece."""
        tables = self._tables
        for saved in in_memory:
            slab = tables.config.slab_of(saved.table)
            targets = {WEIGHT: tables.rows.weights[slab]}
            for name, tensor in state_tensors(tables, slab).items():
                targets[state_entry(name)] = tensor
            numbers = handle_rows(self._handles(saved))
            with self._open(saved) as rows:
                for name, target in targets.items():
                    section = rows.section(name)
                    for low, high in rows.ranges(section.row_bytes):
                        yield self._read(rows, name, low, numbers[low:high], target)
                rows.finish()

    def _read(self, rows: SavedRows, name: str, low: int, numbers: Tensor, target: Tensor) -> Read:
        """Read rows from ``low`` on into the rows of a target with these numbers."""
        section = rows.section(name)
        first, last = int(numbers[0]), int(numbers[-1])
        follow = last - first == numbers.shape[0] - 1 and bool((numbers[1:] > numbers[:-1]).all())
        straight = follow and target.device.type == "cpu"

        def use(piece: Tensor) -> None:
            if not straight:
                here, values = numbers.to(target.device), piece.to(target.device)
                _widened(target).index_copy_(0, here, _widened(values))
            if piece.dtype == torch.int32:
                check_counts(name, piece)
            self._stream.progress(piece.shape[0] * section.row_bytes)

        return Read(
            (numbers.shape[0], *section.shape[1:]),
            section.dtype,
            lambda out: rows.read(name, low, out),
            use,
            target[first : last + 1] if straight else None,
        )

    def _open(self, saved: _Saved) -> SavedRows:
        kinds = kinds_of(saved.plan.saved, saved.source, ())
        return self._stream.open(saved.source.rows, kinds)

    def check(self) -> None:
        optimizer = self._tables.config.optimizer
        steps = [] if optimizer is None else [t for t in optimizer.state if t.dtype == torch.int32]
        for saved in self._saved if steps else []:
            with self._open(saved) as rows:
                for tensor in steps:
                    check_counts(state_entry(tensor.name), rows.whole(state_entry(tensor.name)))

    # -- publishing ------------------------------------------------------------------------------

    def publish(self) -> None:
        tables, state = self._tables, self._state
        generations = tables.index.slabs[:, Slab.GENERATION].tolist()
        for s, slab in enumerate(tables.config.slabs):
            if tables.stored(s) is not None:
                state[_free_rows(slab)] = _newer(state[_free_rows(slab)], generations[s])
        table_state.write(tables, state, rows=False)
        for s, by_row in enumerate(self._by_row):
            if tables.stored(s) is None:
                # 0 for free rows: generations from before the load may be newer than those of their
                # next owners
                own = tables.rows.generations[s][: by_row.shape[0]]
                own.copy_(by_row.bitwise_and_(GENERATION_MASK))
        if tables.host.proposed_now is not None:
            tables.host.proposed_now.fill_(max(saved.plan.saved.now for saved in self._saved))
        self.loader.end()
        state.clear()
        self._by_row.clear()


def _renamed(state: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Rename the tables of a file to this group's: a file has the saved group's, in order."""
    saved = (name.removesuffix(".buckets") for name in state if name.endswith(".buckets"))
    own = dict(zip(saved, names, strict=False))
    renamed = {}
    for name, tensor in state.items():
        table, _, kind = name.rpartition(".")
        ours = kind in ("buckets", "scores", "counts") and table in own
        renamed[f"{own[table]}.{kind}" if ours else name] = tensor
    return renamed


def _free_rows(slab: SlabConfig) -> str:
    """Return the name of the entry with the handles of free rows of a slab."""
    return f"{slab.name}.free_rows"


def _newer(free: Tensor, generation: int) -> Tensor:
    """Raise handles of free rows above all those that rows of a store had before a load.

    Args:
        free: int64 [n], on the CPU.
        generation: newest generation of a handle before the load.
    """
    rows = free >> GENERATION_BITS << GENERATION_BITS
    return torch.maximum(free, rows | generation % GENERATION_MASK + 1) if generation else free


def _widened(rows: Tensor) -> Tensor:
    """View rows as 16-byte elements if possible: a copy then moves fewer elements."""
    if rows.dim() == 2 and rows.shape[1] * rows.element_size() % 16 == 0:
        return rows.view(torch.complex128)
    return rows


__all__ = ["ExactLoad", "saved_group_of", "source_of"]
