"""Checks of a hash table's arguments, and the configs of its logical tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from torch_dynemb.argument_checks import described, integers, text
from torch_dynemb.initializers import Initializer
from torch_dynemb.policy import Custom, Policy
from torch_dynemb.policy.admission import AdmissionRule
from torch_dynemb.policy.policy import Score
from torch_dynemb.recis.initializers import initializer_of
from torch_dynemb.recis.slices import Slice
from torch_dynemb.recis.tables.hooks import FilterHook
from torch_dynemb.recis.tables.packed_rows import packed_columns
from torch_dynemb.storage.device import device_of
from torch_dynemb.storage.tiers import Storage, check_storage, needs_device_cache
from torch_dynemb.table import TableConfig


def one_dimension(embedding_shape: Sequence[int]) -> int:
    """Return the only size of an embedding_shape.

    Raises:
        TypeError: ``embedding_shape`` is not a list of integers.
        ValueError: it has not one size, or the size is less than 1.
    """
    sizes = integers("HashTable: embedding_shape", embedding_shape, least=1)
    if len(sizes) != 1:
        raise ValueError(f"HashTable: embedding_shape is {sizes}, expected one size")
    return sizes[0]


def child_names(name: str, children: Sequence[str] | None, *, coalesced: bool) -> list[str]:
    """Return the names of a table's children; default: the table's own name.

    Raises:
        TypeError: ``children`` is not a list.
        ValueError: there are several, but ``coalesced`` is False.
    """
    if isinstance(children, str) or not isinstance(children, Iterable | None):
        raise TypeError(f"HashTable: children is {described(children)}, expected a list of names")
    names = [text("HashTable: name", name)] if not children else list(children)
    if len(names) > 1 and not coalesced:
        raise ValueError(
            f"HashTable: children are {names}, but coalesced is False: one table has one child"
        )
    return names


def check_hash_table(table_slice: object, filter_hook: object, admissions: object) -> None:
    """Raise TypeError unless a table's slice, filter_hook and admissions have their types."""
    for argument, value, kind in (
        ("slice", table_slice, Slice),
        ("filter_hook", filter_hook, FilterHook),
        ("admissions", admissions, Mapping),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"HashTable: {argument} is {described(value)}, expected a {kind.__name__}"
            )


def check_storage_on(owner: str, storage: Storage | None, device: torch.device | str) -> None:
    """Raise TypeError unless it is a storage or None, ValueError if it lacks a GPU's cache."""
    check_storage(owner, storage)
    if needs_device_cache(storage) and device_of(owner, device).type != "cpu":
        raise ValueError(
            f"{owner}: storage is {storage}, but device is {str(device)!r}, which needs a cache of "
            "its own above a store: give device_cache=, or device='cpu'"
        )


def check_grad_reduction(owner: str, grad_reduce_by: str) -> None:
    """Raise ValueError unless it is "worker" or "id"."""
    if grad_reduce_by not in ("worker", "id"):
        raise ValueError(
            f"{owner}: grad_reduce_by is {grad_reduce_by!r}, expected 'worker' or 'id': 'worker' "
            "divides the sum over ranks by their number, which a loss times that number undoes"
        )


def table_configs(
    names: Sequence[str],
    dim: int,
    dtype: torch.dtype,
    *,
    initializer: Initializer,
    block_size: int,
    scores: tuple[Score | Custom, ...],
    rules: Mapping[str, AdmissionRule],
) -> list[TableConfig]:
    """Return configs of the logical tables; 8-bit rows are packed into float32 columns.

    Args:
        names: of the tables.
        dim: columns of a row.
        dtype: of the rows.
        initializer: of new rows.
        block_size: number of rows for RecIS's initializers.
        scores: scores of an id that filters need.
        rules: of admission, by name.
    """
    packed = dtype == torch.int8
    rows = initializer_of(initializer, block_size)
    return [
        TableConfig(
            name=child,
            embedding_dim=packed_columns(dim) if packed else dim,
            initializer=rows,
            eval_default="zeros",
            policy=Policy(score=scores or None, admission=rules.get(child)),
            dtype=torch.float32 if packed else dtype,
        )
        for child in names
    ]


__all__ = [
    "check_grad_reduction",
    "check_hash_table",
    "check_storage_on",
    "child_names",
    "one_dimension",
    "table_configs",
]
