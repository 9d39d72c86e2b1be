"""What the ranks of test_reduce_scatter do."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import comm_ops
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import CommOp

from torch_dynemb.distributed import exchange
from torch_dynemb.torchrec.sharding.reduce_scatter import GlooReduceScatter

COLUMNS = 5


def local(rank: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, COLUMNS, generator=generator)


def reduce_scatter(
    rank: int, sizes: list[int], given: bool, division: bool, encoded: bool
) -> tuple[float, float]:
    """Largest errors of the sum and of the gradient, in large tensors as in small ones."""
    small = _errors(rank, sizes, given, division, encoded)
    with mock.patch.object(exchange, "_HUGE_PAGES_FROM", 0):
        assert _errors(rank, sizes, given, division, encoded) == small
    return small


def _errors(
    rank: int, sizes: list[int], given: bool, division: bool, encoded: bool
) -> tuple[float, float]:
    codecs: Any = None
    if encoded:
        config = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
        codecs = get_qcomm_codecs_registry(config)[CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name]
    module = GlooReduceScatter(dist.group.WORLD, codecs)
    embeddings = local(rank, sum(sizes)).requires_grad_()
    comm_ops.set_gradient_division(division)
    try:
        result = module(embeddings, sizes if given else None).wait()
        begin = sum(sizes[:rank])
        of_ranks = [local(r, sum(sizes)) for r in range(len(sizes))]
        expected = torch.stack(of_ranks).sum(0)[begin : begin + sizes[rank]]
        assert result.shape == expected.shape
        result.backward(local(100 + rank, sizes[rank]))
    finally:
        comm_ops.set_gradient_division(True)
    grads = torch.cat([local(100 + r, size) for r, size in enumerate(sizes)])
    assert embeddings.grad is not None
    differences = (
        result.detach() - expected,
        embeddings.grad - grads / (len(sizes) if division else 1),
    )
    first, second = (max([0.0, *d.abs().flatten().tolist()]) for d in differences)
    return first, second
