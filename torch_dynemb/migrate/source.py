"""Sources of rows: batches of ids with their rows, optimizer state and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described
from torch_dynemb.table import RowBatch
from torch_dynemb.table.content import CountedIds


class SourceRows(NamedTuple):
    """Batch of rows of a source.

    Attributes:
        batch: floats, with state by the optimizer's name of it, [n, dim] each, or [n, 1] if a row
            has one value. Scores are ``step``, ``timestamp`` (seconds), ``frequency``, ``custom``
            or ``expiry`` (seconds).
        where: place for error messages, such as a file.
        first: number of the batch's first row in that place.
    """

    batch: RowBatch
    where: str
    first: int


class Source(ABC):
    """Rows of one table from another library or format, for :func:`load`.

    The functions ``read_...`` of this package return sources. For another format, derive a class
    and define :meth:`batches`. :func:`load` reads a source twice, first to check all rows and then
    to write them: both passes must return the same rows.

    Args:
        name: name in error messages, such as a path.
        embedding_dim: columns of its rows; None: the source has no rows.
        state: names of the optimizer state in its batches, as the table's optimizer names them,
            such as ``("exp_avg", "exp_avg_sq")``.
        scores: names of the scores in its batches.
        optimizer_steps: number of updates of the optimizer, for bias corrections; None: unknown.
        step: number of training steps when the source was written, for scores by step; None: the
            largest of its scores.
        now: Unix time in seconds when the source was written; None: unknown.

    Attributes:
        name, embedding_dim, state, scores, optimizer_steps, step, now: as given.
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int | None,
        *,
        state: tuple[str, ...] = (),
        scores: tuple[str, ...] = (),
        optimizer_steps: int | None = None,
        step: int | None = None,
        now: int | None = None,
    ) -> None:
        self.name = name
        self.embedding_dim = embedding_dim
        self.state, self.scores = state, scores
        self.optimizer_steps = optimizer_steps
        self.step, self.now = step, now

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, embedding_dim={self.embedding_dim})"

    @abstractmethod
    def batches(self, size: int) -> Iterator[SourceRows]:
        """Iterate over all rows, at most ``size`` at a time.

        Args:
            size: maximum number of rows of a batch.

        Raises:
            ValueError: the source is damaged, or its parts do not fit together.
        """

    def waiting(self) -> CountedIds | None:
        """Return ids that wait for admission, with their counts.

        Returns:
            The ids and counts; None: the source has no counts.
        """
        return None


def checked(source: Source, given: SourceRows, dim: int, *, finite: bool) -> SourceRows:
    """Check a batch, and bring its tensors to the shapes that a table expects.

    Args:
        source: source of the batch.
        given: batch of the source.
        dim: columns of the table.
        finite: refuse NaN and infinity.

    Returns:
        ids int64 [n], rows [n, dim], state [n, columns], scores int64 [n], all on the CPU.

    Raises:
        TypeError: a value is not a tensor, or has another kind of dtype.
        ValueError: shapes do not fit together, or a value is not finite.
    """
    batch, where = given.batch.to("cpu"), given.where
    count = batch.ids.numel()
    if batch.ids.dtype != torch.int64 or batch.ids.dim() != 1:
        raise TypeError(f"{where}: ids are {described(batch.ids)}, expected int64 [n]")
    rows = _floats(f"{where}: rows", batch.rows)
    if tuple(rows.shape) != (count, dim):
        raise ValueError(
            f"{where}: rows have shape {tuple(rows.shape)}, expected ({count}, {dim}), as many as "
            "there are ids, with the columns of the table"
        )
    _same_names(where, "state", source.state, batch.state)
    _same_names(where, "scores", source.scores, batch.scores)
    for name, values in batch.state.items():
        if tuple(values.shape) not in ((count, dim), (count, 1)):
            raise ValueError(
                f"{where}: state {name!r} has shape {tuple(values.shape)}, expected "
                f"({count}, {dim}), or ({count}, 1) for one value per row"
            )
    for name, values in batch.scores.items():
        if values.dtype != torch.int64 or tuple(values.shape) != (count,):
            raise TypeError(
                f"{where}: score {name!r} is {described(values)}, expected int64 [{count}]"
            )
    checked_rows = given._replace(batch=batch)
    if finite:
        _check_finite(checked_rows, "its row", rows)
        for name, values in batch.state.items():
            _check_finite(checked_rows, f"state {name!r}", values)
    return checked_rows


def with_columns(values: Tensor) -> Tensor:
    """View one value per row, [n], as [n, 1]."""
    return values[:, None] if values.dim() == 1 else values


def _floats(what: str, values: Tensor) -> Tensor:
    if not values.dtype.is_floating_point:
        raise TypeError(f"{what} are {described(values)}, expected floats")
    return values


def _same_names(where: str, what: str, told: tuple[str, ...], given: Mapping[str, Tensor]) -> None:
    if set(told) != given.keys():
        raise ValueError(f"{where}: has {what} {sorted(given)}, but its source names {told}")


def _check_finite(given: SourceRows, what: str, values: Tensor) -> None:
    if not values.dtype.is_floating_point:
        return
    good = values.isfinite()
    if not bool(good.all()):
        good = good.all(1)
        row = int(good.logical_not().nonzero()[0, 0])
        wrong = values[row][~values[row].isfinite()][0]
        raise ValueError(
            f"{given.where}: row {given.first + row}, of id {int(given.batch.ids[row])}: {what} "
            f"has {float(wrong)}: repair it, or give non_finite='keep' to load it as it is"
        )


__all__ = ["Source", "SourceRows", "checked", "with_columns"]
