"""Sparse parts of a model and of its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.recis.tables.hash_table import HashTable

# entries that only the state of a table has
_OF_TABLES = ("tables", "slabs", "row_clock")


def filter_out_sparse_param(model: nn.Module) -> dict[str, HashTable]:
    """Return the hash tables of a model by name, for the sparse optimizers.

    Args:
        model: with tables at any depth.

    Returns:
        The tables in the order of ``model.modules()``, by name: for tables of an engine, the names
        of the logical tables, such as ``"item, user"``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: two tables have one name, or tables share a child's name.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"filter_out_sparse_param: model is {described(model)}, expected a torch.nn.Module"
        )
    tables: dict[str, HashTable] = {}
    owners: dict[str, str] = {}
    for module in model.modules():
        if not isinstance(module, HashTable):
            continue
        if module.name in tables:
            raise ValueError(
                f"filter_out_sparse_param: two tables are named {module.name!r}: rename one, "
                "or share one table (EmbeddingEngine does, by shared_name)"
            )
        for child in module.children_hashtable:
            if child in owners:
                raise ValueError(
                    f"filter_out_sparse_param: tables {owners[child]!r} and {module.name!r} both "
                    f"have a child {child!r}, expected different names"
                )
            owners[child] = module.name
        tables[module.name] = module
    return tables


def filter_out_trainable_sparse_param(model: nn.Module) -> dict[str, HashTable]:
    """Return the hash tables of :func:`filter_out_sparse_param` that are trained.

    Args:
        model: with tables at any depth.

    Raises:
        TypeError, ValueError: as :func:`filter_out_sparse_param`.
    """
    tables = filter_out_sparse_param(model)
    return {name: table for name, table in tables.items() if table.trainable}


def split_sparse_dense_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a model's state dict into the entries of tables and the others.

    The given state dict stays unchanged. ``model.load_state_dict(part, strict=False)`` takes either
    part. For the sparse optimizers see :func:`filter_out_sparse_param`.

    Args:
        state_dict: of a model, by name.

    Returns:
        The sparse part and the dense part, with the names and values of ``state_dict``.

    Example:
        >>> from torch import nn
        >>> from torch_dynemb.recis import DynamicEmbedding, EmbeddingOption
        >>> model = nn.ModuleDict(
        ...     {"item": DynamicEmbedding(EmbeddingOption()), "top": nn.Linear(16, 1)}
        ... )
        >>> sparse, dense = split_sparse_dense_state_dict(model.state_dict())
        >>> list(dense), "item.hashtable.tables" in sparse
        (['top.weight', 'top.bias'], True)
    """
    ends = [name for name in state_dict if name.rpartition(".")[2] == _OF_TABLES[0]]
    prefixes = tuple(
        prefix
        for prefix in (name.removesuffix(_OF_TABLES[0]) for name in ends)
        if all(prefix + entry in state_dict for entry in _OF_TABLES)
    )
    sparse = {name: value for name, value in state_dict.items() if name.startswith(prefixes)}
    dense = {name: value for name, value in state_dict.items() if name not in sparse}
    return sparse, dense


__all__ = [
    "filter_out_sparse_param",
    "filter_out_trainable_sparse_param",
    "split_sparse_dense_state_dict",
]
