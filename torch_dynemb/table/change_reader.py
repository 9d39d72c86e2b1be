"""The state of a reader of changes of tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class ChangeReader:
    """A reader of the changes of a group's tables, such as a checkpoint of increments.

    It takes 16 bytes per row, and 8 more per score word that it compares.

    Attributes:
        name: of the reader.
        bit: its bit in the dirty bits of rows.
        scores: True: changed scores count as changes.
        since: name of the state that changes are counted from; None: all ids count as new.
        owners: by slab, owners of rows at the last :func:`take_changes`, in the format of
            :func:`torch_dynemb.ops.changed_ids_`; empty: no changes were taken yet.
    """

    name: str
    bit: int
    scores: bool
    since: str | None = None
    owners: list[Tensor] = field(default_factory=list)

    def forget(self) -> None:
        """Start from nothing again, after all contents of the tables were replaced."""
        self.since = None
        self.owners = []


__all__ = ["ChangeReader"]
