"""A guard for calls that read whole tables while other threads may train them.

1. The reader copies counters that every change advances.
2. It reads the tables.
3. It compares the counters, and rejects its result if they differ.

Why: a save between two steps of one thread needs no lock, and training must not wait or pay for
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import InUseError
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.tables import Tables


class Undisturbed:
    """A context for reading tables that no other thread may train meanwhile.

    The result is consistent if the context ends without an error. Inside it, :meth:`check` raises
    at once; call it before anything that cannot be undone. If another thread caused an error
    inside, InUseError replaces it.

    Args:
        call: beginning of an error's message.
        groups: the tables to read.
        dense: other tensors to read, with changes that torch counts.

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
        # before the check: a change that ends in between shows in the next comparison
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        return ops.being_changed([word for of in self._tables for word in of.lock_words()])

    def _counters(self) -> list[Tensor]:
        return [word.detach().cpu().clone() for of in self._tables for word in _counted(of)]

    def _refusal(self) -> InUseError:
        names = [name for group in self._groups for name in group.names]
        return InUseError(
            f"{self._call}: another thread trains or changes tables {names} or the model's dense "
            "state at the same time, so the copy mixes steps and was dropped: make this call in "
            "the thread that trains, between two steps, or let both take a lock around forward, "
            "backward and step",
            tables=names,
        )


def _counted(tables: Tables) -> list[Tensor]:
    """Return the tensors that every training call and every change of an index advance."""
    index, rows = tables.index, tables.rows
    return [index.tables, index.slabs, index.clock, rows.row_clock]


def _version(tensor: Tensor) -> int:
    # torch does not count changes of an inference tensor
    return 0 if tensor.is_inference() else tensor._version


__all__ = ["Undisturbed"]
