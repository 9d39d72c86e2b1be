"""Copies of models with rows that are updated while they serve."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.policy.keep import Keep
from torch_dynemb.serving.file_tables import FileTables
from torch_dynemb.serving.freeze import freeze
from torch_dynemb.serving.frozen_modules import FrozenModule
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.serving.live_files import LiveFileTables
from torch_dynemb.serving.live_group import LiveTables
from torch_dynemb.serving.updated_tables import UpdatedTables

Model = TypeVar("Model", bound=nn.Module)


def live(
    model: Model,
    *,
    headroom: int | Mapping[str, int],
    rows: str | None = None,
    dense_version: str = "",
    keep: Keep | None = None,
) -> Model:
    """Copy a model for inference, with rows that can be updated while threads run it.

    The copy is that of :func:`torch_dynemb.freeze`, with :class:`LiveTables` as its tables. A model
    that was frozen with ``storage=`` keeps its rows in their files, and changes in memory. When a
    table's headroom is full, its file is written anew with them, without a name, for this process
    alone.

    Only one thread at a time may call their :meth:`LiveTables.update` and :meth:`LiveTables.erase`.
    Any number may run the model meanwhile: as it is, exported by ``torch.export``, or packaged by
    AOTInductor with the tables as constants that the user manages. The dense state changes by
    commits of a delta log only (:func:`torch_dynemb.delta_log.follow`).

    Args:
        model: a module with dynamic tables, or its copy by :func:`torch_dynemb.freeze`. It does not
            change.
        headroom: how many more ids each table may have: a number for all, or by table name.
            Addresses are reserved for them; memory is taken when it is used. With rows in files,
            how many changed or new ids of a table are kept in memory, and how many removed ones. An
            update or a commit of more is refused.
        rows: format of rows, a key of ``torch_dynemb.ops.LIVE_FORMATS``; None: as they are. Rows in
            files keep their format.
        dense_version: a name for the dense state, returned by :meth:`LiveTables.version`.
        keep: ids to copy, as in :func:`torch_dynemb.freeze`; updates may bring others.

    Returns:
        A model of the same class as :func:`torch_dynemb.freeze` returns.

    Raises:
        TypeError: ``model`` is not a module, has no dynamic tables, or has some that
            :mod:`torch_dynemb.nn` cannot read.
        ValueError: headroom, rows, dense_version or keep; a frozen model takes no ``keep``.
        RuntimeError: tables are not on the CPU, or do not fit in memory.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb import serving
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
        >>> model = serving.live(torch.nn.Sequential(bag, torch.nn.Linear(4, 1)), headroom=1000)
        >>> serving.live_tables(model)["0.frozen_tables"].free_rows()
        {'ads': 1000}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"live: model is {described(model)}, expected a torch.nn.Module")
    frozen = model if _tables(model) and keep is None else freeze(model, keep=keep)
    _check_names(frozen, headroom)
    memo: dict[int, Any] = {}
    for name, tables in _tables(frozen).items():
        owner = frozen.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, FrozenModule):
            raise TypeError(
                f"live: {type(owner).__name__} ({name!r}) reads its tables in its own way, which "
                "live tables do not support: serve frozen copies (torch_dynemb.freeze), a new one "
                "for each version"
            )
        room = headroom
        if isinstance(headroom, Mapping):
            room = {table: headroom[table] for table in tables.names}
        memo[id(tables)] = _live(tables, room, rows, dense_version)
    if not memo:
        raise TypeError(f"live: {type(model).__name__} has no dynamic tables: nothing to update")
    return copy.deepcopy(frozen, memo).eval()


def _live(
    tables: FrozenTables | FileTables,
    headroom: int | Mapping[str, int],
    rows: str | None,
    dense_version: str,
) -> UpdatedTables:
    if isinstance(tables, FrozenTables):
        return LiveTables(tables, headroom=headroom, rows=rows, dense_version=dense_version)
    if rows is not None:
        raise ValueError(
            f"live: rows is {rows!r}, but tables {tables.names} have their rows in a file, in its "
            "format: give rows to torch_dynemb.freeze"
        )
    return LiveFileTables(tables, headroom=headroom, dense_version=dense_version)


def live_tables(model: nn.Module) -> dict[str, UpdatedTables]:
    """Return the live tables of a model, by the name of their module.

    Args:
        model: made by :func:`live`.
    """
    return {name: part for name, part in model.named_modules() if isinstance(part, UpdatedTables)}


def _tables(model: nn.Module) -> dict[str, FrozenTables | FileTables]:
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, FrozenTables | FileTables) and not isinstance(part, UpdatedTables)
    }


def _check_names(frozen: nn.Module, headroom: object) -> None:
    names = sorted({name for tables in _tables(frozen).values() for name in tables.names})
    if isinstance(headroom, Mapping) and names and sorted(headroom) != names:
        raise ValueError(
            f"live: headroom has tables {sorted(headroom)}, expected a number for each of {names}"
        )


__all__ = ["live", "live_tables"]
