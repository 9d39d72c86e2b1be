"""Load of a dynamic table from the entries of a state dict, by the ranks that own its ids now.

Ids are sent first, so that all ranks know of errors before any table changes. Rows follow in blocks
of some megabytes, which are written as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb.distributed.ranks import from_all_ranks, rank_group
from torch_dynemb.ops.columns import Clock
from torch_dynemb.rows.exchange import Place, RowExchange, Sent
from torch_dynemb.rows.into_part import IntoPart, write_arriving
from torch_dynemb.table.clock import check_now
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.torchrec.state.saved_rows import StateDictRows
from torch_dynemb.torchrec.state.table_state import Layout, LocalTable, TableShape


class TableLoad:
    """Exchange of one table's rows. All ranks of the group call the methods in their order here.

    Args:
        shape: of the table now.
        entries: as :func:`save_table` made them, with rows sharded in any way; or ``weight`` alone,
            rows of ids 0, 1, ...
        layout: saved with the entries; None: ``weight`` alone.
        local: shards on this rank.
        device: of the rows.

    Attributes:
        parts: ids of the shards on this rank, after :meth:`choose`.
    """

    def __init__(
        self,
        shape: TableShape,
        entries: Mapping[str, Any],
        layout: Layout | None,
        local: Iterable[LocalTable],
        *,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        ranks = rank_group(process_group)
        assert ranks is not None
        self._name, self._shape, self._layout = shape.name, shape, layout
        self._process_group = process_group
        self._saved = StateDictRows(shape, entries, layout, ranks)
        self._exchange = RowExchange(
            shape.places,
            self._saved.columns,
            self._saved.state,
            process_group=process_group,
            device=device,
        )
        self._sources: list[Sent] = []
        where = f"table {shape.name!r} was saved with"
        self.parts = {of.place: IntoPart(of.group.tables, of.table, where) for of in local}
        self._arriving: dict[Place, tuple[Tensor, CountedIds | None]] = {}

    def check(self) -> None:
        """Send the ids to their places.

        Raises:
            ValueError: the entries contradict each other; on all ranks.
        """
        counted = self._find_sources()
        damaged = ""
        for number, places in self._exchange.places.items():
            ids: Tensor | None = None
            overlapping = self._exchange.overlapping(places[0])
            for k, _, _ in overlapping:
                source = self._sources[k]
                bare = source._replace(
                    here=[RowBatch.without_rows(rows.ids) for rows in source.here],
                    none=RowBatch.without_rows(source.none.ids),
                )
                found = _ascending(self._exchange.collected(bare, number).ids)
                same = ids is None or torch.equal(ids, found)
                if not same or not _all_ascend(found):  # unless it ascends, an id is repeated
                    damaged = "ids are repeated, or those of its columns differ"
                ids = found
            assert ids is not None
            waiting = None
            if counted:
                moved = self._exchange.collected(counted[overlapping[0][0]], number)
                order = torch.argsort(moved.ids)
                waiting = CountedIds(moved.ids[order], moved.scores["count"][order])
            mine = self._exchange.mine(number)
            if mine is not None:
                self._arriving[mine] = ids, waiting
        self._agree_on(damaged)

    def choose(self) -> None:
        """Check the ids and times that came to this rank; not collective.

        Raises:
            ValueError: they do not fit its tables.
        """
        layout, has_state = self._layout, bool(self._saved.state)
        for place, part in self.parts.items():
            ids, part.counted = self._arriving.pop(place)
            part.take(RowBatch.without_rows(ids))
            part.check_room()
            part.sort()
            part.step = int(part.tables.index.clock[Clock.STEP])
            if layout is None:
                continue
            if part.tables.config.keeps_time:
                check_now(part.tables, layout.now)
            if has_state or not self._shape.optimizer.state:
                part.optimizer_steps = layout.optimizer_steps
            part.step, part.now = max(part.step, layout.clock), layout.now

    def write(self) -> Exception | None:
        """Send rows in blocks, and write those that arrive.

        Returns:
            The error of this rank; None: there was none.
        """
        return write_arriving(self._exchange, self._sources, self.parts)

    def _find_sources(self) -> list[Sent]:
        """Set ``_sources``; return the sources of counted ids.

        Raises:
            ValueError: on all ranks, if one of them has an error.
        """
        rows: list[list[RowBatch]] = []
        counted: list[list[RowBatch]] = []
        error = ""
        try:
            rows, counted = self._saved.rows(), self._saved.counted()
        except ValueError as raised:
            error = str(raised)
        self._agree_on(error)
        counts = from_all_ranks(self._saved.counts(), self._process_group)
        said, there = (sum(of) for of in zip(*counts, strict=True))
        if said != there:
            raise ValueError(
                f"table {self._name!r}: bucket says {said} ids, but weight_id has {there}: load "
                "with torch_dynemb.torchrec.LoadPlanner(), which reads all saved rows"
            )
        self._sources = [
            self._exchange.sent(here, self._saved.none(k)) for k, here in enumerate(rows)
        ]
        no_ids = torch.empty(0, dtype=torch.int64, device="cpu")
        none = RowBatch.without_rows(no_ids, {"count": no_ids})
        return [self._exchange.sent(here, none) for here in counted]

    def _agree_on(self, error: str) -> None:
        """Raise ValueError on all ranks if one has an error."""
        errors = from_all_ranks(error, self._process_group)
        found = [f"{text} (rank {rank})" for rank, text in enumerate(errors) if text]
        if found:
            raise ValueError(
                f"table {self._name!r}: the entries of the state contradict each other: "
                f"{'; '.join(found)}"
            )


def _all_ascend(ids: Tensor) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _ascending(ids: Tensor) -> Tensor:
    """Return sorted ids; the same tensor if it ascends already."""
    return ids if _all_ascend(ids) else ids.sort().values


__all__ = ["TableLoad"]
