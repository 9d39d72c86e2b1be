"""Base class of the ops of a feature engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn


class FeatureOp(nn.Module):
    """Op of a feature engine. A custom op defines :meth:`run`, and optionally the other methods.

    Ops must not change their inputs, and must not keep state between calls.

    Example:
        >>> import torch
        >>> class Shift(FeatureOp):
        ...     def __init__(self, by):
        ...         super().__init__()
        ...         self.by = by
        ...
        ...     def config(self):
        ...         return self.by
        ...
        ...     @classmethod
        ...     def run(cls, ops, inputs):
        ...         return [value + op.by for op, value in zip(ops, inputs)]
        >>> Shift(2)(torch.tensor([1, 5]))
        tensor([3, 7])
    """

    def config(self) -> Hashable:
        """Return the op's settings: ops of one class with equal configs on one input run once.

        Default: the op itself, which no other op equals.
        """
        return self

    def check(self, owner: str, value: Any) -> None:
        """Raise an error that begins with ``owner`` if the op rejects a value.

        Args:
            owner: such as the name of the feature.
            value: any.

        Raises:
            TypeError, ValueError: the op rejects it.
        """

    @classmethod
    def run(cls, ops_: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the results of several ops of this class, in one fused call if possible.

        Args:
            ops_: of this class.
            inputs: one for each op, already checked.

        Returns:
            One result for each op.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(
            f"{cls.__name__} has no run(): a subclass computes its results there"
        )

    def forward(self, value: Any) -> Any:
        """Return the result for one input.

        Args:
            value: input of the op.

        Raises:
            TypeError, ValueError: the op rejects it.
        """
        self.check(type(self).__name__, value)
        return self.run([self], [value])[0]


__all__ = ["FeatureOp"]
