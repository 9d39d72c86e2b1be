"""Several updates as a whole: all of them, or none after an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch_dynemb.process.interrupts import defer_signals


class Update(Protocol):
    """A prepared update, such as :class:`torch_dynemb.rows.row_update.RowUpdate`."""

    def apply(self) -> object:
        """Apply it."""
        ...

    def undo(self) -> object:
        """Restore what was before :meth:`apply`, wherever that failed."""
        ...


class Call(NamedTuple):
    """An update by two functions.

    Attributes:
        apply: changes something, or raises.
        undo: restores what was before.
    """

    apply: Callable[[], object]
    undo: Callable[[], object]


def apply_all(
    updates: Sequence[Update],
    finish: Callable[[], object],
    *,
    agreed: Callable[[Callable[[], None]], object] | None = None,
) -> None:
    """Apply all updates in their order, or none, with signals deferred.

    Args:
        updates: prepared, so that nothing but an error of the machine is left.
        finish: called once all are applied, before signals are delivered.
        agreed: applies on all ranks or raises on all, as
            :meth:`torch_dynemb.distributed.together.Ranks.run` does; None: on this rank alone.

    Raises:
        Exception: of an update; everything is as it was.
    """
    begun: list[Update] = []

    def apply() -> None:
        for update in updates:
            begun.append(update)
            update.apply()

    with defer_signals():
        try:
            apply() if agreed is None else agreed(apply)
        except BaseException:
            for update in reversed(begun):
                update.undo()
            raise
        finish()


__all__ = ["Call", "Update", "apply_all"]
