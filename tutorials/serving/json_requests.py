"""The tensors of a JSON request: nested lists, of which each is taken as it is or refused by name.

``json_tensors.h`` reads them by the same rules, in the same words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

import torch_dynemb as td


def parsed(body: bytes) -> Any:
    """Return the content of a JSON text (RFC 8259).

    Raises:
        ValueError: it is not JSON in UTF-8, or has a key twice in an object.
        RecursionError: it is too deep.
    """
    try:
        text = body.decode()
        content = json.loads(text, parse_constant=_no_number, object_pairs_hook=_fields)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # an escape may be half of a letter
    except UnicodeError as error:
        raise ValueError(f"JSON: expected UTF-8: {error.reason}") from None
    return content


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"JSON: expected a value, not {word}")


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"JSON: an object has '{twice}' twice")
    return fields


def fields_of(content: object, known: Sequence[str], owner: str) -> Mapping[str, Any]:
    """Return an object of a request.

    Args:
        content: what should be one.
        known: the keys that it may have.
        owner: prefix of error messages.

    Raises:
        ValueError: it is something else, or has other keys.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{owner}: expected an object")
    others = [key for key in content if key not in known]
    if others:
        raise ValueError(f"{owner} has '{others[0]}', expected one of {list(known)}")
    return content


def tensor_of(values: object, dtype: torch.dtype, sizes: Sequence[int], field: str) -> Tensor:
    """Return a tensor of nested lists.

    Args:
        values: numbers, or lists of them, all as deep.
        dtype: of the tensor. Integers are written as whole numbers, bools as ``true`` and
            ``false``.
        sizes: of the dimensions; an empty list does not tell those in it.
        field: prefix of error messages.

    Raises:
        ValueError: the lists are not tensors of such numbers.
    """
    shape: list[int] = []
    level = [values]
    while level and all(isinstance(of, list) for of in level):
        lengths = {len(of) for of in level}  # type: ignore[arg-type]
        if len(lengths) > 1:
            raise ValueError(f"{field}: lists of a tensor differ in length")
        shape += lengths
        level = [value for of in level for value in of]  # type: ignore[attr-defined]
    if any(isinstance(value, list) for value in level):
        raise ValueError(f"{field}: lists of a tensor differ in depth")
    if not level:
        shape += sizes[len(shape) :]
    _check_kinds(level, dtype, field)
    if dtype.is_floating_point:
        tensor = _floats(level, dtype, field)
    else:
        tensor = torch.tensor(level, dtype=dtype)
    return tensor.reshape(shape)


def _floats(values: Sequence[object], dtype: torch.dtype, field: str) -> Tensor:
    try:
        tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    except OverflowError:  # an integer that no float holds
        tensor = torch.tensor(torch.inf)
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{field}: a number is too large for its dtype")
    return tensor


def _check_kinds(values: Sequence[Any], dtype: torch.dtype, field: str) -> None:
    if dtype == torch.bool:
        if not {type(value) for value in values} <= {bool}:
            raise ValueError(f"{field}: expected true or false")
    elif dtype.is_floating_point:
        if not {type(value) for value in values} <= {int, float}:
            raise ValueError(f"{field}: expected a number")
    else:
        if not {type(value) for value in values} <= {int}:
            raise ValueError(f"{field}: expected a whole number of 64 bits")
        limits = torch.iinfo(dtype)
        if values and not (limits.min <= min(values) and max(values) <= limits.max):
            raise ValueError(f"{field}: expected a whole number of {limits.bits} bits")


def check_finite(tensor: Tensor, field: str) -> None:
    """Raise ValueError for NaN and the infinite numbers, which JSON lacks."""
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(
            f"{field}: it has a number that JSON lacks, NaN or infinite: ask for binary_data by "
            "the Open Inference Protocol"
        )


def inputs_of(content: object, model: td.serving.ServedModel) -> list[Any]:
    """Return what a run of a model is given.

    Args:
        content: the request, ``{"inputs": {name: nested lists}}``.
        model: what takes them. Inputs that are not tensors are compiled in.

    Raises:
        ValueError: an input is missing, unknown, or no tensor of its dtype.
    """
    request = fields_of(content, ["inputs"], "the request")
    names = [given.name for given in model.inputs if given.dtype is not None]
    inputs = fields_of(request.get("inputs"), names, "inputs")
    missing = [name for name in names if name not in inputs]
    if missing:
        raise ValueError(f"inputs lacks '{missing[0]}'")
    return [
        given.value
        if given.dtype is None
        else tensor_of(
            inputs[given.name],
            given.dtype,
            [0 if size is None else size.plus for size in given.sizes],
            f"inputs.{given.name}",
        )
        for given in model.inputs
    ]


def update_of(content: object, model: td.serving.ServedModel) -> tuple[str, Tensor, Tensor, Tensor]:
    """Return the table, ids, rows and erased ids of an update.

    Raises:
        ValueError: a field is missing, unknown, or has something else in it.
    """
    request = fields_of(content, ["table", "ids", "rows", "erased"], "the request")
    name = request.get("table")
    if not isinstance(name, str):
        raise ValueError("table: expected a string")
    table = model.tables.get(name)
    dim = 0 if table is None else table.embedding_dim
    return (
        name,
        tensor_of(request.get("ids", []), torch.int64, [0], "ids"),
        tensor_of(request.get("rows", []), torch.float32, [0, dim], "rows"),
        tensor_of(request.get("erased", []), torch.int64, [0], "erased"),
    )
