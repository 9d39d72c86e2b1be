"""Batches of rows from every rank to all ranks, or to the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.distributed.exchange import from_rank
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.table.row_batch import RowBatch


class _TensorShape(NamedTuple):
    """Sizes and dtype of a tensor that another rank sends."""

    sizes: torch.Size
    dtype: torch.dtype


class _Offer(NamedTuple):
    """A batch that a rank is about to send, with shapes in place of tensors."""

    tensors: list[_TensorShape]
    state: list[str]
    scores: list[str]
    first_column: int


def to_all_ranks(
    own: Iterator[RowBatch], ranks: Ranks, device: torch.device, *, only_first: bool = False
) -> Iterator[RowBatch]:
    """Yield the batches of all ranks on every rank, in the same order.

    All ranks iterate to the end, or stop after the same batch. An error of one rank's batches is
    raised on all. A rank needs memory for two batches: its own, and one that arrives.

    Args:
        own: of this rank.
        ranks: that share the rows.
        device: where batches of other ranks arrive.
        only_first: send them to the first rank only; others yield nothing.
    """
    if ranks.group is None:
        yield from own
        return
    while True:
        batch = ranks.run(lambda: next(own, None))
        offers = ranks.gather(None if batch is None else _offer(batch))
        if not any(offers):
            return
        for source, offer in enumerate(offers):
            if offer is None:
                continue
            mine: list[Tensor] | list[None] = [None] * len(offer.tensors)
            if source == ranks.rank and batch is not None:
                mine = _tensors(batch)
            tensors = [
                from_rank(tensor, *shape, device, source, ranks.group, to_all=not only_first)
                for tensor, shape in zip(mine, offer.tensors, strict=True)
            ]
            if all(tensor is not None for tensor in tensors):
                yield _batch(offer, tensors)  # type: ignore[arg-type]


def _tensors(batch: RowBatch) -> list[Tensor]:
    return [batch.ids, batch.rows, *batch.state.values(), *batch.scores.values()]


def _offer(batch: RowBatch) -> _Offer:
    shapes = [_TensorShape(tensor.shape, tensor.dtype) for tensor in _tensors(batch)]
    return _Offer(shapes, list(batch.state), list(batch.scores), batch.first_column)


def _batch(offer: _Offer, tensors: list[Tensor]) -> RowBatch:
    ids, rows, *others = tensors
    state, scores = others[: len(offer.state)], others[len(offer.state) :]
    return RowBatch(
        ids,
        rows,
        dict(zip(offer.state, state, strict=True)),
        dict(zip(offer.scores, scores, strict=True)),
        offer.first_column,
    )


__all__ = ["to_all_ranks"]
