"""Layout of a row and its optimizer state as one vector."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.optim.base import StateTensor

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

    def joined(self, rows: Tensor, state: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Join rows and their state to vectors.

        Args:
            rows: [n, dim].
            state: by name, [n, columns], or [n] if it has one value for a row.
            dtype: of the vectors.

        Returns:
            [n, width].

        Raises:
            ValueError: a step count is too large for ``dtype``.
        """
        parts = [rows.to(dtype)]
        for tensor in self.state:
            values = state[tensor.name].reshape(rows.shape[0], -1)
            if not tensor.dtype.is_floating_point and values.numel() > 0:
                most = int(values.abs().max())
                if most > _LARGEST_EXACT[dtype]:
                    raise ValueError(
                        f"{tensor.name} of a row is {most}, which {dtype} cannot hold: read rows "
                        f"alone, with storage_dim={self.dim}"
                    )
            parts.append(values.to(dtype))
        return torch.cat(parts, 1)

    def parted(self, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """Split vectors into rows and their state.

        Args:
            values: [n, width].
            dtype: of the rows.

        Returns:
            Rows [n, dim], and by name [n, columns], or [n] for one value for a row.
        """
        rows, *parts = values.split(
            [self.dim, *(tensor.columns(self.dim) for tensor in self.state)], 1
        )
        state = {
            tensor.name: (part[:, 0] if tensor.per_row else part).to(tensor.dtype).contiguous()
            for tensor, part in zip(self.state, parts, strict=True)
        }
        return rows.to(dtype).contiguous(), state


__all__ = ["VALUE_TYPES", "RowLayout"]
