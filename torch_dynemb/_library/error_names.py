"""Names of tables and features in errors of ops; ops only know their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_dynemb.errors import DynembError

_NUMBER = re.compile(r"\btable (\d+)\b")
_PLACE = re.compile(r" \(csrc/[^()]*\)$")
_OFFSET = re.compile(r"\boffsets\[(\d+)\]")
_MOST_NAMED = 5

_names: MutableMapping[Tensor, list[str]] = WeakIdKeyDictionary()


def know_names(meta: Tensor, names: Sequence[str]) -> None:
    """Store the names of tables for as long as their tensor lives.

    Args:
        meta: the tensor of constants, an argument of all ops on the tables.
        names: in the order of their numbers.
    """
    _names[meta] = list(names)


def known_names(meta: Tensor) -> list[str] | None:
    """Return the names that :func:`know_names` stored for a tensor, or None."""
    return _names.get(meta)


def name_tables_of(error: RuntimeError, arguments: Sequence[object]) -> None:
    """Apply :func:`name_tables` to an op's error if the names of its tables are stored.

    Args:
        error: the op's error.
        arguments: of the op: tensors, and records of them with a ``meta`` or ``rows.meta``.
    """
    for meta in _constants(arguments):
        names = _names.get(meta)
        if names is not None:
            name_tables(error, names)
            return


def named(error: RuntimeError, arguments: Sequence[object]) -> RuntimeError:
    """Return an op's error after :func:`name_tables_of`.

    Args:
        error: the op's error.
        arguments: of the op.
    """
    name_tables_of(error, arguments)
    return error


def name_tables(error: RuntimeError, names: Sequence[str]) -> None:
    """Replace the numbers of tables in a message by names, or append the names.

    Args:
        error: the op's error. Its message changes unless it has a name already. A
            :class:`DynembError` gets ``tables``, too.
        names: of the tables of the call, in the order of their numbers.
    """
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    message, *rest = error.args[0].split("\n", 1)
    if not names or any(repr(name) in message for name in names):
        return

    numbers = dict.fromkeys(int(number[1]) for number in _NUMBER.finditer(message))
    if isinstance(error, DynembError):
        about = [names[table] for table in numbers if table < len(names)]
        error.tables = tuple(about or names)

    def with_name(number: re.Match[str]) -> str:
        table = int(number[1])
        return f"table {names[table]!r}" if table < len(names) else number[0]

    says, count = _NUMBER.subn(with_name, message)
    if count == 0:
        place = _PLACE.search(message)
        end = len(message) if place is None else place.start()
        says = f"{message[:end]}; {_list(names)}{message[end:]}"
    error.args = ("\n".join([says, *rest]),)


def name_feature(error: RuntimeError, features: Sequence[str], bags: int) -> None:
    """Add the feature's name to an error about an offset that counts over all features.

    Args:
        error: the op's error, unchanged if it has a name already.
        features: their names, in the order of their bags.
        bags: of all features.
    """
    if len(error.args) != 1 or not isinstance(error.args[0], str) or bags < len(features):
        return
    message = error.args[0]
    found = _OFFSET.search(message)
    if found is None or message.startswith(", of feature", found.end()):
        return
    bag = max(int(found[1]) - 1, 0)  # the bag that ends at this offset
    name = features[min(bag // (bags // len(features)), len(features) - 1)]
    error.args = (f"{message[: found.end()]}, of feature {name!r},{message[found.end() :]}",)


def _list(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"table {names[0]!r}"
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return f"tables {', '.join(map(repr, names[:_MOST_NAMED]))}{more}"


def _constants(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        for record in (argument, getattr(argument, "rows", None)):
            meta = getattr(record, "meta", None)
            if isinstance(meta, Tensor):
                yield meta


__all__ = ["know_names", "known_names", "name_feature", "name_tables", "name_tables_of", "named"]
