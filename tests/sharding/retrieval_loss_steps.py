"""What ranks do in tests of losses over rows of TorchRec's collections."""

from __future__ import annotations

import torch
import torchrec
from seeding import seeded
from sharded_models import Table, kernels, sharded
from torch import Tensor

import torch_dynemb as td

DIM = 8


def in_batch(rank: int, sharding: str) -> tuple[Tensor, Tensor]:
    """What a step of SGD changes, and half the gradient of a plain tensor."""
    table = Table("catalogue", DIM, ("item",), "none", sharding)
    model = sharded((table,), optimizer=td.SGD(lr=1.0))
    ids = torch.arange(6) + 100 * rank  # each id on one rank: its gradients do not meet
    features = torchrec.KeyedJaggedTensor(["item"], ids, lengths=torch.ones(6, dtype=torch.int64))
    before = model(features)["item"].detach().clone()
    query = torch.randn(6, DIM, generator=seeded(rank))
    plain = before.clone().requires_grad_()
    td.in_batch_softmax_loss(query, plain, ids).backward()
    td.in_batch_softmax_loss(query, model(features)["item"], ids).backward()
    for kernel in kernels(model):
        kernel.fused_optimizer.step()
    assert plain.grad is not None
    return before - model(features)["item"].detach(), plain.grad / 2
