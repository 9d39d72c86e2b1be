"""The entries of a saved state: checks of its format, and of the kind of each entry."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb.errors import UnsupportedFormatError

_SHOWN = 200  # characters of a given value in errors


# -- format --------------------------------------------------------------------------------------


def read_format(tensors: Mapping[str, Tensor]) -> Any:
    """Decode the entry ``format``.

    Raises:
        ValueError: it is missing, or not a JSON text.
    """
    if "format" not in tensors:
        raise ValueError("state has no entry 'format': it is not one of torch_dynemb's")
    text = tensors["format"]
    check_kind("format", text)
    if text.dtype != torch.uint8 or text.dim() != 1:
        raise ValueError("state entry 'format' is corrupted: expected uint8 of 1 dimension")
    try:
        return json.loads(
            bytes(text.tolist()).decode(),
            object_pairs_hook=_distinct_keys,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"state entry 'format' is corrupted: {error}") from error


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def check_format(
    tensors: Mapping[str, Tensor], version: int, description: Mapping[str, Any]
) -> None:
    """Raise ValueError unless a state has this version and this description of its group."""
    saved = read_format(tensors)
    given = saved.get("version") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or not _same(given, version):
        raise UnsupportedFormatError(
            f"state has format version {str(given)[:_SHOWN]}, but this torch_dynemb reads "
            f"{version}: load it with the version that wrote it"
        )
    for key, expected in description.items():
        if not _same(saved.get(key), expected):
            raise ValueError(
                f"state was saved with {key} = {_shown(saved.get(key))}, but this module has "
                f"{expected!r}: construct it as it was when it was saved"
            )


def _same(given: Any, expected: Any) -> bool:
    """Compare as JSON texts, in which True differs from 1, and 4.0 from 4."""
    return json.dumps(given, sort_keys=True) == json.dumps(expected, sort_keys=True)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# -- kinds and shapes ----------------------------------------------------------------------------


def check_kind(name: str, given: Any) -> None:
    """Raise ValueError unless an entry is a plain tensor with values."""
    if not isinstance(given, Tensor):
        raise ValueError(
            f"state entry {name!r} is a {type(given).__name__}, expected a tensor, as it was saved"
        )
    if given.is_meta:
        raise ValueError(
            f"state entry {name!r} is on the meta device, expected values: load the checkpoint "
            "onto the CPU or a GPU"
        )
    if type(given) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"state entry {name!r} is a {type(given).__name__}, expected a plain tensor: gather "
            "a DTensor (full_tensor()), and convert others to torch.Tensor (as_subclass)"
        )
    if given.layout != torch.strided:
        raise ValueError(
            f"state entry {name!r} has layout {given.layout}, expected a dense tensor: to_dense() "
            "makes one"
        )


def plain_entries(
    expected: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    fixed: Collection[str],
    *,
    empty: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the entries by name; integers in memory of the CPU, as kernels read them.

    Args:
        expected: entries with the dtypes and shapes that ``tensors`` must have.
        fixed: names of entries with a fixed shape; the others may have another length.
        empty: names of entries without values. They may be missing: some writers drop empty
            tensors, which they take for shared ones.

    Raises:
        ValueError: entries are missing, or of another kind, dtype or shape.
    """
    missing = sorted(set(expected) - set(tensors) - set(empty))
    if missing:
        raise ValueError(f"state lacks {missing}")
    plain = {}
    for name, own in expected.items():
        given = tensors[name] if name in tensors else own.new_empty((0, *own.shape[1:]))
        check_kind(name, given)
        skip = 0 if name in fixed else 1
        if (
            given.dtype != own.dtype
            or given.dim() != own.dim()
            or given.shape[skip:] != own.shape[skip:]
        ):
            shape = tuple(own.shape) if name in fixed else ("n", *own.shape[1:])
            raise ValueError(
                f"state entry {name!r} is {given.dtype} {tuple(given.shape)}, expected {own.dtype} "
                f"{shape}"
            )
        whole = given.dtype in (torch.int32, torch.int64)
        plain[name] = given.detach().cpu().resolve_neg().contiguous() if whole else given
    return plain


__all__ = ["check_format", "check_kind", "plain_entries", "read_format"]
