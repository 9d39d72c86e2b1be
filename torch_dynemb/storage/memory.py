"""Protocol of the memory of a device, for the tensors of tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.storage.tiers.host_store import HostStore


class TableMemory(Protocol):
    """Memory of a device that the tensors of a group take and give back."""

    @property
    def device(self) -> torch.device:
        """Device of all tensors of the group."""

    @property
    def has_cache(self) -> bool:
        """Whether this memory caches the rows of a ``HostStore`` with a cache."""

    @property
    def has_graphs(self) -> bool:
        """Whether graphs of this device keep addresses of tensors that are replaced."""

    def total_bytes(self) -> int:
        """Return the memory of the machine or the GPU."""

    def total_bytes_with(self, storage: HostStore) -> int:
        """Return the memory that rows may fill with a storage.

        Args:
            storage: of the rows.
        """

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        """Return a zero-filled tensor that takes memory as the group grows.

        Args:
            size: shape; may far exceed the memory.
            dtype: of its elements.
            huge_pages: whether its memory should come in large pages, if the system has them.

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
        """Provide memory for the contents of a group, after its counts were written from outside.

        From then on, ``rows.dirty_bits`` that were added since also grow with the rows.

        Args:
            index, rows: of the group.
            table_buckets, slab_rows: least number of buckets of each table and rows of each slab to
                provide memory for.

        Raises:
            RuntimeError: too little memory.
        """

    def split_rows(self, index: IndexTensors, slabs: Sequence[int], storage: HostStore) -> None:
        """Let rows of empty slabs lie in host memory beyond the HBM of a storage.

        Args:
            index: of the group, which has been bound.
            slabs: their numbers.
            storage: of the rows.
        """

    def split_bytes(self, index: IndexTensors) -> tuple[int, int]:
        """Return the bytes of HBM and of host memory that split rows take.

        Args:
            index: of the group.
        """

    def is_capturing(self) -> bool:
        """Return whether the current stream of a GPU is being captured in a CUDA graph."""

    def beside(self, *inputs: Tensor) -> AbstractContextManager[None]:
        """Return a context for work beside that of the current stream of a GPU.

        The work waits for what the current stream has been given so far.

        Args:
            inputs: tensors that the work reads.
        """

    def wait_beside(self) -> None:
        """Let the current stream wait for the work of :meth:`beside`."""

    def end_step(self, index: IndexTensors, rows: RowTensors) -> None:
        """End a training step.

        Raises:
            RuntimeError: kernels of earlier calls found an error.
        """

    def release(self, index: IndexTensors, rows: RowTensors, slab_rows: Sequence[int]) -> None:
        """Give back memory that the group does not use; generations of rows stay.

        Args:
            index, rows: of the group.
            slab_rows: number of rows that each slab needs memory for.
        """


__all__ = ["TableMemory"]
