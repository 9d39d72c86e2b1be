"""Load of a dynamic table from the entries of a state dict, by the ranks that own its ids now.

Ids are sent first, so that all ranks know of errors before any table changes. Rows follow in blocks
of some megabytes, which are written as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb.distributed.ranks import from_all_ranks, rank_group
from torch_dynemb.rows.exchange import ArrivedBlock, Place, RowExchange, Sent
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.torchrec.state.saved_rows import StateDictRows
from torch_dynemb.torchrec.state.table_state import Layout, TableShape


class Arriving(NamedTuple):
    """Ids that a place of this rank will receive.

    Attributes:
        ids: int64 [n], ascending, with a row.
        counted: ids without a row; None: the table does not count single ids, or none were saved.
    """

    ids: Tensor
    counted: CountedIds | None


class TableLoad:
    """Exchange of one table's rows. All ranks of the group call the methods in their order here.

    Args:
        shape: of the table now.
        entries: as :func:`save_table` made them, with rows sharded in any way; or ``weight`` alone,
            rows of ids 0, 1, ...
        layout: saved with the entries; None: ``weight`` alone.
        device: of the rows.
    """

    def __init__(
        self,
        shape: TableShape,
        entries: Mapping[str, Any],
        layout: Layout | None,
        *,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        ranks = rank_group(process_group)
        assert ranks is not None
        self._name, self._process_group = shape.name, process_group
        self._saved = StateDictRows(shape, entries, layout, ranks)
        self._exchange = RowExchange(
            shape.places,
            self._saved.columns,
            self._saved.state,
            process_group=process_group,
            device=device,
        )
        self._sources: list[Sent] = []
        self.arriving: dict[Place, Arriving] = {}

    @property
    def state_names(self) -> set[str]:
        """Names of the optimizer state that blocks have."""
        return {tensor.name for tensor in self._saved.state}

    def check(self) -> None:
        """Send the ids to their places and set ``arriving``: the ids for places of this rank.

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
                self.arriving[mine] = Arriving(ids, waiting)
        self._agree_on(damaged)

    def blocks(self) -> Iterator[ArrivedBlock]:
        """Yield blocks of rows for places of this rank, until all rows and columns have come.

        Collective: every rank must exhaust the iterator.
        """
        arriving = {place: of.ids for place, of in self.arriving.items()}
        yield from self._exchange.blocks(self._sources, arriving)

    def raise_failure(self) -> None:
        """Raise the error of this rank's rows that ended its part of :meth:`blocks`."""
        self._exchange.raise_failure()

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


__all__ = ["Arriving", "TableLoad"]
