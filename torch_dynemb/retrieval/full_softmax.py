"""Softmax over all ids of a table, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer
from torch_dynemb.ops.autograd import accumulates
from torch_dynemb.ops.columns import RowClock
from torch_dynemb.ops.open_lookups import OPEN, SEVERAL
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.retrieval.item_loss import ItemLoss, Losses
from torch_dynemb.retrieval.items import Items, check_not_empty
from torch_dynemb.table.tables import Tables, exported

_LISTED_AT_ONCE = 1 << 20  # ids


class FullSoftmaxLoss(ItemLoss):
    """Cross entropy of queries against all ids of a table.

    Forward and backward go over the rows in chunks, so memory is that of [n, chunk] scores and 16
    bytes an id. In training the backward updates every row of the table once, chunk by chunk. If
    the same backward reaches other lookups of the table, such as histories in the query, create the
    table with ``split=True``: then the step applies the sum of all gradients.

    Ids that were refused a row have no loss. ``torch.compile`` runs it between graphs, and refuses
    it with ``fullgraph=True``.

    Args:
        items: module with the table: :class:`torch_dynemb.DynamicEmbedding`, a collection, or a
            table of RecIS. Its rows are in memory, and all on this rank.
        table: name or number of the table, if ``items`` has several.
        temperature: divisor of the scores, more than 0.
        chunk: rows at a time, at least 4.

    Raises:
        TypeError: an argument has a wrong type, or ``items`` has no dynamic table.
        ValueError: an argument is out of its range, or the rows of the table are in a store or on
            several ranks.

    Example:
        >>> import torch, torch_dynemb as td
        >>> items = td.DynamicEmbedding(8, name="items", optimizer=td.Adam(lr=0.01))
        >>> loss = td.FullSoftmaxLoss(items, temperature=1.0)
        >>> query = torch.zeros(2, 8, requires_grad=True)
        >>> loss(query, torch.tensor([5, 9]))  # the logarithm of two ids
        tensor(0.6931, grad_fn=<MeanBackward0>)
    """

    def __init__(
        self,
        items: nn.Module,
        *,
        table: int | str | None = None,
        temperature: float = 0.05,
        chunk: int = 16384,
    ) -> None:
        super().__init__(items, table, temperature)
        owner, of = type(self).__name__, self._now()
        self.chunk = integer(f"{owner}: chunk", chunk, least=4)
        config = of.tables.config.tables[of.table]
        if of.shared or of.tables.stored(of.tables.config.slab_of(of.table)) is not None:
            where = "on several ranks" if of.shared else "in a store"
            raise ValueError(
                f"{owner}: the rows of table {config.name!r} are {where}, which is not built for "
                "all ids: take SampledSoftmaxLoss, or a table in the memory of one process"
            )

    def _losses(self, items: Items, query: Tensor, positive_ids: Tensor) -> Losses:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(self).__name__}: forward lists all ids, which compiled code cannot do: "
                "leave fullgraph=True out, or call it outside of torch.compile"
            )
        batch = LookupBatch.of_rows(positive_ids, items.tables.one_bag, [items.table], items.dim)
        handles, anchor = items.module._handles_of(batch)
        if anchor is None:
            check_not_empty(type(self).__name__, items)
        listed = _ListedIds.of(items, self.chunk)
        trains = anchor is not None
        state = _Softmax(items.tables, items.table, listed, positive_ids, handles, trains)
        losses: Tensor = _StreamedLoss.apply(  # type: ignore[no-untyped-call]
            query.float() / self.temperature,
            torch.zeros(1, device=query.device) if anchor is None else anchor,
            state,
        )
        known = handles >= 0
        return Losses(losses, None if bool(known.all()) else known)


class _ListedIds(NamedTuple):
    """All ids of a table with their handles, in chunks."""

    ids: tuple[Tensor, ...]
    handles: tuple[Tensor, ...]

    @classmethod
    def of(cls, items: Items, chunk: int) -> _ListedIds:
        batches = list(exported(items.tables, items.table, _LISTED_AT_ONCE))
        return cls(
            tuple(part for batch in batches for part in batch.ids.split(chunk)),
            tuple(part for batch in batches for part in batch.handles.split(chunk)),
        )


class _Softmax(NamedTuple):
    """Data of a loss that autograd need not see."""

    tables: Tables
    table: int
    listed: _ListedIds
    ids: Tensor
    handles: Tensor
    trains: bool

    def batch(self, ids: Tensor) -> LookupBatch:
        dim = self.tables.config.tables[self.table].embedding_dim
        return LookupBatch.of_rows(ids, self.tables.one_bag, [self.table], dim)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield ids, handles and rows."""
        for ids, handles in zip(*self.listed, strict=True):
            yield ids, handles, ops.embedding_inference(self.tables.rows, self.batch(ids), handles)


class _StreamedLoss(torch.autograd.Function):
    """log(sum of exp(score)) - score of the positive, for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, anchor: Tensor, state: _Softmax) -> Tensor:
        batch = state.batch(state.ids)
        rows = ops.embedding_inference(state.tables.rows, batch, state.handles)
        positive = (query * rows).sum(1)
        total = torch.full_like(positive, -torch.inf)
        for _, _, rows in state.chunks():
            total = torch.logaddexp(total, (query @ rows.t()).logsumexp(1))
        known = state.handles >= 0
        ctx.state = state
        ctx.save_for_backward(query, total, anchor)
        return torch.where(known, total - positive, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        query, total, anchor = ctx.saved_tensors
        state: _Softmax = ctx.state
        trains = state.trains and accumulates(ctx.next_functions[-1][0])
        if trains:
            _check_alone(state.tables)
        known = state.handles >= 0
        gradient = torch.where(known, gradient, 0.0)
        query_gradient = torch.zeros_like(query)
        order = state.handles.argsort()
        in_order = state.handles[order]
        clock = state.tables.rows.row_clock.data  # the chunks are one update of the step
        steps = clock[state.table].clone()
        for ids, handles, rows in state.chunks():
            shares = (query @ rows.t() - total[:, None]).exp_().mul_(gradient[:, None])
            # the positives of this chunk: pairs of a query and a column
            columns = handles.argsort()
            place = torch.searchsorted(handles[columns], in_order).clamp(max=handles.shape[0] - 1)
            column = columns[place]
            here = handles[column] == in_order
            queries, column = order[here], column[here]
            shares.index_put_((queries, column), -gradient[queries], accumulate=True)
            query_gradient += shares @ rows
            if trains:
                clock[state.table] = steps
                _update(state, ids, handles, anchor, shares.t() @ query)
        if trains and len(state.listed.ids) > 1:
            position = len(state.tables.config.tables) + RowClock.SINCE_STEP
            clock[position] -= len(state.listed.ids) - 1
        return query_gradient, None if trains else torch.zeros_like(anchor), None


def _update(state: _Softmax, ids: Tensor, handles: Tensor, anchor: Tensor, rows: Tensor) -> None:
    """Give rows their gradient by the backward of a lookup."""
    with torch.enable_grad():
        looked_up = ops.embedding(
            state.tables.rows,
            state.batch(ids),
            handles,
            anchor.detach().requires_grad_(),
            optimizer=state.tables.config.optimizer_code,
        )
    looked_up.backward(rows)


def _check_alone(tables: Tables) -> None:
    """Raise RuntimeError if the backward also reaches another lookup of tables without split."""
    if tables.config.split:
        return
    key = id(tables.rows.row_clock)
    others = SEVERAL.get(key, [OPEN[key]] if key in OPEN else [])
    nodes = [node for other in others if (node := other()) is not None]
    if any(torch._C._will_engine_execute_node(node) for node in nodes):
        raise RuntimeError(
            f"FullSoftmaxLoss: backward also reaches another lookup of tables {tables.config.names}"
            ", and each would update the rows by itself: create the table with split=True; no row "
            "has been updated"
        )


__all__ = ["FullSoftmaxLoss"]
