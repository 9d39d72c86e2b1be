"""Read-only tables with rows in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.finalizers import finalize
from torch_dynemb.argument_checks import table_number
from torch_dynemb.delta_log.redis.rows import RedisRows
from torch_dynemb.ops.columns import Meta, Table
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.serving.file_names import name_file, path_of, use_of
from torch_dynemb.serving.frozen_tables import FrozenTables, copied_index
from torch_dynemb.serving.missing import CountedTables, note_missing
from torch_dynemb.serving.remote_tables import RemoteTables
from torch_dynemb.serving.row_files import RowFolder
from torch_dynemb.storage.tiers.configs import IO_PATHS
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.undisturbed import Undisturbed

_BUFFERS = ("file", "tables", "meta", "init_data")
# where freeze() puts the rows of the tables that it copies, or finds them; None: in memory
ROWS_IN: ContextVar[RowFolder | RedisRows | None] = ContextVar(
    "torch_dynemb.serving.ROWS_IN", default=None
)


class OpenedFile:
    """A use of a file, which ends with this object. A copy is a use of its own.

    Args:
        file: the tensor that names it.
        live: for live tables, their meta and the headroom of each. They have no copies.

    Attributes:
        file: a copy of it, for as long as this object lives.
    """

    def __init__(self, file: Tensor, live: tuple[Tensor, Sequence[int]] | None = None) -> None:
        if live is None:
            ops.file_open(file)
        else:
            ops.file_make_live(file, *live)
        self.file, self._live = file.clone(), live is not None
        finalize(self, ops.file_close, self.file).atexit = False

    @property
    def name(self) -> str:
        """Name of the file, without its folder."""
        return os.path.basename(path_of(self.file))

    @property
    def use(self) -> tuple[int, ...]:
        """Words that other uses of the same rows and changes have, too."""
        return use_of(self.file)

    def stats(self) -> ops.RowFileStats:
        """Return counts of the file in this process."""
        return ops.file_stats(self.file)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenedFile:
        return OpenedFile(self._copied())

    def __reduce__(self) -> tuple[type[OpenedFile], tuple[Tensor]]:
        return OpenedFile, (self._copied(),)

    def _copied(self) -> Tensor:
        if self._live:
            raise TypeError(
                "live tables with rows in a file cannot be copied, pickled or frozen: their "
                "changes are in the memory of this process. Use the model of "
                "torch_dynemb.freeze(storage=) that they were made of"
            )
        return self.file


class FileTables(CountedTables):
    """A group's ids and rows in a file, with a cache of rows in memory.

    The module's buffers name the file; copies, pickles and exported programs use the same file,
    which must stay where it is. Rows are read when they are asked for, many at a time, and compared
    with their checksums. Any number of threads may look up. All copies in a process share a cache.

    Args:
        group: the tables to copy.
        folder: where the file is written. Its cache is known once all files are written:
            :meth:`open`.
        kept_because: reason if rows cannot be stored in another format.

    Attributes:
        rows: their number.
        row_bytes: of all rows.

    Raises:
        DiskFullError: the disk is full.
        InUseError: another thread trains or changes the tables.
        RuntimeError: the tables are not on the CPU.
    """

    _opened: OpenedFile | None = None

    def __init__(self, group: TableGroup, folder: RowFolder, kept_because: str | None) -> None:
        super().__init__()
        self.names = group.names
        if kept_because is not None and folder.rows is not None:
            raise ValueError(f"freeze: rows is {folder.rows!r}, but {kept_because}")
        if (device := group.index.meta.device).type != "cpu":
            raise RuntimeError(
                f"freeze: storage is given, but tables {self.names} are on {device}, and the CPU "
                "reads the files of rows: load the model's checkpoint into one on the CPU, and "
                "freeze that"
            )
        with Undisturbed("freeze", [group]):
            index = copied_index(group)
            self._folder: RowFolder | None = folder
            self._written = folder.write(group, index)
        self.register_buffer("tables", index.tables)
        self.register_buffer("meta", index.meta)
        self.register_buffer("init_data", group.rows.init_data.clone())
        self.register_buffer("file", torch.zeros(0, dtype=torch.int64, device="cpu"))
        self._no_offsets = index.meta.new_empty(0)
        self.rows, self.row_bytes = self._written.rows, self._written.bytes

    def open(self) -> None:
        """Open the file, with its part of the cache."""
        assert self._folder is not None
        self.file = name_file(
            self._written.path,
            self._written.identity,
            cache_bytes=self._folder.cache_bytes(self._written),
            io=IO_PATHS.index(self._folder.storage.io),
        )
        self._folder = None
        self._opened = OpenedFile(self.file)

    def stats(self) -> ops.RowFileStats:
        """Return counts of the file in this process: hits and misses of the cache, and reads."""
        return ops.file_stats(self.get_buffer("file"))

    def ids(self, table: int | str) -> Tensor:
        """Return the ids of a table, int64 [n], in the order of the index.

        Args:
            table: name or number of the table.

        Raises:
            TypeError, ValueError, IndexError: an unknown table.
            DamagedStoreError: the index is damaged.
        """
        number = table_number("FileTables.ids", self.names, table)
        count = self.sizes()[self.names[number]]
        return ops.file_ids(self.get_buffer("file"), table=number, ids=count)

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        return dict(zip(self.names, self.get_buffer("tables")[:, Table.SIZE].tolist(), strict=True))

    def _served(self, batch: LookupBatch) -> Tensor:
        buffers: Any = self._buffers  # get_buffer() would take as long as a small lookup
        served = ops.file_lookup(
            buffers["file"], buffers["tables"], buffers["meta"], buffers["init_data"], batch
        )
        note_missing(self.place, served.missing)
        return served.output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FileTables:
        """Leave the tables as they are: the CPU reads files."""
        probe = fn(torch.zeros(1, device="cpu"))
        if probe.device.type != "cpu":
            raise RuntimeError(
                f"FileTables: tables {self.names} cannot go to {probe.device}: the CPU reads the "
                "files of their rows. Freeze without storage= for a GPU"
            )
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        absent = [prefix + name for name in _BUFFERS if prefix + name not in state_dict]
        if absent:  # the others would not fit those here
            missing_keys += absent
            return
        try:
            opened = self._checked([state_dict[prefix + name] for name in _BUFFERS])
        except (RuntimeError, TypeError, ValueError) as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        self._opened = opened

    def _checked(self, given: list[Tensor]) -> OpenedFile:
        """Open the file of a state; raise unless it has these tables."""
        file, tables, meta, init_data = given
        own = self.get_buffer("meta")
        if meta.shape != own.shape or not torch.equal(meta[:, Meta.DIM], own[:, Meta.DIM]):
            raise ValueError(
                f"state entry 'meta' has other tables or dims, expected those of {self.names}"
            )
        opened = OpenedFile(file)
        nothing = LookupBatch.of_rows(self.one_bag, self.one_bag, [0], int(own[0, Meta.DIM]))
        ops.file_lookup(file, tables, meta, init_data, nothing)
        return opened


def read_only_tables(group: TableGroup, kept_because: str | None) -> CountedTables:
    """Return a read-only copy of a group, where the running :func:`torch_dynemb.freeze` puts it.

    Args:
        group: the tables to copy.
        kept_because: reason if rows cannot be stored in another format.
    """
    folder = ROWS_IN.get()
    if folder is None:
        return FrozenTables(group, kept_because)
    if isinstance(folder, RedisRows):
        return RemoteTables(group, folder, kept_because)
    return FileTables(group, folder, kept_because)


__all__ = ["ROWS_IN", "FileTables", "OpenedFile", "read_only_tables"]
