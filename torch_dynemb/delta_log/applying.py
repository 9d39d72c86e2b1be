"""Changes of one commit to a table that trains, with a check that the table has room."""

from __future__ import annotations

import torch

from torch_dynemb.changes.commits import TableDelta
from torch_dynemb.errors import NoRoomError
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.rows.row_update import RowUpdate
from torch_dynemb.table.content import score_names
from torch_dynemb.table.row_access import state_tensors

_CUSTOM = "custom"


class PartChange:
    """Change of a commit to a part of a table.

    Args:
        part: part of a model, on this rank.
        delta: change of the whole table in the commit.

    Attributes:
        update: applies the change.
    """

    def __init__(self, part: TablePart, delta: TableDelta) -> None:
        self._part, self._delta = part, delta
        tables, device = part.group.tables, part.group.device
        changed = delta.changed
        chosen = part.ids.owned(changed.ids)
        columns = slice(part.columns.start, part.columns.stop)
        tensors = state_tensors(tables, tables.config.slab_of(part.table))
        with_state = delta.optimizer is not None and delta.optimizer == _name_of(part)
        state = changed.state if with_state else {}
        state = {name: of for name, of in state.items() if name in tensors}
        per_row = (
            () if part.optimizer is None else [of.name for of in part.optimizer.state if of.per_row]
        )
        self._in_blocks: list[str] = []  # of the state, where the part has some columns
        if part.shard.split:
            for name, values in state.items():
                if tensors[name].dtype == torch.uint8:
                    self._in_blocks.append(name)
                elif name not in per_row:
                    state[name] = values[:, columns]
        # other scores are those of the follower's own clock
        kept = [name for name in score_names(tables, part.table) if name == _CUSTOM]
        own = changed._replace(
            rows=changed.rows[:, columns],
            state=state,
            scores={name: of for name, of in changed.scores.items() if name in kept},
        )
        self.update = RowUpdate(
            f"follow: table {part.name!r}",
            tables,
            part.table,
            (own if bool(chosen.all()) else own.picked(chosen)).to(device),
            gone=delta.removed[part.ids.owned(delta.removed)].to(device),
            steps=delta.optimizer_steps if with_state else None,
        )

    def check(self) -> None:
        """Check that the table can take the change. Changes nothing.

        Raises:
            ValueError: the commit has the padding id, lacks custom scores, or has 8-bit state of
                more columns than the part.
            NoRoomError: the table has too little room.
        """
        part, name = self._part, self._part.name
        padding = part.config.padding_idx
        if padding is not None and bool((self.update.ids == padding).any()):
            raise ValueError(
                f"follow: table {name!r} has the padding id {padding}, which has no row, but the "
                "commit has a row for it: follow with a model like the one that is published"
            )
        if self._in_blocks and self.update.ids.numel() > 0:
            raise ValueError(
                f"follow: table {name!r} has columns {part.columns} here, but the log has 8-bit "
                f"{self._in_blocks[0]} of whole rows: publish with optimizer_state=False, or shard "
                "the table by rows"
            )
        given = _CUSTOM in self._delta.changed.scores or self._delta.changed.ids.numel() == 0
        if _CUSTOM in part.config.policy.scores and not given:
            raise ValueError(
                f"follow: table {name!r} keeps custom scores, which the table in the log does not: "
                "follow with a model like the one that is published"
            )
        bound = part.group.config.capacity_bound(part.table)
        new = int(self.update.new.sum())
        size, gone = part.group.size(part.table), self.update.gone.numel()
        if bound is not None and new > 0 and size - gone + new > bound:
            raise NoRoomError(
                f"follow: table {name!r} has {size} ids and a capacity of {bound}, but the commit "
                f"removes {gone} of them and adds {new}: give it the capacity of the table "
                "that is published. Nothing of the commit has been applied",
                tables=[name],
            )


def _name_of(part: TablePart) -> str | None:
    return None if part.optimizer is None else str(part.optimizer.description()["name"])


__all__ = ["PartChange"]
