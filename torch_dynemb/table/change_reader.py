"""What somebody who reads the changes of tables remembers of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class ChangeReader:
    """Somebody who wants to know what changes in the tables of a group.

    It takes 16 bytes for every row, and 8 more for each word of scores that it looks at.

    Attributes:
        name: whose reader it is.
        bit: its own in the bytes of rows.
        scores: changed scores count as changes.
        since: names what changes are counted from; None: nothing, so that all there is is new.
        owners: of rows, by slab, when changes were taken last, as
            :func:`torch_dynemb.ops.changed_ids_` knows them; none: they never were.
    """

    name: str
    bit: int
    scores: bool
    since: str | None = None
    owners: list[Tensor] = field(default_factory=list)

    def forget(self) -> None:
        """After all that the tables hold has been replaced: there is nothing to count from."""
        self.since = None
        self.owners = []


__all__ = ["ChangeReader"]
