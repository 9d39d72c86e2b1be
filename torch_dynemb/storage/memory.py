"""What tables ask of the device that they lie on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torch_dynemb.ops.tensors import IndexTensors, RowTensors


class TableMemory(Protocol):
    """The memory of a device, as the tensors of a group take it and give it back."""

    @property
    def device(self) -> torch.device:
        """Of all tensors of the group."""

    def total_bytes(self) -> int:
        """Memory of the machine or the GPU."""

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        """A zero-filled tensor that takes memory as the group grows.

        Args:
            size: shape; may far exceed what there is.
            dtype: of its elements.
            huge_pages: whether its memory should come in large pages, where there are such.

        Raises:
            RuntimeError: addresses are short.
        """

    def bind(
        self,
        index: IndexTensors,
        rows: RowTensors,
        table_buckets: Sequence[int] = (),
        slab_rows: Sequence[int] = (),
    ) -> None:
        """Takes note of what a group holds; needed after its counts were written from outside.

        ``rows.dirty_bits`` that have been added since grow with the rows from then on.

        Args:
            index, rows: of the group.
            table_buckets, slab_rows: buckets of each table and rows of each slab to make room for
                at least.

        Raises:
            RuntimeError: too little memory.
        """

    def end_step(self, index: IndexTensors, rows: RowTensors) -> None:
        """Ends a training step.

        Raises:
            RuntimeError: what kernels of earlier calls have found wrong.
        """

    def release(self, index: IndexTensors, rows: RowTensors, slab_rows: Sequence[int]) -> None:
        """Gives memory back beyond what the group holds; generations of rows stay.

        Args:
            index, rows: of the group.
            slab_rows: for how many rows each slab needs memory.
        """


__all__ = ["TableMemory"]
