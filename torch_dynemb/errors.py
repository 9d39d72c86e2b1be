"""Errors that a program can act on.

Each class is also the built-in that fits, so that ``except RuntimeError`` catches it, too. Wrong
arguments stay TypeError, ValueError and KeyError, and a path without anything saved stays
FileNotFoundError.

Errors of the compiled library have these classes if Python calls the library. Code from
``torch.compile`` calls it directly: its errors are RuntimeErrors with a message that ends with
the name of the class in brackets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch


def _place(path: object) -> Path | str:
    """Return a path, or the text of a URL."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else str(path)
    return text if "://" in text else Path(text)


class DynembError(Exception):
    """Base of all errors of this library that a program can act on.

    Pickles keep the attributes, so ranks and workers can send errors to each other.

    Args:
        *args: arguments of the built-in: a message, or number, message and file name.
        path: file or folder that the error is about, or its URL; None: none.
        tables: names of the tables that it is about.

    Attributes:
        path: a ``Path``, or the text of a URL.
        tables: see the argument.

    Example:
        >>> import torch, torch_dynemb as td
        >>> full = td.Policy(capacity=2, on_full="error")
        >>> ads = td.DynamicEmbedding(4, name="ads", optimizer=td.SGD(lr=0.1), policy=full)
        >>> try:
        ...     ads(torch.arange(3))
        ... except td.errors.DynembError as error:
        ...     print(type(error).__name__, error.tables)
        NoRoomError ('ads',)
    """

    def __init__(
        self,
        *args: object,
        path: object = None,
        tables: Iterable[str] = (),
    ) -> None:
        # args were set by __new__; torch.compile traces no call of Exception.__init__
        self.path = None if path is None else _place(path)
        self.tables = tuple(tables)


class NoRoomError(DynembError, RuntimeError):
    """A table, the memory or a disk has too little room for a call.

    The class itself is raised for a table: its capacity, its ``max_rows`` or the memory budget of
    its group is used up. The call has inserted no id. Erase ids, choose another ``on_full``, or
    give a larger capacity or budget. Its subclasses are for memory and disks.
    """


class HostMemoryError(NoRoomError, MemoryError):
    """The machine has too little memory, or the process too few addresses; the message says which.

    It is also a ``MemoryError``. Take smaller batches or tables, or a machine with more memory.
    """


class DeviceMemoryError(NoRoomError, torch.OutOfMemoryError):
    """A GPU has too little memory; the message says how much the call needs.

    It is also a ``torch.OutOfMemoryError``. Call ``torch.cuda.empty_cache()``, or take smaller
    batches.
    """


class DiskFullError(NoRoomError, OSError):
    """A disk is full, or a quota or the largest size of a file is reached.

    What was saved before is unchanged. Make room or save elsewhere, then call again.

    Args:
        *args: number, message and file name, as of OSError; or a message.
        path: see :class:`DynembError`; default: the file name.
        tables: see :class:`DynembError`.
    """

    def __init__(
        self,
        *args: object,
        path: object = None,
        tables: Iterable[str] = (),
    ) -> None:
        OSError.__init__(self, *args)
        name = self.filename if path is None else path
        self.path = None if name is None else _place(name)
        self.tables = tuple(tables)


class NoHeadroomError(NoRoomError):
    """An update of a live table brings more new ids than the table has rows for.

    Nothing of the update is applied, and the rows from before stay in service. Erase ids, or create
    the tables again with more headroom and serve those.

    Args:
        *args: the message.
        table: name of the table.
        wanted: rows that new ids of the update need.
        free: rows that the table has for them.

    Attributes:
        table: see the argument.
        wanted: see the argument.
        free: see the argument.
    """

    def __init__(self, *args: object, table: str = "", wanted: int = 0, free: int = 0) -> None:
        super().__init__(*args, tables=[table] if table else [])
        self.table, self.wanted, self.free = table, wanted, free


class DamagedFileError(DynembError, ValueError):
    """A file of a checkpoint, a delta log or a serving package is damaged.

    It was cut off, changed or removed; the message says where. The model is unchanged. Copy the
    file back, or go back to another checkpoint.
    """


class DamagedStoreError(DamagedFileError, RuntimeError):
    """A file of a snapshot or of a row store (``SSDStore``) is damaged or missing.

    Copy the file back, or load another snapshot, and check the disk.
    """


class UnsupportedFormatError(DynembError, ValueError, RuntimeError):
    """A file or package is intact, but for another version or machine.

    Load it with the version that wrote it, or write it again here.
    """


class NewBaseNeededError(DynembError, RuntimeError, ValueError):
    """A reader or writer of changes cannot continue from its position.

    * Reader of a delta log: the commits it needs were dropped or rolled back, or the log begins
      with another checkpoint. Commits applied so far stay. Load the newest base, and follow from
      there.
    * Writer: the changes since its base are unknown. Save a whole checkpoint, and continue from
      that.
    * Increment: it does not continue from the checkpoint before it. Give all of them in order, or
      go back to the last one that does.
    """


class InUseError(DynembError, RuntimeError):
    """Another process, thread or call uses the table, store, log or path now.

    This call has changed nothing. Wait until the other one has ended, or give each a path or table
    of its own.
    """


class ForkedProcessError(DynembError, RuntimeError):
    """A forked process calls what only its parent process can do.

    Call it in the parent, start processes by ``spawn``, or create the tables after the fork.
    """


class ReplicatedTableError(DynembError, RuntimeError):
    """Each rank would train its own diverging copy of a table.

    Use tables that ranks share, such as those of :mod:`torch_dynemb.torchrec`, or call
    :func:`torch_dynemb.private_to_rank` if only this rank trains them.
    """


class ReplacedError(DynembError, RuntimeError):
    """The checkpoint was replaced or removed while it was read. Call again, or save less often."""


class BackgroundError(DynembError, RuntimeError):
    """Work in the background has failed; its own error is the ``__cause__``.

    The call that raises it, such as the next ``step()``, has changed nothing. Call it again to
    continue without the failed work, or save again.
    """


__all__ = [
    "BackgroundError",
    "DamagedFileError",
    "DamagedStoreError",
    "DeviceMemoryError",
    "DiskFullError",
    "DynembError",
    "ForkedProcessError",
    "HostMemoryError",
    "InUseError",
    "NewBaseNeededError",
    "NoHeadroomError",
    "NoRoomError",
    "ReplacedError",
    "ReplicatedTableError",
    "UnsupportedFormatError",
]
