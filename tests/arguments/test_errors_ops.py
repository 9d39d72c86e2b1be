"""Wrong arguments at the level of ops: what is said, and that nothing has been changed by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from group_calls import Call, bag_lookup, differences, snapshot, unchanged
from op_cases import CASES, OPTIMIZERS, make_group, pooled_call, schema
from wrong_tensors import (
    ANY_SHAPE,
    EVERY_TENSOR,
    altered,
    case_of,
    check_dimensions,
    check_dtype,
    check_raises,
    check_strides,
    strided,
)

from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")


ADAM = OPTIMIZERS["adam"].kernel_number


@EVERY_TENSOR
def test_wrong_dtype(name: str, position: int) -> None:
    check_dtype(name, position)


@EVERY_TENSOR
def test_strided(name: str, position: int) -> None:
    check_strides(name, position)


@EVERY_TENSOR
def test_wrong_number_of_dimensions(name: str, position: int) -> None:
    check_dimensions(name, position)


RAGGED = ("ragged_cutoff", "ragged_topk", "ragged_to_dense", "ragged_indices", "dense_to_ragged")


def shorter_ragged(argument: str) -> str | None:
    """As :func:`shorter`, for lists of ragged values."""
    if argument.endswith("weights"):
        return rf"{argument}\[0\] has \d+ elements, expected one for each of \d+ values"
    if argument == "indices":
        return r"indices\[0\]\.size\(0\) is \d+, expected \d+"
    if argument.endswith("values"):
        return r"offsets\[0\] ends with \d+, expected the num|expected one for each of \d+ values"
    return r"offsets\[0\] ends with \d+, expected the number of values, \d+"


def shorter(name: str, position: int) -> str | None:
    """The message for a tensor that lacks its last entry; None: it fits all the same."""
    argument = schema(name).arguments[position].name
    if name == "apply_grad_" and argument in ("handles", "ids", "tables", "gradients"):
        return None  # lists with room to spare
    if name == "reported_counts" or argument == "policy":
        return None  # of any number of tables; rows that this call does not name
    if name in ("merge_grad_", "end_step_") and argument in ("row_clock", "buckets"):
        return None  # of any number of tables
    if name in ("copy_before_write_", "take_unchanged_rows_"):
        return {
            "rows": None,  # of any number of them
            "weights": r"state\.size\(0\) is 64, expected 63",
            "copy_on_write": None,  # with words to spare
            "out_weights": r"out_state\.size\(0\) is \d, expected \d",
        }.get(argument, rf"{argument}\.size\(0\) is \d+, expected \d+")
    if name == "changed_ids_" and argument in ("generations", "dirty_bits"):
        return None  # of rows that have no owner
    if name == "changed_ids_" and argument in ("before", "now"):
        return r"before has \d+ rows of \d columns, expected as many as now, \d+"
    if name == "end_step_":
        return r"clock\.size\(0\) is \d, expected \d"
    if name == "read_blocks":
        return "cannot open" if argument == "path" else None  # of any number of blocks
    if argument == "places":
        return r"slots\.size\(0\) is 64, expected 63"
    if name == "scatter_records_" and argument in ("slots", "records"):
        return r"records must have shape \(\d, \d+\): a record of slab 0 for each of slots"
    if (name, argument) in (("gather_records", "slots"), ("forget_rows_", "handles")):
        return None  # of any number of rows
    if name in ("quantize_rows", "dequantize_rows"):
        return None  # likewise
    if (name, argument) == ("merge_top_k", "ids"):
        return r"ids\.size\(0\) is \d+, expected \d+"
    if name.startswith("serve_") and argument in ("weights", "erased"):
        return None  # rows without an owner; any number of ids
    if name in ("serve_apply_", "serve_ids", "serve_rows") and argument == "buckets":
        return r"the two ranges of table 2 do not fit into buckets with \d+ rows"
    if name == "serve_rows" and argument in ("ids", "wanted"):
        return r"wanted(\.size\(0\) is| has) \d+"
    if name == "file_pages":
        return r"packed\.size\(0\) is \d+, expected \d+"
    if name in ("file_lookup", "file_make_live") and argument == "meta":
        return r"meta\.size\(0\) is 2, expected 3"
    if (name, argument) in (
        ("file_apply", "erased"),
        ("file_room", "erased"),
        ("file_room", "ids"),
    ):
        return None  # of any number of ids
    if name == "file_lookup" and argument == "tables":
        return r"tables\.size\(0\) is 2, expected 3"
    if name.startswith(("serve_", "file_lookup", "file_apply")) and argument == "ids":
        return r"(values|per_sample_weights)\.size\(0\) is \d+, expected \d+|the last offset is \d+"
    if name == "ids_concat" and argument == "offsets":
        return r"offsets\[0\] has 1 dimensions and 1 elements, expected 1 and 2 or 3"
    if name in ("mix_ids", "unmix_ids", "id_owners", "bucketize") or argument in ANY_SHAPE.get(
        name, ()
    ):
        return None  # of any number of ids
    if name == "string_hash":
        return r"offsets\[0\] ends with \d+, expected the number of values, \d+"
    if name.startswith(("feature_cross", *RAGGED)):
        return shorter_ragged(argument)
    if name.startswith(("pool_rows", "ragged_tile", "unique_ids", "ids_partition")):
        return {
            "rows": r"positions has \d+, expected 0 to \d+",
            "positions": r"the last offset is \d+, expected the number of positions, \d+",
            "offsets": r"the last offset is \d+|offsets has \d+ elements, expected one more than",
            "ids": r"the last offset is \d+, expected the number of ids, \d+",
        }.get(argument, rf"{argument}(\[0\])?\.size\(0\) is \d+, expected \d+")
    return {
        "tensor": r"rows 2 to 6 are not a range of the 5 rows of tensor",
        "sketch": r"policy \d: its cells lie outside the sketch",
        "buckets": r"scores\.size\(0\)|the descriptor of table 2 does not fit into buckets",
        "tables": r"meta\.size\(0\) is 3, expected 2",
        "meta": r"meta\.size\(0\) is 2, expected 3|row_clock\.size\(0\) is 7, expected 6|tables",
        "slabs": r"free_rows\.size\(0\) is 2, expected 1",
        "ids": r"the last offset is \d+, expected the number of ids, \d+",
        "offsets": r"offsets has \d+ elements, expected features \* batch \+ 1",
        "init_data": r"meta of table \d names records outside init_data",
        "weights": r"generations\.size\(0\) is 64, expected 63",
        "row_clock": r"row_clock\.size\(0\) is 6, expected 7",
        "pending_gradients": r"pending_handles\.size\(0\) is 128, expected 127",
    }.get(argument, rf"{argument}\.size\(0\) is \d+, expected \d+")


@EVERY_TENSOR
def test_too_short(name: str, position: int) -> None:
    message = shorter(name, position)
    if message is not None:
        check_raises(name, altered(name, position, lambda t: t[:-1]), message)


@pytest.mark.parametrize(
    "name", [name for name in sorted(CASES) if "feature_tables" in str(schema(name))]
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tables: [-1, *tables[1:]],
            r"feature_tables(\[0\])? (is|has table) -1, expected 0 to 2",
        ),
        (
            lambda tables: [*tables[:-1], 3],
            r"feature_tables(\[\d\])? (is|has table) 3, expected 0 to 2",
        ),
        (lambda tables: [], r"feature_tables is empty"),
        (lambda tables: [*tables, 0, 0], r"offsets has \d+ elements, expected features"),
    ],
    ids=["negative", "too large", "none", "too many"],
)
def test_wrong_tables(name: str, change: Callable[[list[int]], list[int]], message: str) -> None:
    position = [a.name for a in schema(name).arguments].index("feature_tables")
    arguments = list(case_of(name))
    arguments[position] = change(arguments[position])
    check_raises(name, tuple(arguments), message)


LOOKUPS = [name for name in sorted(CASES) if "feature_dims" in str(schema(name))]


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("feature_dims", [4, 5, 4], r"feature_dims\[1\] is 5, but its table has dim 3"),
        ("feature_dims", [4, 3], r"feature_dims has 2 elements, expected 3"),
        ("pooling", 7, r"pooling is 7, expected 0 \(sum\), 1 \(mean\) or 2 \(none\)"),
    ],
)
def test_wrong_features(name: str, argument: str, value: Any, message: str) -> None:
    position = [a.name for a in schema(name).arguments].index(argument)
    arguments = list(case_of(name))
    arguments[position] = value
    check_raises(name, tuple(arguments), message)


@pytest.mark.parametrize("name", ["embedding", "bag_weight_grad"])
def test_rows_have_one_dim_and_no_weights(name: str) -> None:
    position = [a.name for a in schema(name).arguments].index("pooling")
    arguments = list(case_of(name))
    arguments[position] = int(Pooling.NONE)
    with pytest.raises(RuntimeError, match=rf"{name}: (pooling is 2 \(none\)|features without)"):
        getattr(torch.ops.dynemb, name)(*arguments)


def test_rows_have_the_dim_of_their_table() -> None:
    position = [a.name for a in schema("embedding").arguments].index("feature_dims")
    arguments = list(CASES["embedding"]["rows"]())
    arguments[position] = [3, 3]
    check_raises("embedding", tuple(arguments), r"is 3, but its table has dim 4")


@pytest.mark.parametrize(
    "name", [name for name in sorted(CASES) if "Tensor handles" in str(schema(name))]
)
def test_handles_that_name_no_row(name: str) -> None:
    names = [a.name for a in schema(name).arguments]
    if "handles" not in names or name == "set_handles_":
        return  # among the results; or without rows to look at
    handle = 64 << 28 | 1
    arguments = altered(name, names.index("handles"), lambda t: torch.full_like(t, handle))
    check_raises(name, arguments, r"a handle names row 64, but the table has 64 rows")


# -- offsets -------------------------------------------------------------------------------------

OFFSETS = [
    ([0, 3, 2, 4], r"offsets\[2\] is 2, less than offsets\[1\] = 3: offsets must not decrease"),
    ([0, -1, 3, 4], r"offsets\[1\] is -1, less than offsets\[0\] = 0"),
    ([1, 2, 3, 4], r"offsets\[0\] is 1, expected 0"),
    ([0, 1, 2, 3], r"the last offset is 3, expected the number of ids, 4"),
    ([0, 1, 2, 5], r"the last offset is 5, expected the number of ids, 4"),
]


@pytest.mark.parametrize(("offsets", "message"), OFFSETS, ids=lambda value: str(value)[:12])
def test_wrong_offsets_change_nothing(offsets: list[int], message: str) -> None:
    group = make_group()
    ids = torch.arange(50, 54)
    given = torch.tensor(offsets, dtype=torch.int64)
    handles = torch.full((4,), -1)
    calls: list[Callable[[], object]] = [
        lambda: group.find_or_insert(ids, given, [0]),
        lambda: group.find(ids, given, [0]),
        lambda: bag_lookup(group, Call(ids, given, [0], [4]), handles=handles),
        lambda: ops.erase_(group.index, ids, given, [0]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=message):
            call()
        assert unchanged(group, call) == []


# -- the rest ------------------------------------------------------------------------------------


UPDATES = pytest.mark.parametrize("name", ["embedding_backward_", "apply_grad_"])


@UPDATES
def test_optimizer_ops_check_the_state(name: str) -> None:
    position = [a.name for a in schema(name).arguments].index("state")
    for states, message in (
        (slice(3), "state has 3 tensors, expected a multiple of the 2 slabs"),
        (
            slice(0),
            "state of slab 0 has 0 tensors of a value per weight, 0 .* adam: 2, 0 and 0 or 1",
        ),
        (
            slice(2),
            "state of slab 0 has 1 tensors of a value per weight, 0 .* adam: 2, 0 and 0 or 1",
        ),
    ):
        arguments = list(case_of(name))
        arguments[position] = arguments[position][states]
        check_raises(name, tuple(arguments), rf"{name}: {message}")
    arguments = list(case_of(name))
    arguments[position][1], arguments[position][0] = arguments[position][:2]
    check_raises(name, tuple(arguments), rf"{name}: state\.size\(1\) is 4, expected 3")


@UPDATES
@pytest.mark.parametrize(
    ("optimizer", "states", "expected"),
    [
        ("sgd", 0, "0, 0 and 0"),
        ("rowwise_adagrad", 1, "0, 1 and 0"),
        ("smart_decay_adam", 3, "2, 0 and 1"),
    ],
)
def test_optimizer_ops_check_other_kinds_of_state(
    name: str, optimizer: str, states: int, expected: str
) -> None:
    label = next(label for label in CASES[name] if label.split()[-1] == optimizer)
    position = [a.name for a in schema(name).arguments].index("state")
    for state in range(states):
        for change, message in (
            (lambda t: t.double(), r"state(\[\d\])? has dtype float64, expected"),
            (strided, r"state(\[\d\])? is not contiguous"),
            (lambda t: t.new_zeros(()), "state"),
        ):
            arguments = list(CASES[name][label]())
            tensors = arguments[position] = list(arguments[position])
            tensors[2 * state] = change(tensors[2 * state])
            check_raises(name, tuple(arguments), rf"{name}: {message}")
    arguments = list(CASES[name][label]())
    arguments[position] = [torch.zeros(64, 3), torch.zeros(64, 4)]
    check_raises(name, tuple(arguments), rf"{name}: state of slab 0 .* {optimizer}: {expected}")


@UPDATES
@pytest.mark.parametrize("number", [-1, len(ops.OPTIMIZER_NAMES), 1 << 8, 2**62])
def test_unknown_optimizers(name: str, number: int) -> None:
    last = len(ops.OPTIMIZER_NAMES) - 1
    message = rf"{name}: optimizer is {number}, expected 0 to {last}: a position in"
    arguments = (*case_of(name)[:-1], number)
    check_raises(name, arguments, message)
    on_meta = [
        [t.to("meta") for t in given]
        if isinstance(given, list) and given and isinstance(given[0], torch.Tensor)
        else given.to("meta")
        if isinstance(given, torch.Tensor)
        else given
        for given in arguments
    ]
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.dynemb, name)(*on_meta)


@UPDATES
def test_optimizer_ops_check_dirty_bits_and_copy_on_write(name: str) -> None:
    names = [a.name for a in schema(name).arguments]
    words = torch.zeros(32, dtype=torch.int64)
    for argument, given, message in (
        ("dirty_bits", slice(1), "dirty_bits has 1 tensors, expected none, or one for each of the"),
        ("copy_on_write", [words], "copy_on_write has 1 tensors, expected none, or one for each"),
        ("copy_on_write", [words, words[:31]], "copy_on_write of slab 1 has 31 words, expected at"),
    ):
        arguments = list(case_of(name))
        position = names.index(argument)
        arguments[position] = arguments[position][given] if isinstance(given, slice) else given
        check_raises(name, tuple(arguments), rf"{name}: {message}")


def test_update_needs_all_tables_of_its_entries() -> None:
    arguments = case_of("apply_grad_")
    check_raises(
        "apply_grad_",
        (*arguments[:-2], [0, 1], ADAM),
        r"entry \d of slab 1 belongs to table 2, which updated_tables lacks",
    )
    check_raises("apply_grad_", (*arguments[:-2], [0, 1, 5], ADAM), r"updated_tables has table 5")


def test_update_checks_entries() -> None:
    names = [a.name for a in schema("apply_grad_").arguments]
    for argument, value in (("handles", 64 << 28), ("handles", -1), ("tables", 3), ("tables", 1)):
        arguments = list(case_of("apply_grad_"))
        position = names.index(argument)
        arguments[position][1] = torch.full_like(arguments[position][1], value)
        check_raises(
            "apply_grad_", tuple(arguments), r"entry 0 of slab 1 has handle -?\d+ and table"
        )
    arguments = list(case_of("apply_grad_"))
    arguments[names.index("counts")] = torch.tensor([1000, 0])
    check_raises("apply_grad_", tuple(arguments), r"counts\[0\] is 1000, more than handles, ids")


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (4, -1, r"table is -1, expected 0 to 2"),
        (4, 3, r"table is 3, expected 0 to 2"),
        (5, -5, r"begin is -5, expected a bucket from 0"),
        (5, 10_000, r"begin is 10000, expected a bucket from 0"),
        (6, 1, r"max_ids is 1, expected at least a bucket"),
    ],
)
def test_export_arguments(position: int, value: int, message: str) -> None:
    arguments = list(case_of("export_batch"))
    arguments[position] = value
    check_raises("export_batch", tuple(arguments), message)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (8, 9, r"slab is 9, expected one with tables"),
        (9, 0, r"reader is 0, expected bits of a byte"),
        (9, 256, r"reader is 256, expected bits of a byte"),
        (6, torch.zeros(1, 3, dtype=torch.int64), r"before has 1 rows of 3 columns, expected as"),
        (7, torch.zeros(9, 1, dtype=torch.int64), r"now has 1 columns, expected 2, or 3 with"),
        (7, torch.zeros(9, dtype=torch.int64), r"before has 2 dimensions and now 1, expected"),
        (5, torch.zeros(1, dtype=torch.uint8), r"dirty_bits has 1, expected at least those of now"),
    ],
)
def test_changed_ids_arguments(position: int, value: object, message: str) -> None:
    arguments = list(case_of("changed_ids_"))
    arguments[position] = value
    check_raises("changed_ids_", tuple(arguments), message)


def test_changed_ids_are_of_rows_that_are_given() -> None:
    arguments = list(case_of("changed_ids_"))
    arguments[6], arguments[7] = arguments[6][:1], arguments[7][:1]
    check_raises("changed_ids_", tuple(arguments), r"has row \d+, but now has 1: give it all rows")


def test_grow_arguments() -> None:
    arguments = case_of("grow_")[:-2]
    check_raises("grow_", (*arguments, 9, 5), r"table is 9, expected 0 to 2")
    check_raises("grow_", (*arguments, 0, -5), r"ids is -5, expected a count of at least 0")
    check_raises("grow_", (*arguments, 0, 10_000), r"larger max_rows, or erase ids")


def test_descriptors_that_do_not_fit() -> None:
    group = make_group()
    for column, value in ((0, 0), (0, 10_000)):
        tables = group.index.tables.clone()
        tables[1, column] = value
        before = snapshot(group)
        call = pooled_call(group)
        with pytest.raises(RuntimeError, match=r"the descriptor of table 'b' does not fit into"):
            ops.find(group.index._replace(tables=tables), call.ids, call.offsets, call.tables)
        assert differences(before, snapshot(group)) == []
