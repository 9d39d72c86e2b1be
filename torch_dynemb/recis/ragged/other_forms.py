"""Conversion between ragged tensors and sparse and jagged tensors of torch and TorchRec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def parts_of_sparse(sparse: Tensor) -> tuple[Tensor, list[Tensor], tuple[int, ...]]:
    """Return values, offsets and sizes of a sparse COO tensor, row by row, without gaps.

    Args:
        sparse: of at least 2 sparse dimensions.

    Raises:
        ValueError: another layout, or fewer dimensions.
    """
    if sparse.layout != torch.sparse_coo or sparse.sparse_dim() < 2:
        raise ValueError(
            f"from_sparse: sparse has layout {sparse.layout} and shape {tuple(sparse.shape)}, "
            "expected sparse_coo of at least 2 sparse dimensions"
        )
    sparse = sparse.coalesce()
    indices, sizes = sparse.indices(), sparse.shape[: sparse.sparse_dim()]
    row, rows = indices[0], sizes[0]
    offsets: list[Tensor] = []
    for index, size in zip(indices[1:-1], sizes[1:-1], strict=True):
        offsets.append(torch.arange(rows + 1, device=row.device) * size)
        row, rows = row * size + index, rows * size
    lengths = torch.zeros(rows, dtype=torch.int64, device=row.device)
    lengths.scatter_add_(0, row, torch.ones_like(row))
    offsets.append(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    return sparse.values(), offsets, tuple(sizes)


def parts_of_nested(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and offsets of a jagged NestedTensor.

    Args:
        nested: ragged in its second dimension.

    Raises:
        ValueError: another layout, or another ragged dimension.
    """
    if not (nested.is_nested and nested.layout == torch.jagged) or nested._ragged_idx != 1:  # type: ignore[attr-defined]
        raise ValueError(
            "from_nested: nested is not a jagged NestedTensor, ragged in its second dimension: "
            "make it "
            "with torch.nested.nested_tensor(..., layout=torch.jagged)"
        )
    if nested.lengths() is not None:  # type: ignore[attr-defined]
        nested = torch.nested.as_nested_tensor(list(nested.unbind()), layout=torch.jagged)
    return nested.values(), nested.offsets()  # type: ignore[attr-defined]


def keyed_jagged(
    names: Sequence[str],
    values: Sequence[Tensor],
    lengths: Sequence[Tensor],
    weights: Sequence[Tensor | None],
) -> KeyedJaggedTensor:
    """Return TorchRec's KeyedJaggedTensor of features with one ragged dimension.

    Args:
        names: of the features.
        values: [N] of each feature.
        lengths: [rows] of each feature.
        weights: [N] of each feature, or None for all.

    Raises:
        ValueError: features differ in their number of rows, or in whether they have weights.
    """
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    rows = {
        name: feature_lengths.shape[0] for name, feature_lengths in zip(names, lengths, strict=True)
    }
    given = [weight for weight in weights if weight is not None]
    if len(set(rows.values())) > 1:
        raise ValueError(f"to_keyed_jagged: features have {rows} rows, expected equal numbers")
    if given and len(given) != len(names):
        raise ValueError(
            "to_keyed_jagged: some features have weights and others have none: give weights of "
            "1 to the others"
        )
    return KeyedJaggedTensor(
        list(names),
        torch.cat(list(values)),
        weights=torch.cat(given) if given else None,
        lengths=torch.cat(list(lengths)),
    )


__all__ = ["keyed_jagged", "parts_of_nested", "parts_of_sparse"]
