"""Ops on frozen tables: lookups that find ids and read their rows in one pass."""

from __future__ import annotations

from functools import partial

import torch

from op_cases.groups import Case, OpArguments, flat_call, make_group, pooled_call
from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.serving import FrozenTables

FORMATS = {"floats": [0, 0], "int8": [1, 1], "int4": [0, 2], "fp8": [3, 3], "mixed": [1, 3]}


def read_part(formats: list[int], stored: str) -> OpArguments:
    """The tables of make_group(); the slab of two of them has 4 columns, the other one 3."""
    frozen = FrozenTables(make_group(optimizer=stored))
    weights = [frozen.get_buffer(f"weights{slab}") for slab in range(len(formats))]
    packed = [
        slab if form == 0 else ops.quantize_rows(slab, form)
        for slab, form in zip(weights, formats, strict=True)
    ]
    buckets, tables, meta = (frozen.get_buffer(name) for name in ("buckets", "tables", "meta"))
    return buckets, tables, meta, packed, frozen.get_buffer("init_data")


def bag_arguments(
    name: str, pooling: Pooling, *, weighted: bool, batch: int = 2, stored: str = "adam"
) -> OpArguments:
    formats = FORMATS[name]
    call = pooled_call(make_group(), batch=batch)
    weights = torch.arange(1.0, len(call.ids) + 1) if weighted else None
    features = (call.tables, call.dims, formats, int(pooling))
    return *read_part(formats, stored), call.ids, call.offsets, weights, *features


def sequence_arguments(name: str, *, empty: bool = False, stored: str = "adam") -> OpArguments:
    formats = FORMATS[name]
    call = flat_call(make_group())
    ids = call.ids[:0] if empty else call.ids
    offsets = call.offsets * 0 if empty else call.offsets
    return *read_part(formats, stored), ids, offsets, call.tables, 4, formats


CASES: dict[str, dict[str, Case]] = {
    "frozen_bag": {
        "sum": partial(bag_arguments, "floats", Pooling.SUM, weighted=False),
        "weighted mean": partial(bag_arguments, "floats", Pooling.MEAN, weighted=True),
        "empty": partial(bag_arguments, "floats", Pooling.MEAN, weighted=False, batch=0),
        "bfloat16": partial(
            bag_arguments, "floats", Pooling.SUM, weighted=False, stored="bfloat16"
        ),
        **{
            name: partial(bag_arguments, name, Pooling.SUM, weighted=name == "mixed")
            for name in FORMATS
        },
    },
    "frozen_rows": {
        **{name: partial(sequence_arguments, name) for name in FORMATS},
        "float16": partial(sequence_arguments, "floats", stored="8 bits"),
        "empty": partial(sequence_arguments, "floats", empty=True),
    },
}
