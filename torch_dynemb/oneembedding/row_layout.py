"""Layout of a row and its optimizer state as one vector."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.optim.base import StateTensor
from torch_dynemb.table import RowBatch

_LARGEST_EXACT = {torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
VALUE_TYPES = tuple(_LARGEST_EXACT)


class RowLayout(NamedTuple):
    """Columns of a row, followed by those of each optimizer state tensor.

    Attributes:
        dim: columns of a row.
        state: state tensors, in this order.
    """

    dim: int
    state: tuple[StateTensor, ...]

    @property
    def width(self) -> int:
        """Number of elements of the vector."""
        return self.dim + sum(tensor.columns(self.dim) for tensor in self.state)

    @classmethod
    def of(
        cls, owner: str, dim: int, state: tuple[StateTensor, ...], storage_dim: int
    ) -> RowLayout:
        """Choose the layout by the number of elements: rows with all of their state, or rows alone.

        Args:
            owner: prefix of error messages.
            dim: columns of a row.
            state: state tensors of rows.
            storage_dim: elements of a vector.

        Raises:
            ValueError: no layout has so many elements, or the state has 8 bits, which vectors
                cannot
                hold.
        """
        whole = cls(dim, state)
        if storage_dim == dim:
            return cls(dim, ())
        blocks = [tensor.name for tensor in state if tensor.dtype == torch.uint8]
        if blocks:
            raise ValueError(
                f"{owner}: storage_dim is {storage_dim}, but {blocks[0]} has 8 bits with scales: "
                f"give {dim}, for rows without state"
            )
        if storage_dim != whole.width:
            parts = ", ".join(f"{tensor.name} {tensor.columns(dim)}" for tensor in state)
            raise ValueError(
                f"{owner}: storage_dim is {storage_dim}, expected {dim} for rows alone"
                + (f", or {whole.width} with {parts}" if state else "")
            )
        return whole

    def joined(self, batch: RowBatch, dtype: torch.dtype) -> Tensor:
        """Join rows and their state to vectors.

        Args:
            batch: rows, and state unless the layout has none.
            dtype: of the vectors.

        Returns:
            [n, width].

        Raises:
            ValueError: a step count is too large for ``dtype``.
        """
        parts = [batch.rows.to(dtype)]
        for tensor in self.state:
            values = batch.state[tensor.name]
            if not tensor.dtype.is_floating_point and values.numel() > 0:
                most = int(values.abs().max())
                if most > _LARGEST_EXACT[dtype]:
                    raise ValueError(
                        f"{tensor.name} of a row is {most}, which {dtype} cannot hold: read rows "
                        f"alone, with storage_dim={self.dim}"
                    )
            parts.append(values.to(dtype))
        return torch.cat(parts, 1)

    def parted(self, ids: Tensor, values: Tensor, dtype: torch.dtype) -> RowBatch:
        """Split vectors into rows and their state.

        Args:
            ids: int64 [n].
            values: [n, width].
            dtype: of the rows.
        """
        rows, *parts = values.split(
            [self.dim, *(tensor.columns(self.dim) for tensor in self.state)], 1
        )
        state = {
            tensor.name: part.to(tensor.dtype).contiguous()
            for tensor, part in zip(self.state, parts, strict=True)
        }
        return RowBatch(ids, rows.to(dtype).contiguous(), state)


__all__ = ["VALUE_TYPES", "RowLayout"]
