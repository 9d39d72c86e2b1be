"""Gathers tensors of different sizes with gloo, which NCCL can do and gloo cannot.

TorchRec's reduce-scatter of row-wise static tables needs it in backward where ranks differ in batch
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


class _Done:
    def wait(self) -> None:
        """Nothing: all broadcasts have been waited for."""


@contextmanager
def uneven_gather() -> Iterator[None]:
    """``dist.all_gather`` takes tensors that differ in size."""

    def all_gather(
        outputs: list[Tensor], given: Tensor, group: Any = None, async_op: bool = False
    ) -> _Done:
        group = group or dist.group.WORLD
        for rank, output in enumerate(outputs):
            source = dist.get_global_rank(group, rank)
            if source == dist.get_rank():
                output.copy_(given)
            part = output.contiguous()
            dist.broadcast(part, src=source, group=group)
            output.copy_(part)
        return _Done()

    with mock.patch.object(dist, "all_gather", all_gather):
        yield
