"""The guard of calls that read whole tables, beside threads that may train them.

A save between two steps of one thread needs no lock, and training must not pay for one. So a
training call never waits here: the reader compares counters that every change advances, before
and after, and refuses its own result where they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import InUseError
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.tables import Tables


class Undisturbed:
    """A context in which tables are read that no other thread may train.

    What was read is whole if the context ends without an error. Inside it, :meth:`check` says so
    at once; call it before anything that cannot be undone. An error that is raised inside becomes
    the refusal if another thread has caused it.

    Args:
        call: begins errors.
        groups: the tables that are read.
        dense: tensors that are read with them, whose changes torch counts.

    Raises:
        InUseError: another thread is changing the tables now.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb.table.undisturbed import Undisturbed
        >>> items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> with Undisturbed("save", [items.group]) as reading:
        ...     reading.check()
    """

    def __init__(
        self, call: str, groups: Sequence[TableGroup], dense: Iterable[Tensor] = ()
    ) -> None:
        self._call, self._groups, self._dense = call, list(groups), list(dense)
        self._tables = [group.tables for group in self._groups]
        # before the check, so that a change that has ended by then has been counted before
        self._before = self._counters()
        self._versions = [_version(tensor) for tensor in self._dense]
        if self._being_changed():
            raise self._refusal()

    def check(self) -> None:
        """Raise InUseError if another thread has changed the tables, or is changing them now."""
        if self.is_disturbed():
            raise self._refusal()

    def __enter__(self) -> Undisturbed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and self.is_disturbed():
            raise self._refusal() from error
        if error is None:
            self.check()

    def is_disturbed(self) -> bool:
        """Return whether another thread has changed the tables, or is changing them now."""
        same = all(
            group.tables is tables for group, tables in zip(self._groups, self._tables, strict=True)
        )
        return (
            not same
            or self._being_changed()
            or any(
                not torch.equal(now, before)
                for now, before in zip(self._counters(), self._before, strict=True)
            )
            or [_version(tensor) for tensor in self._dense] != self._versions
        )

    def _being_changed(self) -> bool:
        return ops.being_changed([word for of in self._tables for word in _held_words(of)])

    def _counters(self) -> list[Tensor]:
        return [word.detach().cpu().clone() for of in self._tables for word in _counted(of)]

    def _refusal(self) -> InUseError:
        names = [name for group in self._groups for name in group.names]
        return InUseError(
            f"{self._call}: another thread trains or changes tables {names} or the model's dense "
            "part at the same time, so what was read of them belongs to no step and was not "
            "kept: make this call in the thread that trains, between two steps, or let both take "
            "a lock around forward, backward and step",
            tables=names,
        )


def _held_words(tables: Tables) -> list[Tensor]:
    """What an op of the CPU holds while it changes the tables."""
    rows = tables.rows
    words = [tables.index.tables, *rows.weights[:1]]
    if rows.pending:
        words.append(PendingGradients.of(rows.pending).counts)
    return words


def _counted(tables: Tables) -> list[Tensor]:
    """What every training call and every change of an index advances."""
    index, rows = tables.index, tables.rows
    return [index.tables, index.slabs, index.clock, rows.row_clock]


def _version(tensor: Tensor) -> int:
    # torch counts no changes of an inference tensor
    return 0 if tensor.is_inference() else tensor._version


__all__ = ["Undisturbed"]
