"""Ops on the rows of a group: lookups, gradients, updates."""

from __future__ import annotations

from functools import partial

import torch
from group_calls import Call, call_of, take_rows
from torch import Tensor

import torch_dynemb as td
from op_cases.groups import (
    OPTIMIZERS,
    POLICIES,
    STORED,
    Case,
    OpArguments,
    flat_call,
    found,
    make_group,
    pooled_call,
    pooled_kinds,
)
from torch_dynemb import ops
from torch_dynemb.ops.columns import CopyOnWrite, Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.ops.update import APPLIES_DELAYED
from torch_dynemb.table.changes import record_changes

ADAM = OPTIMIZERS["adam"].kernel_number
# the first case is Adam's
NAMES = ["adam", *(name for name in OPTIMIZERS if name != "adam")]


def per_sample_weights(call: Call, kind: str) -> Tensor | None:
    if kind == "plain":
        return None
    values = torch.linspace(0.5, 1.5, len(call.ids))
    return values.requires_grad_() if kind == "learned" else values


def bag_arguments(
    kind: str,
    pooling: Pooling,
    *,
    anchor: bool,
    batch: int = 2,
    optimizer: int = ADAM,
    stored: str = "adam",
    split: bool = False,
) -> OpArguments:
    group = make_group(optimizer=stored, split=split)
    call = pooled_call(group, batch)
    return (
        *group.rows,
        call.ids,
        found(group, call),
        call.offsets,
        per_sample_weights(call, kind),
        torch.zeros(1, requires_grad=anchor),
        call.tables,
        call.dims,
        int(pooling),
        optimizer,
    )


def sequence_arguments(*, anchor: bool) -> OpArguments:
    group = make_group()
    call = flat_call(group)
    return (
        *group.rows,
        call.ids,
        found(group, call),
        call.offsets,
        None,
        torch.zeros(1, requires_grad=anchor),
        call.tables,
        call.dims,
        int(Pooling.NONE),
        ADAM,
    )


def read_only_rows(group: td.TableGroup) -> OpArguments:
    return group.rows.weights, group.rows.generations, group.index.meta, group.rows.init_data


def inference_arguments(
    kind: str, pooling: Pooling, *, stored: str = "adam", formats: str | None = None
) -> OpArguments:
    group = make_group(optimizer=stored)
    call = flat_call(group) if pooling == Pooling.NONE else pooled_call(group)
    weights = None if pooling == Pooling.NONE else per_sample_weights(call, kind)
    shared = (call.ids, found(group, call), call.offsets, weights, call.tables, call.dims)
    of_slabs = [] if formats is None else QUANTIZED[formats]
    return (*quantized_rows(group, of_slabs), *shared, int(pooling), of_slabs)


def forward_arguments(kind: str, pooling: Pooling, *, stored: str = "adam") -> OpArguments:
    group = make_group(optimizer=stored)
    call = flat_call(group) if pooling == Pooling.NONE else pooled_call(group)
    weights = None if pooling == Pooling.NONE else per_sample_weights(call, kind)
    shared = (call.ids, found(group, call), call.offsets, weights, call.tables, call.dims)
    rows = group.rows
    read = (rows.weights, rows.generations, rows.row_clock, rows.meta, rows.init_data)
    return (*read, *shared, int(pooling))


def find_and_read_arguments(kind: str, pooling: Pooling, *, stored: str = "adam") -> OpArguments:
    group = make_group(optimizer=stored)
    call = flat_call(group) if pooling == Pooling.NONE else pooled_call(group)
    weights = None if pooling == Pooling.NONE else per_sample_weights(call, kind)
    index, rows = group.index, group.rows
    found_in = (index.buckets, index.tables, index.meta)
    read = (rows.weights, rows.generations, rows.init_data)
    features = (weights, call.tables, call.dims, int(pooling), True)
    return (*found_in, *read, call.ids, call.offsets, *features)


def insert_and_read_arguments(kind: str, pooling: Pooling, *, stored: str = "adam") -> OpArguments:
    group = make_group(optimizer=stored)
    call = flat_call(group) if pooling == Pooling.NONE else pooled_call(group)
    weights = None if pooling == Pooling.NONE else per_sample_weights(call, kind)
    features = (weights, call.tables, call.dims, int(pooling), [])
    return (ops.bind_lookup(group.index, group.rows), call.ids, call.offsets, *features)


def bind_arguments() -> OpArguments:
    group = make_group(score=POLICIES["sketch"])
    rows = group.rows
    return (*group.index, rows.weights, rows.generations, rows.row_clock, rows.init_data)


def bags_of_one_table_arguments() -> OpArguments:
    """Offsets lack the number of ids at their end."""
    given = list(one_table_arguments()[:-2])
    given[7] = torch.tensor([0, 0, 2])
    return (*given, int(Pooling.MEAN), False)


def one_table() -> td.TableGroup:
    group = td.TableGroup(
        [td.TableConfig("a", 4)], optimizer=OPTIMIZERS["adam"], max_rows=64, seed=2
    )
    group.insert_or_assign(0, torch.arange(10), torch.linspace(-1, 1, 40).reshape(10, 4))
    return group


def one_table_arguments() -> OpArguments:
    """Its rows are read without a word about features."""
    group = one_table()
    index, rows = group.index, group.rows
    found_in = (index.buckets, index.tables, index.meta)
    read = (rows.weights, rows.generations, rows.init_data)
    what_is_left_out = (None, [], [], int(Pooling.NONE), True)
    return (*found_in, *read, torch.tensor([1, 70, 1]), group.tables.one_bag, *what_is_left_out)


QUANTIZED = {"int8": [1, 1], "int4": [0, 2], "fp8": [3, 3], "floats": [0, 0], "mixed": [1, 3]}


def quantized_rows(group: td.TableGroup, formats: list[int]) -> OpArguments:
    """The slab of two tables has 4 columns, the other one 3."""
    weights, generations, *constants = read_only_rows(group)
    packed = [
        slab if form == 0 else ops.quantize_rows(slab, form)
        for slab, form in zip(weights, formats or [0] * len(weights), strict=True)
    ]
    return packed, generations, *constants


def rows_to_quantize(dtype: torch.dtype, dim: int) -> Tensor:
    """Plain rows, an equal one, one of zeros, and at the end one with infinity."""
    rows = torch.linspace(-3.0, 5.0, 40 * dim).reshape(40, dim).square() - 4.0
    rows[3], rows[4], rows[39, 1] = 0.1, 0.0, float("-inf")
    return rows.to(dtype)


def quantize_arguments(form: int, dtype: torch.dtype, dim: int) -> OpArguments:
    return rows_to_quantize(dtype, dim), form


def dequantize_arguments(form: int, dim: int) -> OpArguments:
    return ops.quantize_rows(rows_to_quantize(torch.float32, dim)[:39], form), form, dim


def gradient_arguments(group: td.TableGroup, kind: str, pooling: Pooling) -> OpArguments:
    """From the rows that a gradient needs to its pooling."""
    call = pooled_call(group)
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    gradient = torch.linspace(-1.0, 1.0, 2 * sum(call.dims)).reshape(2, -1)
    shared = (call.ids, handles, call.offsets, per_sample_weights(call, kind))
    return gradient, *shared, call.tables, call.dims, int(pooling)


def reduce_arguments(kind: str, pooling: Pooling) -> OpArguments:
    group = make_group()
    return (*read_only_rows(group), *gradient_arguments(group, kind, pooling))


def group_to_write(optimizer: str) -> td.TableGroup:
    """With a reader of changes: ops that write rows set dirty bits."""
    group = make_group(optimizer=optimizer)
    record_changes(group.tables, "test", scores=False)
    return group


def number_of(optimizer: str) -> int:
    return (STORED[optimizer][0] if optimizer in STORED else OPTIMIZERS[optimizer]).kernel_number


def backward_arguments(optimizer: str, kind: str, pooling: Pooling) -> OpArguments:
    group = group_to_write(optimizer)
    gradient, ids, handles, offsets, weights, *features = gradient_arguments(group, kind, pooling)
    updates = torch.tensor([1])
    lookup = (gradient, ids, handles, offsets, weights, updates, *features)
    return (*group.rows.updated, *lookup, number_of(optimizer))


def update_arguments(optimizer: str) -> OpArguments:
    group = group_to_write(optimizer)
    arguments = gradient_arguments(group, "plain", Pooling.SUM)
    reduced = torch.ops.dynemb.reduce_grad(*read_only_rows(group), *arguments)
    updates = torch.tensor([1])
    return (*group.rows.updated, *reduced, updates, [0, 1, 2], number_of(optimizer))


def pending_arguments(kind: str, pooling: Pooling) -> OpArguments:
    group = make_group(split=True)
    gradient, ids, handles, offsets, weights, *features = gradient_arguments(group, kind, pooling)
    updates = group.rows.row_clock[-4 + RowClock.UPDATES].reshape(1).clone()
    lookup = (gradient, ids, handles, offsets, weights, updates, *features)
    pending = PendingGradients.of(group.rows.pending)
    return (*pending, group.rows.row_clock, *read_only_rows(group), *lookup)


def merge_arguments() -> OpArguments:
    """Two lookups; between them the row of id 6 of table 0 gets another owner."""
    group = make_group(split=True)
    for known, new in (([5, 6, 7], []), ([7, 5], [80])):
        call = call_of(group, [(0, [[*known, *new]])])
        handles = group.find_or_insert(call.ids, call.offsets, call.tables)
        rows = torch.ops.dynemb.embedding(
            *group.rows,
            call.ids,
            handles,
            call.offsets,
            None,
            torch.zeros(1, requires_grad=True),
            call.tables,
            call.dims,
            int(Pooling.NONE),
            group.config.optimizer_code,
        )[0]
        rows.sum().backward()
        take_rows(group, 0, torch.tensor([6]))
    return (*PendingGradients.of(group.rows.pending), group.rows.row_clock)


def materialize_arguments(optimizer: str) -> OpArguments:
    group = group_to_write(optimizer)
    index = (
        group.index.buckets,
        group.index.tables,
        group.rows.hyper,
        group.index.meta,
        group.rows.init_data,
    )
    return (*group.rows[:5], *index)


def copied_arguments(optimizer: str, out: bool = False) -> OpArguments:
    """Of a slab with copy-on-write."""
    group = make_group(optimizer=optimizer)
    slabs = len(group.rows.weights)
    weights = group.rows.weights[0][:64].clone()
    state = [tensor[:64].clone() for tensor in group.rows.state[::slabs]]
    row_bytes = sum(of[0].numel() * of.element_size() for of in (weights, *state))
    words = torch.zeros(128 + row_bytes, dtype=torch.int64)
    words[CopyOnWrite.ROWS], words[CopyOnWrite.PLACES], words[CopyOnWrite.ROW_BYTES] = (
        64,
        8,
        -(-row_bytes // 8) * 8,
    )
    words[CopyOnWrite.MARKS], words[CopyOnWrite.FREE], words[CopyOnWrite.BUFFER] = 32, 64, 68
    words[CopyOnWrite.ACTIVE], words[CopyOnWrite.GIVEN] = 1, 8
    words.view(torch.int32)[128:136] = torch.arange(8, dtype=torch.int32)
    rows = torch.tensor([3, 0, 17])
    if not out:
        return weights, state, words, rows
    new = [torch.zeros_like(tensor[:3]) for tensor in state]
    return weights, state, words, rows, torch.zeros_like(weights[:3]), new


CASES: dict[str, dict[str, Case]] = {
    "embedding": {
        **{
            f"{kind} {pooling.name}": partial(bag_arguments, kind, pooling, anchor=True)
            for kind, pooling in (*pooled_kinds(), ("learned", Pooling.MEAN))
        },
        "no gradient": partial(bag_arguments, "plain", Pooling.SUM, anchor=False),
        "empty": partial(bag_arguments, "plain", Pooling.SUM, anchor=True, batch=0),
        "weights only": partial(bag_arguments, "learned", Pooling.SUM, anchor=True, optimizer=-1),
        "delayed gradients": partial(
            bag_arguments, "plain", Pooling.SUM, anchor=True, optimizer=APPLIES_DELAYED + ADAM
        ),
        **{
            name: partial(bag_arguments, "plain", Pooling.SUM, anchor=True, stored=name)
            for name in STORED
        },
        "split": partial(bag_arguments, "weighted", Pooling.MEAN, anchor=True, split=True),
        "rows": partial(sequence_arguments, anchor=True),
        "rows, no gradient": partial(sequence_arguments, anchor=False),
    },
    **{
        op: {
            **{
                f"{kind} {pooling.name}": partial(arguments, kind, pooling)
                for kind, pooling in (*pooled_kinds(), ("plain", Pooling.NONE))
            },
            **{name: partial(arguments, "plain", Pooling.SUM, stored=name) for name in STORED},
            **more,
        }
        for op, arguments, more in (
            ("embedding_forward", forward_arguments, {}),
            (
                "embedding_inference",
                inference_arguments,
                {
                    f"{name} {pooling.name}": partial(
                        inference_arguments, kind, pooling, formats=name
                    )
                    for name in QUANTIZED
                    for kind, pooling in (("weighted", Pooling.MEAN), ("plain", Pooling.NONE))
                },
            ),
            (
                "find_and_read",
                find_and_read_arguments,
                {
                    "one table": one_table_arguments,
                    "bags of one table": bags_of_one_table_arguments,
                },
            ),
            ("insert_and_read", insert_and_read_arguments, {}),
        )
    },
    "bind_lookup": {"": bind_arguments},
    "release_lookup": {"": lambda: (0,)},
    "quantize_rows": {
        f"{form} {dtype} {dim}".replace("torch.", ""): partial(quantize_arguments, form, dtype, dim)
        for form, dtype, dim in (
            (1, torch.float32, 8),
            (1, torch.float16, 5),
            (2, torch.float32, 40),
            (2, torch.bfloat16, 6),
            (3, torch.float32, 3),
        )
    },
    "dequantize_rows": {
        f"{form} {dim}": partial(dequantize_arguments, form, dim)
        for form, dim in ((1, 40), (1, 5), (2, 8), (2, 6), (3, 40), (3, 7))
    },
    "reduce_grad": {
        f"{kind} {pooling.name}": partial(reduce_arguments, kind, pooling)
        for kind, pooling in pooled_kinds()
    },
    "bag_weight_grad": {
        pooling.name: partial(reduce_arguments, "weighted", pooling)
        for pooling in (Pooling.SUM, Pooling.MEAN)
    },
    "materialize_": {
        "element state": partial(materialize_arguments, "adagrad"),
        "row state": partial(materialize_arguments, "rowwise_adagrad"),
        **{name: partial(materialize_arguments, name) for name in STORED},
    },
    "copy_before_write_": {name: partial(copied_arguments, name) for name in STORED},
    "take_unchanged_rows_": {name: partial(copied_arguments, name, True) for name in STORED},
    "accumulate_grad_": {
        f"{kind} {pooling.name}": partial(pending_arguments, kind, pooling)
        for kind, pooling in pooled_kinds()
    },
    "merge_grad_": {"": merge_arguments},
    "embedding_backward_": {
        **{
            f"{kind} {pooling.name} {name}": partial(backward_arguments, name, kind, pooling)
            for name in NAMES
            for kind, pooling in (("plain", Pooling.SUM), ("weighted", Pooling.MEAN))
        },
        **{name: partial(backward_arguments, name, "plain", Pooling.SUM) for name in STORED},
    },
    "apply_grad_": {name: partial(update_arguments, name) for name in (*NAMES, *STORED)},
}
