"""Arguments for every op that is timed, taken from calls that other programs make.

Tests have a case for every op (``tests/op_cases``), of some ten ids. small_shapes.py and
feature_ops.py make calls of some thousand ids of most of them. Of all of these an op is timed with
the one of the most ids.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from feature_ops import OURS, Features, contests
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

FEATURES = Features(rows=64, longest=20, features=8)  # some 5000 ids in all
ROOT = Path(__file__).resolve().parents[2]
LARGEST = 64 << 20  # bytes of the arguments of a call: others have reserved memory among them
PREFIX = "dynemb::"
# what the time is divided by: the elements, or of a matrix the rows, of the first of these that an
# op has; and what one of them is called
COUNTED = {
    **dict.fromkeys(("ids", "quotients", "positions", "handles", "pending_handles"), "an id"),
    **dict.fromkeys(("values", "x_values", "dense"), "a value"),
    **dict.fromkeys(("rows", "packed", "records"), "a row"),
    "data": "a byte",
    "slots": "a slot",
    "buckets": "a bucket",
}


@dataclass(frozen=True)
class OpCall:
    """A call that can be repeated.

    Attributes:
        name: of the op, without namespace.
        arguments: by position, of this call alone.
        keywords: by name.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def op(self) -> torch._ops.OpOverload:
        overload: torch._ops.OpOverload = getattr(torch.ops.dynemb, self.name).default
        return overload

    def by_name(self) -> dict[str, Any]:
        """Return the arguments by their names in the schema."""
        names = [argument.name for argument in self.op._schema.arguments]
        return dict(zip(names, self.arguments, strict=False)) | self.keywords

    def counted(self) -> str:
        """Return the argument with the size that divides the time."""
        given = self.by_name()
        for name in COUNTED:
            if name in given:
                return name
        raise KeyError(f"{self.name}: none of its arguments, {sorted(given)}, is in COUNTED")

    def count(self) -> int:
        """Return the number that divides the time; at least 1."""
        counted = tree_leaves(self.by_name()[self.counted()])
        leaves = [leaf for leaf in counted if isinstance(leaf, Tensor)]
        return max(1, sum(len(leaf) if leaf.dim() > 1 else leaf.numel() for leaf in leaves))

    def changed(self) -> list[Tensor]:
        """Return the tensors that the op writes."""
        given = self.by_name()
        written = [
            given[argument.name]
            for argument in self.op._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _bytes_of(values: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


class LargestCalls(TorchDispatchMode):
    """Recorder of the arguments of each op's call with the most ids.

    Args:
        names: of the ops that are wanted.
    """

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, OpCall] = {}
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix(PREFIX)
        if func.namespace == "dynemb" and name in self._names:
            self.offer(OpCall(name, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def offer(self, call: OpCall) -> None:
        """Take a call unless one with as many ids is there."""
        if _bytes_of((call.arguments, call.keywords)) > LARGEST:
            return
        kept = self.calls.get(call.name)
        if kept is None or call.count() > kept.count():
            arguments, keywords = tree_map_only(
                Tensor, lambda t: t.detach().clone(), (call.arguments, call.keywords)
            )
            self.calls[call.name] = OpCall(call.name, tuple(arguments), keywords)


def calls_of(names: set[str]) -> dict[str, OpCall]:
    """Return the call of each op that is timed.

    Args:
        names: of ops that ``tests/op_cases`` has.

    Returns:
        By name, in alphabetical order.
    """
    for folder in (ROOT, ROOT / "tests"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    from op_cases import CASES

    largest = LargestCalls(names)
    with largest:
        for part in _parts_of_small_shapes():
            part()
        for _, build in contests(FEATURES):
            build()[OURS]()
    for name in sorted(names):
        for case in CASES[name].values():
            largest.offer(OpCall(name, tuple(case()), {}))
    return dict(sorted(largest.calls.items()))


def _parts_of_small_shapes() -> Iterator[Any]:
    """Yield programs that make calls; with each optimizer, only those that update rows."""
    from benchmarks.gpu.small_shapes import OPTIMIZERS, TableCalls
    from benchmarks.gpu.value_calls import ValueCalls

    device, results = torch.device("cpu"), dict[str, Tensor]()
    yield from ValueCalls(device, "values", results).parts().values()
    for number, optimizer in enumerate(OPTIMIZERS):
        for name, part in TableCalls(device, optimizer, results).parts().items():
            # tables of policies have no bound, so their tensors are reserved memory
            if name != "policies" and (
                number == 0 or name in ("insertion", "pooled", "split_update")
            ):
                yield part
