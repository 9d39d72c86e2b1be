"""Checks of arguments of ``torch.ops.dynemb`` for calls that reach no kernel.

Kernels check their arguments. Fake implementations run in their place while a program is traced,
and on the meta device. They check here what they read, in the words of the kernels, before Python
raises an error about an index, an attribute or a negative dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


class Expected(NamedTuple):
    """Expected properties of a tensor, or of each of a list; None: any.

    Attributes:
        dtype: of its elements.
        dims: number of its dimensions.
        or_bytes: whether it may also be uint8.
    """

    dtype: torch.dtype | None
    dims: int | None
    or_bytes: bool = False


_INT64 = torch.int64
_WORDS, _WORD_ROWS = Expected(_INT64, 1), Expected(_INT64, 2)
_FLOATS, _FLOAT_ROWS = Expected(torch.float32, 1), Expected(torch.float32, 2)
_ANY = Expected(None, None)
_ANY_ROW = Expected(None, 1)

# by the name of the argument, which means the same in all ops, except those in _OTHERWISE
_TENSORS = {
    **dict.fromkeys(
        ("ids", "offsets", "handles", "positions", "quotients", "clock", "row_clock"), _WORDS
    ),
    **dict.fromkeys(("counts", "updates", "inner_offsets", "outer_offsets"), _WORDS),
    **dict.fromkeys(("pending_handles", "pending_ids", "pending_tables"), _WORDS),
    **dict.fromkeys(("x_values", "x_offsets", "y_values", "y_offsets"), _WORDS),
    **dict.fromkeys(("buckets", "scores", "tables", "slabs", "free_rows", "meta"), _WORD_ROWS),
    **dict.fromkeys(("policy", "evicted", "pending_counts", "indices"), _WORD_ROWS),
    **dict.fromkeys(("per_sample_weights", "x_weights", "y_weights"), _FLOATS),
    **dict.fromkeys(("rows", "grad", "grads", "grad_output", "gradients"), _FLOAT_ROWS),
    "pending_gradients": _FLOAT_ROWS,
    "sketch": Expected(torch.int32, 1),
    "generations": Expected(torch.int32, 1),
    "dirty_bits": Expected(torch.uint8, 1),
    "copy_on_write": _WORDS,
    "hyper": Expected(torch.float64, 2),
    "init_data": Expected(torch.float64, 1),
    "admit": Expected(torch.bool, 1),
    "wanted": Expected(torch.bool, 1),
    "boundaries": _ANY_ROW,
    "path": Expected(torch.uint8, 1),
    "places": Expected(torch.int32, 1),
    "free_slots": Expected(torch.int32, 1),
    "slots": _WORDS,
    "tier_clock": _WORD_ROWS,
    "moves": _WORD_ROWS,
    "records": Expected(torch.uint8, 2),
    "erased": _WORDS,
    "free": _WORD_ROWS,
    "packed": Expected(torch.uint8, 2),
    "seed": _WORDS,
    "best_scores": _FLOAT_ROWS,
    "best_ids": _WORD_ROWS,
}
# entries of lists: a slab's pending tables; slots of its cache
_IN_LISTS = {"tables": _WORDS, "slots": _WORD_ROWS}
_ROW_WEIGHTS = Expected(None, 2)  # of one of the dtypes that rows are stored in
# (op, argument) with another meaning of the name
_OTHERWISE = {
    ("ids_concat", "ids"): _ANY,
    ("ids_encode", "ids"): Expected(_INT64, None),
    ("ids_concat", "offsets"): _ANY_ROW,
    ("set_scores_", "values"): _WORDS,
    ("combine_scores_", "values"): _WORDS,
    ("serve_apply_", "values"): _FLOAT_ROWS._replace(or_bytes=True),
    ("serve_apply_", "ids"): _WORDS,
    **{(op, "weights"): _WORD_ROWS for op in ("serve_apply_", "serve_ids", "serve_rows")},
    ("serve_rows", "ids"): _WORDS,
    ("mod", "values"): Expected(_INT64, None),
    ("multi_hash", "values"): Expected(_INT64, None),
    ("bucketize", "values"): _ANY,
    ("quantize_rows", "rows"): _ROW_WEIGHTS,
    ("merge_top_k", "scores"): _FLOAT_ROWS,
    **{(op, "rows"): _WORDS for op in ("copy_before_write_", "take_unchanged_rows_")},
    ("take_unchanged_rows_", "out_weights"): _ROW_WEIGHTS,
    **{
        (op, "weights"): _FLOATS
        for op in (
            "pool_rows",
            "pool_rows_grad",
            "pool_rows_weight_grad",
            "ragged_tile",
            "ragged_tile_grad",
            "ragged_cutoff_2d",
            "ragged_cutoff_3d",
            "ragged_topk_index_cutoff",
        )
    },
    **{
        (op, "values"): _ANY_ROW
        for op in (
            "string_hash",
            "ragged_cutoff_2d",
            "ragged_cutoff_3d",
            "ragged_topk_index_cutoff",
            "ragged_to_dense",
            "ragged_indices",
        )
    },
}

# the least value of numbers, and of the entries of lists of them
_LEAST = {
    **dict.fromkeys(("features", "parts", "slots", "tile_lens", "depths", "divisors"), 1),
    **dict.fromkeys(("primes", "buckets", "feature_dims", "dim"), 1),
    **dict.fromkeys(("rows", "bags", "keep_lengths", "lengths", "hashes", "part"), 0),
    **dict.fromkeys(("table", "begin", "ids", "word", "max_ids", "pooling", "feature_tables"), 0),
    **dict.fromkeys(("feature_policies", "updated_tables", "weighted", "ragged", "size"), 0),
    **dict.fromkeys(("dtype", "level", "table_buckets", "slab_rows"), 0),
    **dict.fromkeys(("slab", "limit", "ahead", "formats"), 0),
    **dict.fromkeys(("tables", "headroom"), 0),
    "samples": 0,
    "most": 1,
    "optimizer": -1,
}
# ops that apply an optimizer
_UPDATE_OPS = ("embedding_backward_", "apply_grad_")
# numbers without a least value, unlike those of the same name in other ops
_ANY_NUMBER = (*((op, "optimizer") for op in _UPDATE_OPS), ("ids_encode", "tables"))

# ops with offsets that are never empty: the begin of each part, and the end of the last
_NEVER_EMPTY = (
    *("unique_ids", "ids_partition", "pool_rows", "pool_rows_grad"),
    *("pool_rows_weight_grad", "ragged_tile", "ragged_tile_grad", "ragged_tile_weight_grad"),
    *("ragged_cutoff_2d", "ragged_cutoff_3d", "ragged_topk_index_cutoff", "ragged_to_dense"),
    *("ragged_indices", "feature_cross_ragged", "string_hash"),
    "bag_weight_grad",
)

# lists of features, and a list with an entry for each feature
_FEATURE_NUMBERS = {
    "weighted": "values",
    "x_weighted": "x_values",
    "y_weighted": "y_values",
    "ragged": "ids",
}
_LAST_DTYPE_CODE = 5  # of reserve
_LARGE = 1 << 20  # a size that can make a result too large
_LARGEST_UINT32 = 2**32 - 1
# the rest of the message about a tensor that must be in host memory
_READS_FILES = "reads files to host memory: copy to the CPU first, with .cpu()"
_MOVES_ROWS = (
    "moves rows in host memory: tables with storage are on the CPU, and so are their tensors"
)
_MOVE_OPS = ("plan_moves_", "take_dirty_", "shrink_cache_", "forget_rows_")
_CACHE_OPS = ("stage_", "staged_lookup_", "prefetch_", "stage_records_", *_MOVE_OPS)
_RECORD_OPS = ("gather_records", "scatter_records_")
_SERVES_HOST = (
    "works on host memory: live tables are on the CPU; a GPU serves frozen ones, by find and "
    "embedding_inference"
)
_SERVING_OPS = ("serve_lookup", "serve_apply_", "serve_ids", "serve_rows")
_COPIES = "copies rows of host memory on write: saves of tables on other devices copy all rows"
_COPY_OPS = ("copy_before_write_", "take_unchanged_rows_")
_IN_HOST_MEMORY = {
    ("crc32c", "data"): "sums bytes in host memory: copy to the CPU first, with .cpu()",
    ("read_blocks", "path"): _READS_FILES,
    ("read_blocks", "offsets"): _READS_FILES,
    ("reserve_saves_", "tier_clock"): _MOVES_ROWS,
    **{
        (op, name): _MOVES_ROWS
        for op in ("stage_records_", *_MOVE_OPS)
        for name in ("places", "slots", "free_slots", "tier_clock")
    },
    **{
        (op, name): _MOVES_ROWS
        for op in _RECORD_OPS
        for name in ("weights", "generations", "state")
    },
    **{
        (op, name): _SERVES_HOST for op in _SERVING_OPS for name in ("buckets", "tables", "weights")
    },
    ("serve_apply_", "free"): _SERVES_HOST,
    **{
        (f"file_{op}", "file"): _READS_FILES
        for op in (
            *("open", "close", "stats", "ids", "lookup"),
            *("make_live", "apply", "room", "counts"),
        )
    },
    ("file_make_live", "meta"): _READS_FILES,
    **{("file_apply", name): _READS_FILES for name in ("ids", "values", "erased")},
    **{("file_room", name): _READS_FILES for name in ("ids", "erased")},
    **{("file_lookup", name): _READS_FILES for name in ("tables", "meta", "init_data")},
    **{("file_pages", name): _READS_FILES for name in ("ids", "packed")},
    **{
        (op, name): _COPIES
        for op in _COPY_OPS
        for name in ("weights", "state", "copy_on_write", "rows")
    },
    **{("take_unchanged_rows_", name): _COPIES for name in ("out_weights", "out_state")},
}
_FARM, _MURMUR3, _MURMUR64A = range(3)
_ROW_FORMATS = {1: "int8", 2: "int4", 3: "fp8"}
_INT4 = 2
_FLOAT_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PAGE_BYTES = 4096
_LAST_IO_PATH = 2

_RAGGED = ("values", "offsets")
_LOOKUP = ("feature_tables", "feature_dims")
_SLABS = ("weights", "generations")
# lists of an op that have equal lengths
_SAME_LENGTH: dict[str, tuple[tuple[str, ...], ...]] = {
    "mod": (("values", "divisors"),),
    "bucketize": (("values", "boundaries"),),
    "multi_hash": (("values", "hashes"), ("multipliers", "primes", "buckets")),
    "string_hash": (_RAGGED,),
    "ids_encode": (("ids", "tables"),),
    "ids_concat": (("offsets", "ragged"), ("ids",)),
    "ragged_tile": (("tile_lens", "pad_left"),),
    "ragged_tile_grad": (("grads", "tile_lens", "pad_left"),),
    "ragged_tile_weight_grad": (("grads", "tile_lens", "pad_left"),),
    "ragged_cutoff_2d": ((*_RAGGED, "keep_lengths", "drop_left"), ("weights", "weighted")),
    "ragged_cutoff_3d": (
        ("values", "outer_offsets", "inner_offsets", "keep_lengths", "drop_left", "pad_left"),
        ("weights", "weighted"),
    ),
    "ragged_topk_index_cutoff": ((*_RAGGED, "indices"), ("weights", "weighted")),
    "ragged_to_dense": (("values", "depths"), ("offsets", "lengths")),
    "ragged_indices": (("values", "depths"), ("offsets", "lengths")),
    "dense_to_ragged": (("dense",),),
    "feature_cross_ragged": (
        ("x_values", "x_offsets", "y_values", "y_offsets"),
        ("x_weights", "x_weighted"),
        ("y_weights", "y_weighted"),
    ),
    "embedding": (_SLABS, _LOOKUP),
    "embedding_inference": (_SLABS, _LOOKUP),
    "embedding_forward": (_SLABS, _LOOKUP),
    "find_and_read": (_SLABS, _LOOKUP),
    "bind_lookup": (_SLABS,),
    "insert_and_read": (_LOOKUP,),
    "reduce_grad": (_SLABS, _LOOKUP),
    "bag_weight_grad": (_SLABS, _LOOKUP),
    "accumulate_grad_": (_SLABS, _LOOKUP),
    **dict.fromkeys(_CACHE_OPS, (("places", "slots", "free_slots"),)),
    **dict.fromkeys(_RECORD_OPS, (_SLABS,)),
    "serve_lookup": (("weights", "formats"), _LOOKUP),
    "file_lookup": (_LOOKUP,),
    **dict.fromkeys(("serve_apply_", "serve_ids", "serve_rows"), (("weights", "formats"),)),
}
# ops that need no list of features if there is one table
_ONE_FEATURE = ("find_and_read",)
# lists that may have no entry
_MAY_BE_EMPTY = (
    "feature_tables",
    "weights",
    "x_weights",
    "y_weights",
    "offsets",
    "multipliers",
    "hashes",
)


def _refuse(op: str, text: str) -> NoReturn:
    raise RuntimeError(f"dynemb::{op}: {text}")


def _entries(name: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield an argument, or each entry of a list, with its name."""
    if isinstance(given, list | tuple):
        yield from ((f"{name}[{i}]", entry) for i, entry in enumerate(given))
    else:
        yield name, given


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensor(op: str, name: str, entry: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        _refuse(op, f"{entry} is a {tensor.layout} tensor, expected a dense one: call .to_dense()")
    if (op, name) in _IN_HOST_MEMORY and tensor.device.type not in ("cpu", "meta"):
        _refuse(
            op,
            f"{entry} is on {tensor.device}, but {op} {_IN_HOST_MEMORY[op, name]}",
        )
    expected = _OTHERWISE.get((op, name)) or (_IN_LISTS.get(name) if entry != name else None)
    if expected is None:
        expected = _ROW_WEIGHTS if name == "weights" else _TENSORS.get(name, _ANY)
    bytes_given = expected.or_bytes and tensor.dtype == torch.uint8
    if expected.dtype is not None and tensor.dtype != expected.dtype and not bytes_given:
        dtype = _dtype_name(tensor.dtype)
        _refuse(op, f"{entry} has dtype {dtype}, expected {_dtype_name(expected.dtype)}")
    if expected.dims is not None and tensor.dim() != expected.dims:
        _refuse(op, f"{entry} has {tensor.dim()} dimensions, expected {expected.dims}")
    if name.endswith("offsets") and op in _NEVER_EMPTY and tensor.dim() == 1:
        count = tensor.shape[0]
        if isinstance(count, int) and count == 0:
            _refuse(op, f"{entry} is empty, expected where each part begins, and the last one ends")
    if name == "dense" and tensor.dim() < 2:
        _refuse(op, f"{entry} has {tensor.dim()} dimensions, expected at least 2")


def _check_devices(op: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Check that meta tensors are not mixed with others, which would stay unchanged."""
    meta = [name for name, tensor in tensors if _is_meta(tensor)]
    others = [(name, tensor) for name, tensor in tensors if not _is_meta(tensor)]
    if meta and others:
        name, tensor = others[0]
        _refuse(op, f"{meta[0]} is on the meta device, but {name} is on {tensor.device}: move it")


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" and not isinstance(tensor, FakeTensor)


@functools.cache
def _argument_types(op: str) -> tuple[tuple[str, bool, bool], ...]:
    """Return (name, has tensors, is optional) of each argument."""
    schema = getattr(torch.ops.dynemb, op).default._schema
    return tuple(
        (a.name, "Tensor" in str(a.type), str(a.type).startswith("Optional"))
        for a in schema.arguments
    )


@functools.cache
def _default_values(op: str) -> dict[str, Any]:
    """Return the default values of arguments that a call may leave out."""
    schema = getattr(torch.ops.dynemb, op).default._schema
    return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


@functools.cache
def _optimizer_names() -> list[str]:
    names: list[str] = torch.ops.dynemb.optimizer_names()
    return names


def check_arguments(op: str, arguments: Sequence[Any]) -> None:
    """Check everything about a call that does not depend on the values of tensors.

    Args:
        op: without namespace.
        arguments: of the call, in the order of its schema.

    Raises:
        RuntimeError: an argument is wrong. The message names the op, the argument, its value and
            the expectation.
    """
    given = dict(zip((name for name, _, _ in _argument_types(op)), arguments, strict=False))
    given = _default_values(op) | given
    tensors: list[tuple[str, Tensor]] = []
    for name, has_tensors, optional in _argument_types(op)[: len(arguments)]:
        for entry, value in _entries(name, given[name]):
            if value is None and not (optional and entry == name):
                _refuse(op, f"{entry} is None, expected a {'tensor' if has_tensors else 'number'}")
            if isinstance(value, Tensor):
                tensors.append((entry, value))
                _check_tensor(op, name, entry, value)
            elif (
                type(value) is int
                and value < _LEAST.get(name, value)
                and (op, name) not in _ANY_NUMBER
            ):
                _refuse(op, f"{entry} is {value}, expected at least {_LEAST[name]}")
    _check_devices(op, tensors)
    for names in _SAME_LENGTH.get(op, ()):
        lengths = [len(given[name]) for name in names]
        if lengths[0] == 0 and names[0] not in _MAY_BE_EMPTY:
            _refuse(op, f"{names[0]} is empty, expected an entry or more")
        for name, length in zip(names, lengths, strict=True):
            if length != lengths[0]:
                _refuse(
                    op,
                    f"{name} has {length} entries, expected as many as {names[0]}, {lengths[0]}",
                )
    _check_sums(op, given)
    if "feature_tables" in given and not given["feature_tables"] and op not in _ONE_FEATURE:
        _refuse(op, "feature_tables is empty, expected the table of each feature")


def _check_sums(op: str, given: dict[str, Any]) -> None:
    """Check numbers that have to match other arguments."""
    if "depths" in given and sum(given["depths"]) != len(given["offsets"]):
        _refuse(
            op,
            f"depths add up to {sum(given['depths'])}, expected the number of offsets, "
            f"{len(given['offsets'])}",
        )
    for name, of in _FEATURE_NUMBERS.items():
        for entry, feature in _entries(name, given.get(name, ())):
            if feature >= len(given[of]):
                _refuse(op, f"{entry} is {feature}, expected 0 to {len(given[of]) - 1}")
    if op == "multi_hash" and sum(given["hashes"]) != len(given["primes"]):
        _refuse(
            op,
            f"hashes add up to {sum(given['hashes'])}, expected the number of primes, "
            f"{len(given['primes'])}",
        )
    if "crc" in given and not 0 <= given["crc"] <= _LARGEST_UINT32:
        _refuse(op, f"crc is {given['crc']}, expected 0 to {_LARGEST_UINT32}, the sum so far")
    if "block_bytes" in given and (
        given["block_bytes"] < 1 or given["block_bytes"] % _PAGE_BYTES != 0
    ):
        _refuse(op, f"block_bytes is {given['block_bytes']}, expected a multiple of {_PAGE_BYTES}")
    if "io" in given and not 0 <= given["io"] <= _LAST_IO_PATH:
        _refuse(op, f"io is {given['io']}, expected 0 (auto), 1 (uring) or 2 (threads)")
    if "slab" in given and (op in _RECORD_OPS or "places" in given):
        slabs = len(given["weights" if op in _RECORD_OPS else "places"])
        if given["slab"] >= slabs:
            _refuse(op, f"slab is {given['slab']}, expected 0 to {slabs - 1}")
    if op in _RECORD_OPS and len(given["state"]) % len(given["weights"]) != 0:
        _refuse(
            op,
            f"state has {len(given['state'])} tensors, expected a multiple of the "
            f"{len(given['weights'])} slabs",
        )
    if op == "end_step_" and given["clock"] is None and given["now"] is not None:
        _refuse(op, f"now is {given['now']} without a clock, which would have it: give both")
    if op == "string_hash":
        _check_string_hash(op, given["hash"], given["seed"])
    if op in _UPDATE_OPS and not 0 <= given["optimizer"] < len(_optimizer_names()):
        _refuse(
            op,
            f"optimizer is {given['optimizer']}, expected 0 to {len(_optimizer_names()) - 1}: a "
            "position in what optimizer_names() returns",
        )
    if op == "prefetch_" and given["ahead"] < 1:
        _refuse(op, f"ahead is {given['ahead']}, expected 1 at least: the steps until the lookup")
    if "format" in given:
        _check_format(op, given)
    if op in ("embedding_inference", "serve_lookup"):
        _check_formats(op, given)
    if "parts" in given and "slots" in given and given["parts"] > given["slots"]:
        _refuse(
            op, f"parts is {given['parts']}, expected at most the number of slots, {given['slots']}"
        )
    if "part" in given and given["part"] >= given["parts"]:
        _refuse(op, f"part is {given['part']}, expected 0 to {given['parts'] - 1}")
    if "dtype" in given and given["dtype"] > _LAST_DTYPE_CODE:
        _refuse(op, f"dtype is {given['dtype']}, expected 0 to {_LAST_DTYPE_CODE}")


def _check_string_hash(op: str, kind: int, seed: int) -> None:
    if not _FARM <= kind <= _MURMUR64A:
        _refuse(
            op,
            f"hash is {kind}, expected 0 (FarmHash), 1 (MurmurHash3) or 2 (MurmurHash64A)",
        )
    if kind == _FARM and seed != 0:
        _refuse(op, f"seed is {seed}, expected 0: FarmHash has none")
    if kind == _MURMUR3 and not 0 <= seed <= _LARGEST_UINT32:
        _refuse(op, f"seed is {seed}, expected 0 to {_LARGEST_UINT32}")


def _check_format(op: str, given: dict[str, Any]) -> None:
    """Check the format of quantized rows or codes."""
    form = given["format"]
    if form not in _ROW_FORMATS:
        _refuse(op, f"format is {form}, expected 1 (int8), 2 (int4) or 3 (fp8)")
    if "rows" in given and given["rows"].dtype not in _FLOAT_ROW_DTYPES:
        _refuse(
            op,
            f"rows has dtype {_dtype_name(given['rows'].dtype)}, expected float32, bfloat16 or "
            "float16",
        )
    name, dim = ("dim", given["dim"]) if "dim" in given else ("rows.size(1)", given["rows"].size(1))
    if dim < 1:
        _refuse(op, f"{name} is {dim}, expected at least 1")
    if form == _INT4 and dim % 2 != 0:
        _refuse(
            op,
            f"{name} is {dim}, but rows of int4 have an even number of columns: take int8 or fp8",
        )


def _check_formats(op: str, given: dict[str, Any]) -> None:
    """Check the formats of slabs, which may have float rows, or belong to live tables."""
    formats, weights = given["formats"], given["weights"]
    if given.get("live", False):
        for slab in weights:
            if slab.dtype != torch.int64:
                _refuse(op, f"weights has dtype {_dtype_name(slab.dtype)}, expected int64")
        return
    if formats and len(formats) != len(weights):
        _refuse(
            op,
            f"formats has {len(formats)} entries, expected as many as weights, {len(weights)}",
        )
    for form, slab in zip(formats, weights, strict=False):
        if form != 0 and form not in _ROW_FORMATS:
            _refuse(
                op,
                f"formats has {form}, expected 0 (rows of floats), 1 (int8), 2 (int4) or 3 (fp8)",
            )
        if form != 0 and slab.dtype != torch.uint8:
            _refuse(op, f"weights has dtype {_dtype_name(slab.dtype)}, expected uint8")


def refuse_size(op: str, arguments: Sequence[Any]) -> None:
    """Raise RuntimeError for the largest number of a call if it makes the result too large.

    Nothing is raised if the call has no large number: then something else is wrong.
    """
    numbers = [
        (value, entry)
        for (name, _, _), given in zip(_argument_types(op), arguments, strict=False)
        for entry, value in _entries(name, given)
        if type(value) is int
    ]
    value, entry = max(numbers, default=(0, ""))
    if value >= _LARGE:
        _refuse(op, f"{entry} is {value}, with which the result is larger than an address space")


def refuse_sparse(op: str) -> Callable[..., NoReturn]:
    """Return a kernel of ``dynemb::op`` that rejects sparse layouts."""

    def refuse(*arguments: Any) -> NoReturn:
        check_arguments(op, arguments)
        _refuse(op, "an argument is a tensor that is not dense: call .to_dense()")

    return refuse
