"""Tables of a loaded package with rows that are updated while it serves."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, NoReturn

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.tensor_file import StoredTensor
from torch_dynemb.serving.file_tables import OpenedFile
from torch_dynemb.serving.live_commits import TableChange
from torch_dynemb.serving.live_state import FileState, LiveState, LiveUpdate, MemoryState
from torch_dynemb.serving.packages.manifest import LivePart
from torch_dynemb.serving.packages.memory import ConstantMemory
from torch_dynemb.serving.whole_commits import DenseChange, check_changes, take_changes, with_room


class LiveStats(NamedTuple):
    """Present counts of a table of a package.

    Attributes:
        ids: number of ids.
        free_rows: number of new ids that it has rows for. With rows in a file, how many ids an
            update may change.
        updates: number of updates since the export.
        dense_behind: number of commits of a delta log that changed the dense state and were applied
            without it (``dense="keep"``).
    """

    ids: int
    free_rows: int
    updates: int
    dense_behind: int = 0


class LivePackage:
    """Tables of a package that take updates. One thread updates at a time, others wait.

    Args:
        parts: by the prefix of their tensors' names.
        memory: of their tensors, kept alive during an update.
        opened: files of rows, by the tensors that name them.

    Raises:
        DamagedFileError: tensors of a part are missing.
    """

    def __init__(
        self,
        parts: Mapping[str, LivePart],
        memory: ConstantMemory,
        opened: Mapping[str, OpenedFile],
    ) -> None:
        self._memory = memory if parts else None
        self._writing = threading.Lock()
        tensors = {**memory.tensors, **{name: of.file for name, of in opened.items()}}
        self._states = [_state_of(path, part, tensors) for path, part in parts.items()]

    @property
    def names(self) -> list[str]:
        """Return the names of all tables that take updates."""
        return [name for state in self._states for name in state.names]

    def update(self, table: str, ids: object, rows: object, erased: object) -> LiveUpdate:
        """Update a table as ``ServedModel.apply``."""
        owner = "ServedModel.apply"
        with self._writing:
            return self.state_of(owner, table).update(owner, table, ids, rows, erased)

    def erase(self, table: str, ids: object) -> int:
        """Remove ids as ``ServedModel.erase``."""
        owner = "ServedModel.erase"
        with self._writing:
            return self.state_of(owner, table).erase(owner, table, ids)

    def stats(self) -> dict[str, LiveStats]:
        """Return the counts of all tables at one time."""
        result = {}
        with self._writing:
            for state in self._states:
                sizes, free, updates = state.sizes(), state.free_rows(), state.updates()
                for name in state.names:
                    result[name] = LiveStats(sizes[name], free[name], updates[name])
        return result

    def check(self, tables: Sequence[TableChange], dense: Sequence[DenseChange]) -> None:
        """Raise if the tables cannot take a commit, as :func:`check_changes` does."""
        with self._writing:
            check_changes(tables, dense)

    def take(self, tables: Sequence[TableChange], dense: Sequence[DenseChange]) -> None:
        """Apply a checked commit as a whole.

        Raises:
            NoHeadroomError: another update has taken the rows meanwhile; nothing has changed.
        """
        with self._writing, with_room(tables):
            take_changes(tables, dense)

    def state_of(self, owner: str, table: object) -> LiveState:
        """Return the group of tables that has a table.

        Args:
            owner: method named by errors.
            table: name of the table.

        Raises:
            RuntimeError: the package has no tables that take updates.
            ValueError: unknown table.
        """
        if not self._states:
            raise RuntimeError(
                f"{owner}: the tables of this package are only read: export the model with "
                "headroom=, the number of further ids for each table, to update its rows"
            )
        for state in self._states:
            if table in state.names:
                return state
        raise ValueError(f"{owner}: table is {described(table)}, expected one of {self.names}")


def with_headroom(
    parts: Mapping[str, LivePart], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return dtypes and shapes in memory, with space for unused rows.

    Raises:
        DamagedFileError: files of different packages were mixed.
    """
    result = dict(stored)
    for path, part in parts.items():
        for slab, count in enumerate(part.rows):
            name = f"{path}.rows{slab}"
            if name not in stored:
                _mixed(f"lacks the tensor {name!r}")
            rows, *columns = stored[name].shape
            if rows > count:
                _mixed(f"has {rows} rows of {name!r}, but room for {count}")
            result[name] = stored[name]._replace(shape=(count, *columns))
    return result


def _mixed(what: str) -> NoReturn:
    raise DamagedFileError(
        f"serving.load: the package {what}: files of different packages were mixed"
    )


def _state_of(path: str, part: LivePart, tensors: Mapping[str, Tensor]) -> LiveState:
    def tensor(name: str) -> Tensor:
        whole = f"{path}.{name}"
        if whole not in tensors:
            _mixed(f"lacks the tensor {whole!r}")
        return tensors[whole]

    if part.headroom is not None:
        # the package lets one thread change its tables
        return FileState(part.tables, tensor("file"), tensor("meta"), nullcontext())
    live = ops.ServedTensors(
        buckets=tensor("buckets"),
        tables=tensor("tables"),
        meta=tensor("meta"),
        weights=[tensor(f"rows{slab}") for slab in range(len(part.rows))],
        generations=[],
        init_data=tensor("init_data"),
        formats=part.formats,
        free=tensor("free"),
    )
    return MemoryState(part.tables, live)


__all__ = ["LivePackage", "LiveStats", "with_headroom"]
