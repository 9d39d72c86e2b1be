"""Tables that a rank trains on its own although its process group has others."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.nn.table_optimizers import modules_in

M = TypeVar("M", bound=nn.Module)


def private_to_rank(model: M) -> M:
    """Allow training of tables that only this rank, or some ranks, of the process group have.

    A training lookup of a plain module raises in a process group of several ranks, because rows
    that every rank trains on its own diverge. The same goes for a module with ``process_group=`` of
    some ranks. Some programs mean that: one rank has the first stage of a pipeline, or each rank
    has ids or a model of its own. Copies of the model stay private.

    ``torch.distributed.checkpoint`` keeps one of several tensors with one name. So give tables of
    this rank alone a path in the model that other ranks lack.

    Args:
        model: with the tables, at any depth.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no dynamic tables.

    Example:
        >>> import torch, torch_dynemb as td
        >>> ads = td.private_to_rank(td.DynamicEmbedding(4, name="ads", optimizer=td.SGD(lr=0.1)))
        >>> ads(torch.tensor([7])).shape
        torch.Size([1, 4])
    """
    found = [m for m in modules_in("private_to_rank", model) if isinstance(m, TableModule)]
    if not found:
        raise ValueError(
            f"private_to_rank: model is a {type(model).__name__} without dynamic tables, expected "
            "the model that has them"
        )
    for module in found:
        module._private_to_rank = True
    return model


__all__ = ["private_to_rank"]
