"""A row with its optimizer state as one vector, which readers give and writers take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.optim.base import StateTensor

_LARGEST_EXACT = {torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
VALUE_TYPES = tuple(_LARGEST_EXACT)


class RowLayout(NamedTuple):
    """Columns of a row, then those of each tensor of optimizer state.

    Attributes:
        dim: columns of a row.
        state: tensors of state that follow, in this order.
    """

    dim: int
    state: tuple[StateTensor, ...]

    @property
    def width(self) -> int:
        """Elements of the vector."""
        return self.dim + sum(tensor.columns(self.dim) for tensor in self.state)

    @classmethod
    def of(
        cls, owner: str, dim: int, state: tuple[StateTensor, ...], storage_dim: int
    ) -> RowLayout:
        """The layout of vectors of so many elements: rows with all of their state, or alone.

        Args:
            owner: prefix of error messages.
            dim: columns of a row.
            state: that rows have.
            storage_dim: elements of a vector.

        Raises:
            ValueError: it is neither, or the state has 8 bits, which are no elements.
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
        """Vectors of rows and their state.

        Args:
            rows: [n, dim].
            state: by name, [n, columns], or [n] where there is one value for a row.
            dtype: of the vectors.

        Returns:
            [n, width].

        Raises:
            ValueError: a number of steps is too large for ``dtype``.
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
        """Rows and their state out of vectors.

        Args:
            values: [n, width].
            dtype: of the rows.

        Returns:
            [n, dim], and by name [n, columns], or [n] where there is one value for a row.
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
