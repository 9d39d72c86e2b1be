"""The position in a delta log that the rows of a package have, so that it can follow the log."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import NamedTuple

from torch_dynemb.argument_checks import described
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.delta_log.reader import LogPosition
from torch_dynemb.serving.table_names import ServedName, names_in_log


class PackageBase(NamedTuple):
    """Origin of a package's rows.

    Attributes:
        uuid: of the checkpoint that its log begins with.
        sequence: number of the commit that the package's rows have; None: those of the checkpoint.
        chain: of the batch of this commit, see ``LogPosition``.
        rank: of the trainer that has written this batch.
        tables: name of each table of the package in the log.
    """

    uuid: str
    sequence: int | None
    chain: int
    rank: int
    tables: dict[str, str]


class ExportedTable(NamedTuple):
    """A table of a model that becomes a package.

    Attributes:
        package_name: name of the table in the package.
        owner: path of the module that names it.
        name: name of the table in that module.
        alone: whether the module has no other table.
        embedding_dim: columns of its rows.
    """

    package_name: str
    owner: str
    name: str
    alone: bool
    embedding_dim: int


def position_of(base: str | PathLike[str] | LogPosition) -> LogPosition:
    """Return the position of a model in a log.

    Args:
        base: the position, or the path of the checkpoint that the log begins with.

    Raises:
        TypeError: it is neither.
        FileNotFoundError: the checkpoint is missing.
    """
    if isinstance(base, LogPosition):
        return base
    if not isinstance(base, str | PathLike):
        raise TypeError(
            f"serving.export: base is {described(base)}, expected the path of a checkpoint, what "
            "DeltaLog.position() gives, or None"
        )
    with open_checkpoint(base) as saved:
        dims = {name: table.embedding_dim for name, table in saved.tables.items()}
        return LogPosition(saved.uuid, None, 0, 0, dims)


def base_at(position: LogPosition, tables: Iterable[ExportedTable]) -> PackageBase:
    """Return the base to write into the manifest.

    Args:
        position: of the model in the log.
        tables: of the package.

    Raises:
        ValueError: the log lacks a table, or has one with other columns.
    """
    tables = list(tables)
    served = [ServedName(table.owner, table.name, table.alone) for table in tables]
    known = names_in_log("serving.export", served, position.tables)
    names = {}
    for table, name in zip(tables, known, strict=True):
        if name is None:
            raise ValueError(
                f"serving.export: base has tables {sorted(position.tables)}, and none that could "
                f"be {table.package_name!r} of the model: give the base that the model was loaded "
                "from, or the position of its own log"
            )
        if position.tables[name] != table.embedding_dim:
            raise ValueError(
                f"serving.export: table {table.package_name!r} has {table.embedding_dim} columns, "
                f"and {position.tables[name]} in base: give the base that the model was loaded "
                "from, or the position of its own log"
            )
        names[table.package_name] = name
    return PackageBase(position.base, position.sequence, position.chain, position.rank, names)


__all__ = ["ExportedTable", "PackageBase", "base_at", "position_of"]
