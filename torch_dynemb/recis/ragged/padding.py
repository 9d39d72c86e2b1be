"""Padding of ragged rows to equal length: the length, and a check of memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_dynemb import ops

_CHECKED_BYTES = 256 << 20  # smaller results are not checked: the query is slow


def padded_sizes(lengths: int | Sequence[int] | None, longest: Sequence[int]) -> list[int]:
    """Return the sizes of the ragged dimensions of a padded tensor.

    Args:
        lengths: of all of them, of the innermost, or None: the longest rows'.
        longest: the longest row of each.

    Raises:
        ValueError: a row is longer, or the number of lengths is not that of dimensions.
    """
    sizes = list(longest)
    if isinstance(lengths, int):
        sizes[-1] = lengths
    elif lengths is not None:
        sizes = list(lengths)
    if len(sizes) != len(longest) or any(a < b for a, b in zip(sizes, longest, strict=True)):
        raise ValueError(
            f"pad: lengths is {lengths}, expected at least {list(longest)}, the longest rows"
        )
    return sizes


def check_padded_size(
    lengths: int | Sequence[int] | None,
    rows: int,
    total: int,
    values: Tensor,
    weight: Tensor | None,
) -> None:
    """Raise ValueError if a result of so many values exceeds the available memory.

    Args:
        lengths: the argument that the error names.
        rows: of the outermost dimension.
        total: number of values of the result.
        values: before padding.
        weight: of the values.
    """
    bytes_of_one = values.element_size() + (0 if weight is None else weight.element_size())
    room = 2 * total * bytes_of_one  # index_put makes a copy
    if values.device.type != "cpu" or type(room) is not int or room < _CHECKED_BYTES:
        return  # torch raises on a GPU; a traced size is unknown
    available = ops.available_memory()
    if room > available:
        raise ValueError(
            f"pad: lengths is {lengths}, with which {rows} rows take {room} bytes, but "
            f"only {available} bytes of memory are available"
        )


__all__ = ["check_padded_size", "padded_sizes"]
