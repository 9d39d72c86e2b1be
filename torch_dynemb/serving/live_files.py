"""Tables with rows in a file, read by any number of threads while one thread updates them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from torch_dynemb.argument_checks import text
from torch_dynemb.ops.columns import Meta
from torch_dynemb.serving.file_names import moved_file, new_instance, path_of
from torch_dynemb.serving.file_tables import FileTables, OpenedFile
from torch_dynemb.serving.live_group import checked_headroom
from torch_dynemb.serving.live_state import FileState
from torch_dynemb.serving.missing import CountedTables
from torch_dynemb.serving.updated_tables import UpdatedTables


class LiveFileTables(UpdatedTables, FileTables):
    """Ids and rows of a group in a file, with changes in memory, as :class:`LiveTables` has them.

    Changed rows, new ids and removed ids are kept in memory. When a table has no room for more of
    them, the update writes the file anew with them: beside the first one, without a name, for this
    process alone, and with the same rows in the cache. Lookups go on meanwhile, with the earlier
    file, which ends with its last reader. What was updated ends with the process. Threads that
    update take turns; a commit of a delta log is one turn.

    Args:
        source: the tables. Their file does not change.
        headroom: how many changed or new ids of a table are kept in memory, and how many removed
            ones: a number for all tables, or by name.
        dense_version: version of the dense state for :meth:`version`.

    Raises:
        TypeError, ValueError: headroom or dense_version.
        HostMemoryError: memory for the changes, or for the cache, is short.
    """

    def __init__(
        self,
        source: FileTables,
        *,
        headroom: int | Mapping[str, int],
        dense_version: str = "",
    ) -> None:
        CountedTables.__init__(self)
        self.names = list(source.names)
        self.place, self.depth = source.place, source.depth
        self.rows, self.row_bytes = source.rows, source.row_bytes
        self.dense_version = text("LiveTables: dense_version", dense_version)
        self.headroom = checked_headroom(self.names, headroom)
        for name in ("tables", "meta", "init_data"):
            self.register_buffer(name, source.get_buffer(name).clone(), persistent=False)
        base = source.get_buffer("file")
        file = moved_file(base, path_of(base), instance=new_instance())
        self.register_buffer("file", file, persistent=False)
        meta = self.get_buffer("meta")
        self.dims: list[int] = meta[:, Meta.DIM].tolist()
        self._no_offsets = meta.new_empty(0)
        self._opened = OpenedFile(file, (meta, self.headroom))
        self._writing = threading.RLock()

    def state(self) -> FileState:
        file, meta = self.get_buffer("file"), self.get_buffer("meta")
        return FileState(self.names, file, meta, self._writing)

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        return self.state().sizes()

    def ids(self, table: int | str) -> NoReturn:
        raise NotImplementedError(
            "LiveTables.ids: tables with rows in a file do not list ids that change: list those of "
            "the frozen model that they were made of"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LiveFileTables:
        FileTables._apply(self, fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load nothing: the tables are not part of a state."""
        CountedTables._load_from_state_dict(self, *args)


__all__ = ["LiveFileTables"]
