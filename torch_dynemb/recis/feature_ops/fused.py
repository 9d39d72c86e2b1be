"""RecIS's fused ops: several ops of one class in one call, without a FeatureEngine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch_dynemb.recis.arguments import entries
from torch_dynemb.recis.feature_ops.bucketize import Bucketize
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.hash import Hash, IDMultiHash, StringMultiHash
from torch_dynemb.recis.feature_ops.mod import Mod
from torch_dynemb.recis.feature_ops.truncate import SequenceTruncate


class FusedOP:
    """Base of the fused ops: op i gets input i.

    Args:
        ops: of the fused class; :meth:`add_op` adds more.

    Raises:
        TypeError: an op has another class.

    Example:
        >>> import torch
        >>> FusedModOP([Mod(10), Mod(7)])([torch.tensor([12]), torch.tensor([9, 14])])
        [tensor([2]), tensor([2, 0])]
    """

    kind: ClassVar[type[FeatureOp]] = FeatureOp

    def __init__(self, ops: Sequence[FeatureOp] | None = None) -> None:
        self._ops: list[FeatureOp] = []
        owner = f"{type(self).__name__}: ops"
        for op in () if ops is None else entries(owner, ops, f"a list of {self.kind.__name__}"):
            self.add_op(op)

    def add_op(self, op: FeatureOp) -> None:
        """Append an op.

        Args:
            op: of the fused class.

        Raises:
            TypeError: ``op`` has another class.
        """
        if not isinstance(op, self.kind):
            raise TypeError(
                f"{type(self).__name__}.add_op: op is a {type(op).__name__}, expected a "
                f"{self.kind.__name__}"
            )
        self._ops.append(op)

    def process(self, inputs: Sequence[Any]) -> list[Any]:
        """Return one result for each op.

        Args:
            inputs: Tensors or RaggedTensors, one for each op.

        Raises:
            ValueError: the number of inputs is not that of ops.
            TypeError, ValueError: an op rejects its input.
        """
        owner = type(self).__name__
        if len(inputs) != len(self._ops):
            raise ValueError(
                f"{owner}: inputs has {len(inputs)} entries, expected one for each of "
                f"{len(self._ops)} ops"
            )
        for place, (op, value) in enumerate(zip(self._ops, inputs, strict=True)):
            op.check(f"{owner}: inputs[{place}]", value)
        return list(self.kind.run(self._ops, inputs)) if self._ops else []

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Call :meth:`process`."""
        return self.process(inputs)


class FusedBoundaryOP(FusedOP):
    """Several :class:`Bucketize`."""

    kind = Bucketize


class FusedModOP(FusedOP):
    """Several :class:`Mod`."""

    kind = Mod


class FusedHashOP(FusedOP):
    """Several :class:`Hash`."""

    kind = Hash


class FusedCutoffOP(FusedOP):
    """Several :class:`SequenceTruncate`."""

    kind = SequenceTruncate


class FusedMultiHashOP(FusedOP):
    """Several :class:`IDMultiHash`."""

    kind = IDMultiHash


class FusedStringMultiHashOP(FusedOP):
    """Several :class:`StringMultiHash`."""

    kind = StringMultiHash


__all__ = [
    "FusedBoundaryOP",
    "FusedCutoffOP",
    "FusedHashOP",
    "FusedModOP",
    "FusedMultiHashOP",
    "FusedOP",
    "FusedStringMultiHashOP",
]
