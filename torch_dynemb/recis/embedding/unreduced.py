"""Output of a feature with rows that are not combined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dynemb import ops


class NoReduceEmbedding(NamedTuple):
    """Rows of the distinct ids of a feature, from ``EmbeddingOption(no_reduce=True)``.

    ``emb[reverse_index]`` has a row for each id, as attention over a history needs it.

    Attributes:
        emb: float32 (float16 with ``fp16_enabled``) [distinct ids, dim].
        reverse_index: int64 [n], the row of each of the n ids.
        offsets: int64 [samples + 1], where samples begin among the ids: the innermost rows.
    """

    emb: Tensor
    reverse_index: Tensor
    offsets: Tensor


# exported programs name it as a result
pytree._register_namedtuple(
    NoReduceEmbedding, serialized_type_name="torch_dynemb.recis.NoReduceEmbedding"
)


def of_distinct(ids: Tensor, bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of the distinct ids, and the row of each id.

    Args:
        ids: int64 [n].
        bounds: int64 [2], 0 and n.
        rows: [n, columns], a row for each id.
    """
    distinct = ops.unique_ids(ids, bounds)
    places = torch.arange(ids.shape[0], device=ids.device)
    first = places.new_full(distinct.ids.shape, ids.shape[0])
    first = first.scatter_reduce(0, distinct.inverse, places, "amin")
    return rows.index_select(0, first), distinct.inverse


__all__ = ["NoReduceEmbedding", "of_distinct"]
