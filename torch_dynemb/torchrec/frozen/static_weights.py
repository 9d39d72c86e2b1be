"""Whole weights of static tables, gathered from the shards of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_dynemb.checkpoint.saving.dense_state import Piece, dense_source, dense_state
from torch_dynemb.distributed.exchange import from_rank
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.nn.module_kinds import RankChoice


def static_weights(
    module: nn.Module,
    tables: Sequence[str],
    *,
    prefix: str,
    process_group: dist.ProcessGroup | None,
    ranks: RankChoice,
    device: torch.device,
) -> dict[str, Tensor] | None:
    """Copy the weights of static tables; all ranks call it, unless ``ranks`` is ``"own"``.

    Args:
        module: a sharded collection.
        tables: names of the tables, the same on all ranks.
        prefix: of their entries in its state dict.
        process_group: of the ranks that share it; None: one process has all of it.
        ranks: which ranks get the weights, see :class:`torch_dynemb.serving.Choices`.
        device: of the copies.

    Returns:
        [num_embeddings, dim] by table; None on ranks that get none.

    Raises:
        ValueError: ``ranks`` is ``"own"``, and parts of a table lie on other ranks.
    """
    alone = ranks == "own" or process_group is None
    together = Ranks(None, 0, 1) if alone else ranks_of(process_group)
    gets = ranks == "all" or together.rank == 0
    pieces = dense_source("static tables", dense_state(module), together.rank).pieces
    weights = {}
    for table in tables:
        name = f"{prefix}.{table}.weight"
        weight = _gathered([p for p in pieces if p.name == name], together, ranks, device)
        if alone and weight is None:
            raise ValueError(
                f"freeze: ranks is 'own', but this rank has not all of static table {table!r}: "
                "freeze with ranks='all' or 'first'"
            )
        if weight is not None:
            weights[table] = weight
    return weights if gets else None


def _gathered(
    own: list[Piece], together: Ranks, ranks: RankChoice, device: torch.device
) -> Tensor | None:
    """Join the pieces of a tensor from all ranks; None if some are missing or go elsewhere."""
    told = [
        (tuple(p.sizes) or tuple(p.values.shape), p.offsets, tuple(p.values.shape), p.values.dtype)
        for p in own
    ]
    whole: Tensor | None = None
    filled = 0
    for source, offers in enumerate(together.gather(told)):
        for number, (sizes, offsets, shape, dtype) in enumerate(offers):
            values: Tensor | None = own[number].values if source == together.rank else None
            if together.group is not None:
                to_all = ranks != "first"
                values = from_rank(
                    values, shape, dtype, device, source, together.group, to_all=to_all
                )
            if values is None:
                continue
            if whole is None:
                whole = torch.empty(sizes, dtype=dtype, device=device)
            begins = offsets or (0,) * len(shape)
            places = tuple(slice(b, b + n) for b, n in zip(begins, shape, strict=True))
            whole[places] = values
            filled += values.numel()
    return whole if whole is not None and filled >= whole.numel() else None


__all__ = ["static_weights"]
