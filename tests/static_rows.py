"""Rows of static tables, inserted into dynamic ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torch_dynemb import ops


def insert_static_rows(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Inserts row i of a static table as that of id i, on the ranks that have it.

    Args:
        model: sharded.
        whole: the state dict of the unsharded model.
    """
    weights = {name.split(".")[-2]: of for name, of in whole.items() if name.endswith(".weight")}
    kernels = [
        of for module in model.modules() if hasattr(module, "kernels") for of in module.kernels()
    ]
    for kernel in kernels:
        tables = kernel.tables
        for t, shard in enumerate(tables.shards):
            rows = weights[shard.name].detach()
            ids = torch.arange(len(rows))
            part, _, parts = shard.ids
            mine = torch.tensor([id % 2**64 % parts == part for id in ops.mix_ids(ids).tolist()])
            columns = slice(shard.columns.start, shard.columns.stop)
            tables.group.insert_or_assign(t, ids[mine], rows[mine][:, columns].contiguous())
