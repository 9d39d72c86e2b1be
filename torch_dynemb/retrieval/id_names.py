"""Strings of ids that :func:`torch_dynemb.hash_strings` has made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.ops.string_ids import chosen_strings


class IdNames:
    """A bounded map from ids back to the strings that they come from.

    Lookups need no strings, so training is as fast without the map. Rows that users see, exports
    and debugging need them. The map belongs to one process, and lies in memory: some 150 bytes a
    name.

    Args:
        capacity: most names to keep; a new one then replaces the one added longest ago. None: all.

    Attributes:
        collisions: how often :meth:`add` found an id with another string than before. The first
            string stays.

    Raises:
        ValueError: capacity is below 1.

    Example:
        >>> import torch_dynemb as td
        >>> names = td.IdNames(capacity=1000)
        >>> words = ["foo", "bar", "foo", None]
        >>> ids = td.hash_strings(words, null=0)
        >>> names.add(ids, words)
        >>> names.of(ids[1:]), len(names)
        (['bar', 'foo', None], 2)
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None:
            capacity = integer("IdNames: capacity", capacity, least=1)
        self.capacity = capacity
        self.collisions = 0
        self._names: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"IdNames({len(self)} names, capacity={self.capacity})"

    def add(self, ids: Tensor, values: Any) -> None:
        """Remember the strings of ids. Each distinct id costs about a microsecond.

        Args:
            ids: int64 [n]; or of the shape of ``values``, if that is a numpy array.
            values: the n strings, of any kind that :func:`torch_dynemb.hash_strings` takes. Nulls
                are skipped, and bytes decoded as UTF-8.

        Raises:
            TypeError, ValueError: ids or values have another type or length.
        """
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            raise TypeError(f"IdNames.add: ids is {described(ids)}, expected an int64 tensor")
        distinct, inverse = ids.reshape(-1).cpu().unique(return_inverse=True)
        first = torch.full_like(distinct, ids.numel())
        first.scatter_reduce_(0, inverse, torch.arange(ids.numel(), device="cpu"), "amin")
        strings = chosen_strings("IdNames.add: values", values, first, ids.numel())
        for id, string in zip(distinct.tolist(), strings, strict=True):
            if string is None:
                continue
            known = self._names.setdefault(id, string)
            self._names.move_to_end(id)
            self.collisions += known != string
        while self.capacity is not None and len(self._names) > self.capacity:
            self._names.popitem(last=False)

    def of(self, ids: Tensor) -> Any:
        """Return the strings of ids, None where there is none: a list, nested as ``ids.tolist()``.

        Args:
            ids: integers of any shape, such as the ids of :func:`torch_dynemb.top_k`.

        Raises:
            TypeError: ids is not a tensor of integers.
        """
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            raise TypeError(f"IdNames.of: ids is {described(ids)}, expected a tensor of integers")
        return _named(ids.tolist(), self._names)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the names as tensors: give them to ``td.checkpoint.save(state=...)``.

        Returns:
            ``ids`` int64 [n], in the order in which they were added; ``letters`` uint8, their
            strings in UTF-8; ``offsets`` int64 [n + 1], where strings begin; ``collisions`` int64.
        """
        encoded = [name.encode("utf-8", "surrogatepass") for name in self._names.values()]
        lengths = torch.tensor([0, *map(len, encoded)], dtype=torch.int64, device="cpu")
        letters = bytearray(b"".join(encoded))
        return {
            "ids": torch.tensor(list(self._names), dtype=torch.int64, device="cpu"),
            "letters": torch.frombuffer(letters, dtype=torch.uint8)
            if letters
            else torch.empty(0, dtype=torch.uint8, device="cpu"),
            "offsets": lengths.cumsum(0),
            "collisions": torch.tensor(self.collisions, device="cpu"),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the names by those of :meth:`state_dict`; of too many, the newest.

        Args:
            state: as :meth:`state_dict` returned it.

        Raises:
            KeyError, ValueError: the state is incomplete or damaged; nothing changes.
        """
        ids, offsets = state["ids"].tolist(), state["offsets"].tolist()
        letters = state["letters"].cpu().numpy().tobytes()
        places = pairwise([0, *offsets, len(letters)])
        if len(offsets) != len(ids) + 1 or any(begin > end for begin, end in places):
            raise ValueError(
                f"IdNames.load_state_dict: state has {len(ids)} ids, {len(letters)} letters and "
                "offsets that do not fit them, expected what state_dict() returned"
            )
        names = OrderedDict(
            (id, letters[begin:end].decode("utf-8", "surrogatepass"))
            for id, (begin, end) in zip(ids, pairwise(offsets), strict=True)
        )
        collisions = int(state["collisions"])
        while self.capacity is not None and len(names) > self.capacity:
            names.popitem(last=False)
        self._names, self.collisions = names, collisions


def _named(ids: Any, names: Mapping[int, str]) -> Any:
    return [_named(id, names) for id in ids] if isinstance(ids, list) else names.get(ids)


__all__ = ["IdNames"]
