"""Errors that a program can act on.

Each class is also the built-in that fits, so that ``except RuntimeError`` catches what it always
has. Wrong arguments stay TypeError, ValueError and KeyError, and a path at which nothing was saved
stays FileNotFoundError: these have no class here.

Errors of the compiled library have these classes where Python calls the library. Code that
``torch.compile`` has compiled calls it directly: its errors are RuntimeErrors, whose message ends
with the name of the class in brackets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch


class DynembError(Exception):
    """Base of all errors of this library that a program can act on.

    Errors can be pickled with their attributes, so ranks and workers send them to each other.

    Args:
        *args: of the built-in that the error is: its message, or number, message and file name.
        path: of the file or folder that the error is about; None: it is about none.
        tables: names of the tables that it is about.

    Attributes:
        path: see the argument.
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
        path: str | os.PathLike[str] | None = None,
        tables: Iterable[str] = (),
    ) -> None:
        # args were set by __new__; torch.compile traces no call of Exception.__init__
        self.path = None if path is None else Path(path)
        self.tables = tuple(tables)


class NoRoomError(DynembError, RuntimeError):
    """A table, a memory or a disk has no room for what a call needs.

    The class itself is raised for a table: its capacity, its ``max_rows`` or the memory budget of
    its group is used up. No id has been inserted by the call. Erase ids, choose another
    ``on_full``, or give a larger capacity or budget. What else has no room has a class below.
    """


class HostMemoryError(NoRoomError, MemoryError):
    """The machine has too little memory, or the process too few addresses; the message says which.

    It is a ``MemoryError``. Take smaller batches or tables, or a machine with more memory.
    """


class DeviceMemoryError(NoRoomError, torch.OutOfMemoryError):
    """A GPU has no memory left; the message says how much the call needs.

    It is a ``torch.OutOfMemoryError``. Call ``torch.cuda.empty_cache()``, or take a smaller batch.
    """


class DiskFullError(NoRoomError, OSError):
    """A disk is full, or a quota or the largest size of a file is reached.

    What was saved before is as it was. Make room, or save elsewhere; then call again.

    Args:
        *args: number of the error, message and file name, as of OSError; or a message.
        path: see :class:`DynembError`; default: the file name.
        tables: see :class:`DynembError`.
    """

    def __init__(
        self,
        *args: object,
        path: str | os.PathLike[str] | None = None,
        tables: Iterable[str] = (),
    ) -> None:
        OSError.__init__(self, *args)
        name = self.filename if path is None else path
        self.path = None if name is None else Path(name)
        self.tables = tuple(tables)


class NoHeadroomError(NoRoomError):
    """An update of a live table brings more new ids than the table has rows for.

    Nothing of the update has been done, and the rows from before go on being served. Erase ids, or
    make the tables again with more headroom and serve those.

    Args:
        *args: the message.
        table: its name.
        wanted: rows that new ids of the update want.
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
    """A file of a checkpoint, a delta log or a serving package is not what was written.

    It was cut off, changed or removed; the message says where. What was loaded before is as it was.
    Copy the file back, or go back to another checkpoint.
    """


class DamagedStoreError(DamagedFileError, RuntimeError):
    """A file of a snapshot or of a store of rows (``SSDStore``) is damaged or missing.

    Copy the file back, or load another snapshot, and look after the disk.
    """


class UnsupportedFormatError(DynembError, ValueError, RuntimeError):
    """A file or package is whole, but made for another version or machine than this one.

    Load it with the version that wrote it, or write it again here.
    """


class NewBaseNeededError(DynembError, RuntimeError, ValueError):
    """Changes do not go on from where their reader or writer is.

    * A reader of a delta log finds the log dropped up to a later commit, rolled back, or begun with
      another checkpoint. What it has applied stays. Load the newest base, and follow from there.
    * A writer does not know what has changed since its base: save a whole checkpoint, and go on
      from that.
    * An increment does not go on from the checkpoint before it: give all of them in order, or go
      back to the last one that does.
    """


class InUseError(DynembError, RuntimeError):
    """Another process, thread or call uses the table, store, log or path now.

    Nothing has been changed by this call. Wait until the other one has ended, or give each a path
    or a table of its own.
    """


class ForkedProcessError(DynembError, RuntimeError):
    """A process that was forked calls what only the process that made it can do.

    Call it there, start processes by ``spawn``, or make the tables after the fork.
    """


class ReplicatedTableError(DynembError, RuntimeError):
    """Each rank would train its own diverging copy of a table.

    Use tables that ranks share, such as those of :mod:`torch_dynemb.torchrec`, or call
    :func:`torch_dynemb.private_to_rank` where only this rank trains them.
    """


class ReplacedError(DynembError, RuntimeError):
    """What was read was replaced or removed meanwhile. Call again, or save less often."""


class BackgroundError(DynembError, RuntimeError):
    """What was done in the background has failed; its own error is the ``__cause__``.

    The call that raises it, such as the next ``step()``, has done nothing. Call it again to go on
    without what has failed, or save again.
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
