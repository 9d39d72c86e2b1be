"""Checks of the saved entries of a dynamic table, by facts that all ranks know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from torch_dynemb.torchrec.state.table_state import (
    Layout,
    TableShape,
    state_key,
)


def first_columns_of(shape: TableShape) -> tuple[int, ...]:
    """Return the first columns of the column shards of a table."""
    return tuple(sorted({place.first_column for place in shape.places}))


_NAMES = ("weight", "weight_id", "bucket", "metadata", "count_id", "count", "layout")


def is_entry(name: str) -> bool:
    """Return whether a table's state can have an entry of this name."""
    return name in _NAMES or name.startswith(state_key(""))


def _other_half_life(shape: TableShape, kind: str, saved: int, own: int) -> str:
    def text(ticks: int) -> str:
        if ticks == 0:
            return "no half-life"
        return f"a half-life of {-ticks} steps" if ticks < 0 else f"a half-life of {ticks} seconds"

    return (
        f"table {shape.name!r}: layout has {kind} with {text(saved)}, but the table's have "
        f"{text(own)}: load a checkpoint of torch_dynemb.checkpoint.save, which converts them, or "
        "give the table its half-life"
    )


def missing_entries(
    shape: TableShape, entries: Mapping[str, Any], layout: Layout | None
) -> list[str]:
    """Return the entries of a table's own state that are missing.

    If ``layout`` has other scores than the table's policy, missing scores are accepted.
    """
    expected = ["weight", "weight_id", "bucket", "layout"]
    if shape.scores if layout is None else layout.scores:
        expected.append("metadata")
    if not any(name.startswith(state_key("")) for name in entries):  # else check_entries reports it
        expected += [state_key(tensor.name) for tensor in shape.optimizer.state]
    if shape.counted:
        expected += ["count_id", "count"]
    return [name for name in expected if name not in entries]


def check_entries(
    shape: TableShape, entries: Mapping[str, Any], layout: Layout | None
) -> list[str]:
    """Return the errors in the entries of a table, by facts that all ranks know."""
    table = f"table {shape.name!r}"
    for name, value in entries.items():
        if isinstance(value, ShardedTensor):  # its own layout is unknown
            continue
        if not isinstance(value, Tensor):
            return [f"{table}: {name} is a {type(value).__name__}, expected a tensor"]
        if value.is_meta or value.layout != torch.strided:
            where = "on the meta device" if value.is_meta else f"of layout {value.layout}"
            return [f"{table}: {name} is {where}, expected a dense tensor with values"]
    size, _ = _size_and_dtype(entries["weight"])
    if len(size) != 2 or size[1] != shape.embedding_dim:
        return [f"{table}: weight has shape {size}, expected (ids, {shape.embedding_dim})"]
    if layout is None:
        others = sorted(name for name in entries if name != "weight" and is_entry(name))
        if others:
            return [
                f"{table}: has {others} beside weight, but lacks layout, which describes them: "
                "give all entries, or weight alone for rows of ids 0, 1, ..."
            ]
        return []
    both = "decayed" in layout.scores and "decayed" in shape.scores
    if both and layout.half_life != shape.half_life:
        return [_other_half_life(shape, "scores", layout.half_life, shape.half_life)]
    saved, own = layout.admission_half_life, shape.admission_half_life
    if shape.counted and "count" in entries and saved != own:
        return [_other_half_life(shape, "counts of admission", saved, own)]
    if layout.first_columns[-1] >= shape.embedding_dim:
        return [
            f"{table}: layout has column shards that begin at columns {layout.first_columns}, "
            f"expected less than {shape.embedding_dim}"
        ]
    if "weight_id" not in entries:
        return [f"{table}: has layout, but lacks weight_id, the ids of the rows"]
    counts = {"count_id", "count"} & set(entries)
    if len(counts) == 1:
        return [f"{table}: has {counts.pop()}, but lacks the other of count_id and count"]
    for name in ("weight_id", "metadata", "count_id", "count"):
        if name in entries:
            _, dtype = _size_and_dtype(entries[name])
            if dtype != torch.int64:
                return [f"{table}: {name} has dtype {dtype}, expected torch.int64"]
    given = sorted(name for name in entries if name.startswith(state_key("")))
    expected = sorted(state_key(tensor.name) for tensor in shape.optimizer.state)
    if not given:
        return []  # rows alone
    if given != expected:
        return [
            f"{table}: was saved with optimizer state {given}, but {shape.optimizer.name} has "
            f"{expected}: give it the optimizer of the saved table"
        ]
    errors = []
    for tensor in shape.optimizer.state:
        key = state_key(tensor.name)
        _, dtype = _size_and_dtype(entries[key])
        if dtype != tensor.dtype:
            errors.append(f"{table}: {key} has dtype {dtype}, expected {tensor.dtype}")
        blocks = not tensor.splits_by_column and not tensor.per_row
        if blocks and layout.first_columns != first_columns_of(shape):
            errors.append(
                f"{table}: {key} has 8-bit blocks of column shards that begin at columns "
                f"{layout.first_columns}, but the shards begin at {first_columns_of(shape)}: shard "
                "columns as they were when it was saved"
            )
    return errors


def _size_and_dtype(value: Tensor | ShardedTensor) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(value, ShardedTensor):  # its own properties warn about DTensor
        metadata = value.metadata()
        return tuple(metadata.size), metadata.tensor_properties.dtype
    return tuple(value.size()), value.dtype


__all__ = ["check_entries", "first_columns_of", "is_entry", "missing_entries"]
