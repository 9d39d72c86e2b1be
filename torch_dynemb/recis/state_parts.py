"""The entries of tables in a state dict, apart from the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# entries that the state of a table has, and nothing else
_OF_TABLES = ("tables", "slabs", "row_clock")


def split_sparse_dense_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of tables in a model's state dict, and the others; the state dict stays.

    Both parts are state dicts, which ``model.load_state_dict(part, strict=False)`` takes. For the
    sparse optimizers see :func:`filter_out_sparse_param`.

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


__all__ = ["split_sparse_dense_state_dict"]
