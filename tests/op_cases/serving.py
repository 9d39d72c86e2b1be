"""Ops on tables that are served: lookups in frozen and live ones, and updates of live ones."""

from __future__ import annotations

from functools import partial

import torch

from op_cases.groups import Case, OpArguments, flat_call, make_group, pooled_call
from op_cases.rows import QUANTIZED
from torch_dynemb import ops
from torch_dynemb.ops import LIVE_FORMATS, ServedTensors
from torch_dynemb.ops.columns import Pooling, RowFormat
from torch_dynemb.serving import FrozenTables, LiveTables

FORMATS = [name for name in LIVE_FORMATS if name != "int4"]  # table b has three columns


def frozen_tensors(name: str, stored: str = "adam") -> ServedTensors:
    """The tables of make_group(); the slab of two of them has 4 columns, the other one 3."""
    frozen, formats = FrozenTables(make_group(optimizer=stored)).tensors(), QUANTIZED[name]
    packed = [
        slab if form == 0 else ops.quantize_rows(slab, form)
        for slab, form in zip(frozen.weights, formats, strict=True)
    ]
    return frozen._replace(weights=packed, formats=formats)


def live_tensors(rows: str | None = None) -> ServedTensors:
    """The tables of make_group(), with room for ten ids more in each."""
    return LiveTables(FrozenTables(make_group()), headroom=10, rows=rows).tensors()


def lookup_arguments(
    served: partial[ServedTensors], pooling: Pooling, *, weighted: bool = False, batch: int = 2
) -> OpArguments:
    """Without bags: no ids."""
    tables, group = served(), make_group()
    call = flat_call(group) if pooling == Pooling.NONE else pooled_call(group, batch=batch)
    ids, offsets = (call.ids, call.offsets) if batch else (call.ids[:0], call.offsets * 0)
    weights = torch.arange(1.0, len(ids) + 1) if weighted else None
    read = (tables.buckets, tables.tables, tables.meta, tables.weights, tables.init_data)
    asked = (ids, offsets, weights, call.tables, call.dims, int(pooling))
    return *read, *asked, tables.formats, tables.free is not None


def apply_arguments(
    rows: str | None, ids: list[int], erased: list[int], *, quantized: bool = False
) -> OpArguments:
    live = live_tensors(rows)
    values = torch.arange(float(4 * len(ids))).reshape(-1, 4)
    if quantized:
        values = ops.quantize_rows(values, RowFormat.INT8)
    return (
        live.buckets,
        live.tables,
        live.weights,
        live.free,
        live.meta,
        2,
        torch.tensor(ids, dtype=torch.int64),
        values,
        torch.tensor(erased, dtype=torch.int64),
        live.formats,
    )


def lookup_cases(served: partial[ServedTensors]) -> dict[str, Case]:
    """All that a lookup may ask for."""
    return {
        "sum": partial(lookup_arguments, served, Pooling.SUM),
        "weighted mean": partial(lookup_arguments, served, Pooling.MEAN, weighted=True),
        "empty": partial(lookup_arguments, served, Pooling.MEAN, batch=0),
        "rows": partial(lookup_arguments, served, Pooling.NONE),
        "no rows": partial(lookup_arguments, served, Pooling.NONE, batch=0),
    }


def named(kind: str, cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{name}, {kind}": case for name, case in cases.items()}


FROZEN = {name: partial(frozen_tensors, name) for name in QUANTIZED} | {
    stored: partial(frozen_tensors, "floats", stored) for stored in ("bfloat16", "8 bits")
}
LIVE = {name: partial(live_tensors, name) for name in FORMATS}
CASES: dict[str, dict[str, Case]] = {
    "serve_lookup": {
        **named("frozen", lookup_cases(FROZEN["floats"])),
        **{
            f"{pooling.name} of {name}, frozen": partial(lookup_arguments, served, pooling)
            for name, served in FROZEN.items()
            for pooling in (Pooling.SUM, Pooling.NONE)
        },
        **named("live", lookup_cases(partial(live_tensors))),
        **{
            f"{name}, live": partial(lookup_arguments, served, Pooling.SUM, weighted=True)
            for name, served in LIVE.items()
        },
    },
    "serve_apply_": {
        "": partial(apply_arguments, None, [3, 70, 3, 71], [4, 5, 900]),
        "none": partial(apply_arguments, None, [], []),
        "refused": partial(apply_arguments, None, list(range(100, 120)), [4]),
        **{name: partial(apply_arguments, name, [3, 70], [4, 5]) for name in FORMATS},
        "quantized": partial(apply_arguments, "int8", [3, 70, 3], [4, 5], quantized=True),
    },
}
