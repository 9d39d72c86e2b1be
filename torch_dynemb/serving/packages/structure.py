"""Structure of the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree as pytree

# appends the leaves of a value to a list; False: the value may be put together in another way
Reader: TypeAlias = Callable[[Any, list[Any]], bool]
_LEAVES = (Tensor, int, float, bool, str, type(None))


class Structure:
    """Dicts, lists, tuples and other containers around the leaves of a model's inputs.

    pytree builds a description of each input and compares it, which takes longer than a lookup of
    few ids. Tensors in dicts, lists and tuples are read without it.

    Args:
        spec: of the exported program: positional inputs, then those by name, of which there are
            none.
    """

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self._spec = spec
        self._read = _reader(spec.child(0))

    def leaves(self, inputs: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of positional inputs, in the order of the exported program.

        Raises:
            TypeError: the inputs have another structure.
        """
        read: list[Any] = []
        if self._read is not None and self._read(inputs, read):
            return read
        leaves, found = pytree.tree_flatten((inputs, {}))
        if found == self._spec:
            return leaves
        try:
            return self._spec.flatten_up_to((inputs, {}))  # also if a dict has another order
        except (KeyError, ValueError) as error:
            raise TypeError(
                f"run: the inputs are put together as {found}, but the model was exported with "
                f"{self._spec}: {error}"
            ) from error


def _reader(spec: pytree.TreeSpec) -> Reader | None:
    """Make the reader of a structure; None: it has containers of other kinds."""
    if spec.is_leaf():
        return _read_leaf
    if spec.type not in (dict, list, tuple):
        return None
    readers = [_reader(child) for child in spec.children()]
    known = [reader for reader in readers if reader is not None]
    if len(known) < len(readers):
        return None
    kind, size = spec.type, len(known)
    keys = spec.context if kind is dict else range(size)
    items = list(zip(keys, known, strict=True))

    def read(value: Any, leaves: list[Any]) -> bool:
        if type(value) is not kind or len(value) != size:
            return False
        for key, reader in items:
            if kind is dict and key not in value:
                return False
            if not reader(value[key], leaves):
                return False
        return True

    return read


def _read_leaf(value: Any, leaves: list[Any]) -> bool:
    leaves.append(value)
    return type(value) in _LEAVES


__all__ = ["Structure"]
