"""Ops on live tables: lookups beside a writer, and its updates."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from op_cases.groups import Case, OpArguments, flat_call, make_group, pooled_call
from torch_dynemb.ops import LIVE_FORMATS, LiveTensors
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.serving import FrozenTables, LiveTables

FORMATS = [name for name in LIVE_FORMATS if name != "int4"]  # table b has three columns


def live_tensors(rows: str | None) -> LiveTensors:
    """The tables of make_group(), with room for ten ids more in each."""
    return LiveTables(FrozenTables(make_group()), headroom=10, rows=rows).tensors()


def read_part(live: LiveTensors) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]:
    return live.buckets, live.tables, live.meta, live.rows, live.init_data


def bag_arguments(rows: str | None, pooling: Pooling, *, weighted: bool, batch: int) -> OpArguments:
    live = live_tensors(rows)
    call = pooled_call(make_group(), batch=batch)
    weights = torch.arange(1.0, len(call.ids) + 1) if weighted else None
    return (
        *read_part(live),
        call.ids,
        call.offsets,
        weights,
        call.tables,
        call.dims,
        live.formats,
        int(pooling),
    )


def sequence_arguments(rows: str | None, *, empty: bool) -> OpArguments:
    live = live_tensors(rows)
    call = flat_call(make_group())
    ids = call.ids[:0] if empty else call.ids
    offsets = call.offsets * 0 if empty else call.offsets
    return *read_part(live), ids, offsets, call.tables, 4, live.formats


def apply_arguments(rows: str | None, ids: list[int], erased: list[int]) -> OpArguments:
    live = live_tensors(rows)
    values = torch.arange(float(4 * len(ids))).reshape(-1, 4)
    return (
        live.buckets,
        live.tables,
        live.rows,
        live.free,
        live.meta,
        2,
        torch.tensor(ids, dtype=torch.int64),
        values,
        torch.tensor(erased, dtype=torch.int64),
        live.formats,
    )


CASES: dict[str, dict[str, Case]] = {
    "serve_bag": {
        "sum": partial(bag_arguments, None, Pooling.SUM, weighted=False, batch=2),
        "weighted mean": partial(bag_arguments, None, Pooling.MEAN, weighted=True, batch=2),
        "empty": partial(bag_arguments, None, Pooling.MEAN, weighted=False, batch=0),
        **{
            name: partial(bag_arguments, name, Pooling.SUM, weighted=True, batch=2)
            for name in FORMATS
        },
    },
    "serve_rows": {
        "": partial(sequence_arguments, None, empty=False),
        "bf16": partial(sequence_arguments, "bf16", empty=False),
        "empty": partial(sequence_arguments, None, empty=True),
    },
    "serve_apply_": {
        "": partial(apply_arguments, None, [3, 70, 3, 71], [4, 5, 900]),
        "none": partial(apply_arguments, None, [], []),
        "refused": partial(apply_arguments, None, list(range(100, 120)), [4]),
        **{name: partial(apply_arguments, name, [3, 70], [4, 5]) for name in FORMATS},
    },
}
