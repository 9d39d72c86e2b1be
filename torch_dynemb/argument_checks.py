"""Checks of arguments: errors name the argument, the value and what was expected."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

_INT64 = 1 << 63
_LONGEST = 60
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def described(value: object) -> str:
    """Describe a value for an error message: short values by their repr, others by their type."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return f"a tensor of layout {value.layout}"
        return f"a tensor of dtype {value.dtype} and shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # a broken __repr__ must not hide the error
        text = ""
    if not text or len(text) > _LONGEST or "\n" in text:
        return f"a {type(value).__name__}"
    return text


def integer(
    owner: str, value: object, *, least: int = -_INT64, most: int = _INT64 - 1, what: str = "int"
) -> int:
    """Return ``value`` as an int.

    Args:
        owner: function and argument, with which the error begins.
        least, most: the range; default: that of int64.
        what: the expected type, for the message.

    Raises:
        TypeError: ``value`` is not an integer; bool is rejected, too.
        ValueError: it is outside of the range.
    """
    if isinstance(value, bool) or (
        isinstance(value, Tensor)
        and (value.numel() != 1 or value.dtype not in (torch.int64, torch.int32))
    ):
        raise TypeError(f"{owner} is {described(value)}, expected {what}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{owner} is {described(value)}, expected {what}") from None
    if number < least:
        raise ValueError(
            f"{owner} is {number}, expected "
            + ("an int64" if least == -_INT64 else f"at least {least}")
        )
    if number > most:
        raise ValueError(
            f"{owner} is {number}, expected "
            + ("an int64" if most == _INT64 - 1 else f"at most {most}")
        )
    return number


def integers(owner: str, values: object, **bounds: Any) -> list[int]:
    """Return a list of :func:`integer`.

    Raises:
        TypeError, ValueError: ``values`` is not a sequence, or an element is wrong.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{owner} is {described(values)}, expected a sequence of ints")
    return [integer(f"{owner}[{i}]", value, **bounds) for i, value in enumerate(values)]


def table_number(owner: str, names: Sequence[str], table: object) -> int:
    """Return the number of a table that is given by its name or its number.

    Args:
        owner: function, with which the error begins.
        names: of the tables.
        table: the argument.

    Raises:
        TypeError: ``table`` is neither a str nor an int.
        ValueError: no table has this name.
        IndexError: the number is out of range.
    """
    if isinstance(table, str):
        if table not in names:
            raise ValueError(f"{owner}: table is {table!r}, expected one of {list(names)}")
        return names.index(table)
    number = integer(f"{owner}: table", table, what="the name of a table, str, or its number, int")
    if not 0 <= number < len(names):
        raise IndexError(f"{owner}: table is {number}, expected 0 to {len(names) - 1}")
    return number


def refusing_names(module: str, missing: Callable[[str], str]) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module that lacks names of another library.

    Args:
        module: full name of the module.
        missing: returns what to say of a name of the library; "" for names that it has not.
    """

    def __getattr__(name: str) -> NoReturn:  # noqa: N807
        message = missing(name)
        if message:
            # an AttributeError would be replaced by Python in ``from ... import``
            raise ImportError(message, name=module)
        names = getattr(sys.modules[module], "__all__", [])
        raise AttributeError(f"{module} has no attribute {name!r}, expected one of {names}")

    return __getattr__


def number(owner: str, value: object, expected: str = "a number") -> float:
    """Return ``value`` as a float; a tensor of one element gives its value.

    Raises:
        TypeError: ``value`` is not a real number; bool is rejected, too.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{owner} is {described(value)}, expected {expected}")
    try:
        result = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{owner} is {described(value)}, expected {expected}") from None
    except OverflowError:
        return math.inf
    return result


def flag(owner: str, value: object) -> bool:
    """Return ``value``, which must be True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{owner} is {described(value)}, expected True or False")
    return value


def text(owner: str, value: object) -> str:
    """Return ``value``, which must be a str.

    Raises:
        TypeError: it has another type.
    """
    if not isinstance(value, str):
        raise TypeError(f"{owner} is {described(value)}, expected str")
    return value


def duration(owner: str, value: str, expected: str = "a text such as '7d' or '12h'") -> int:
    """Return the seconds in a text.

    Args:
        owner: beginning of the error's message.
        value: a number with the unit s, m, h, d or w.
        expected: end of the message.

    Raises:
        ValueError: it is something else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", value)
    if found is None:
        raise ValueError(f"{owner} is {value!r}, {expected}")
    return int(float(found[1]) * _UNITS[found[2]])


def seconds(owner: str, value: object, **bounds: int) -> int:
    """Return seconds, from an int or a text such as ``"7d"``; see :func:`integer`."""
    expected = "seconds, or a text such as '7d' or '12h'"
    if isinstance(value, str):
        owner, value = f"{owner} {value!r}", duration(owner, value, f"expected {expected}")
    return integer(owner, value, what=expected, **bounds)


def tensor(owner: str, value: object, expected: str = "a Tensor") -> Tensor:
    """Return ``value``, which must be a strided tensor.

    Raises:
        TypeError: it is not a tensor, or sparse or nested.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner} is {described(value)}, expected {expected}")
    if value.layout != torch.strided or value.is_nested:
        kind = "nested tensor" if value.is_nested else f"tensor of layout {value.layout}"
        raise TypeError(f"{owner} is a {kind}, expected a dense one")
    return value


def tensor_on(owner: str, value: Tensor, device: torch.device) -> Tensor:
    """Return ``value``, which must be on the device of the table.

    Raises:
        ValueError: it is on another device.
    """
    if value.device != device:
        raise ValueError(f"{owner} is on {value.device}, but the table is on {device}")
    return value


def flat_int64(owner: str, value: object, device: torch.device) -> Tensor:
    """Return ``value`` (ids or scores) as int64 [n].

    Raises:
        TypeError: it is not a dense int64 tensor.
        ValueError: it is on another device.
    """
    given = tensor(owner, value, "an int64 Tensor")
    if given.dtype != torch.int64:
        raise TypeError(
            f"{owner} has dtype {given.dtype}, expected int64"
            + (": use .long()" if given.dtype == torch.int32 else "")
        )
    return tensor_on(owner, given, device).reshape(-1).contiguous()


def float_rows(owner: str, value: object, device: torch.device) -> Tensor:
    """Return ``value``, which must be a dense tensor of real numbers.

    Raises:
        TypeError: it is something else.
        ValueError: it is on another device.
    """
    given = tensor(owner, value, "a float Tensor")
    if given.dtype == torch.bool or given.is_complex():
        raise TypeError(f"{owner} has dtype {given.dtype}, expected floats")
    return tensor_on(owner, given, device)


__all__ = [
    "described",
    "duration",
    "flag",
    "flat_int64",
    "float_rows",
    "integer",
    "integers",
    "number",
    "refusing_names",
    "table_number",
    "tensor",
    "tensor_on",
    "text",
]
