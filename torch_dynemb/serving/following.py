"""Live tables that follow a delta log; see :func:`torch_dynemb.checkpoint.follow`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb.checkpoint.delta_log.commits import Commit, TableDelta
from torch_dynemb.checkpoint.delta_log.targets import (
    FollowTarget,
    check_names,
    checked_delta,
    follows,
)
from torch_dynemb.checkpoint.entries import PACKED
from torch_dynemb.checkpoint.parts import table_name
from torch_dynemb.ops.columns import Meta, Pooling
from torch_dynemb.serving.live_group import LiveTables
from torch_dynemb.serving.live_models import live_tables
from torch_dynemb.serving.live_state import NoHeadroomError

_QUANTIZED = {ops.LIVE_FORMATS[name] for name in ("int8", "int4", "fp8")}
_MOST = 65504.0  # of float16, which scales of quantized rows are


class _Followed(NamedTuple):
    """A live table, and what a commit does to it."""

    tables: LiveTables
    name: str
    delta: TableDelta


class _LiveModel:
    """Applies commits to the live tables of a model; the dense part stays."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def check(self, commit: Commit) -> None:
        known = set()
        for log_name, followed in self._followed(commit):
            known.add(log_name)
            _check_room(followed)
            _check_values(followed)
        check_names(commit, known)

    def apply(self, commit: Commit) -> None:
        for _, (tables, name, delta) in self._followed(commit):
            if delta.ids.numel() > 0 or delta.removed.numel() > 0:
                tables.update(name, delta.ids, delta.rows, erased=delta.removed)

    def _followed(self, commit: Commit) -> Iterator[tuple[str, _Followed]]:
        """The live tables that a commit knows, by their names there."""
        for path, tables in live_tables(self._model).items():
            dims = tables.tensors().meta[:, Meta.DIM].tolist()
            for name, dim in zip(tables.names, dims, strict=True):
                owner = path.rpartition(".")[0]
                for log_name in _names_in_log(owner, name, alone=len(tables.names) == 1):
                    delta = checked_delta(log_name, commit.tables, dim)
                    if delta is not None:
                        yield log_name, _Followed(tables, name, delta)
                        break


def _names_in_log(owner: str, name: str, *, alone: bool) -> Iterator[str]:
    """How the table of a frozen module may be called in checkpoints, the likeliest first.

    Args:
        owner: path of the module.
        name: of the table there.
        alone: the module has no other table.
    """
    if alone:  # a DynamicEmbedding, whose table is named after the module
        yield owner or "embedding"
    yield table_name(owner, name)
    while owner:  # modules that have others in them, which training has not
        owner = owner.rpartition(".")[0]
        yield table_name(owner, name)


def _check_room(followed: _Followed) -> None:
    """Raises NoHeadroomError where a commit brings more ids than there are rows for."""
    tables, name, delta = followed
    free = tables.free_rows()[name]
    if delta.ids.numel() <= free:
        return
    wanted = _missing(followed, delta.ids)
    gone = delta.removed.numel() - _missing(followed, delta.removed)
    if wanted - gone > free:
        raise NoHeadroomError(name, wanted=wanted - gone, free=free)


def _missing(followed: _Followed, ids: Tensor) -> int:
    """How many ids a live table has not got."""
    tables, name, delta = followed
    served = tables.serve(
        ids,
        tables.one_bag,
        None,
        feature_tables=[tables.names.index(name)],
        feature_dims=[delta.embedding_dim],
        pooling=Pooling.NONE,
    )
    return int(served.missing.sum())


def _check_values(followed: _Followed) -> None:
    """Raises RuntimeError where rows would be refused when others have been taken."""
    tables, name, delta = followed
    if delta.dtype == PACKED:
        raise RuntimeError(
            f"follow: table {name!r} is trained with rows of 8 bits, which live tables do not take"
        )
    number = tables.names.index(name)
    code = tables.formats[int(tables.tensors().meta[number, Meta.SLAB])]
    if code in _QUANTIZED and not bool((delta.rows.abs() <= _MOST).all()):
        raise RuntimeError(
            f"follow: the commit has rows of table {name!r} with NaN, infinity, or values beyond "
            f"{_MOST}, which quantized live rows cannot hold: nothing of it has been applied. Make "
            "live tables with rows='bf16', or find out why they diverge"
        )


@follows
def _live_model(model: nn.Module) -> FollowTarget | None:
    return _LiveModel(model) if live_tables(model) else None


__all__: list[str] = []
