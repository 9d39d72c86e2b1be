"""The base of the ops of a feature engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn


class FeatureOp(nn.Module):
    """An op of features. One of your own has :meth:`run`, and what else it needs of these.

    Ops neither change their inputs nor keep anything of a call.

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
        """Ops of one class with equal configs, on one input, are computed once.

        Default: the op itself, so that it is shared with no other.
        """
        return self

    def check(self, owner: str, value: Any) -> None:
        """Raises an error that begins with ``owner`` for a value that the op cannot take.

        Args:
            owner: such as the name of the feature.
            value: any.

        Raises:
            TypeError, ValueError: the op cannot take it.
        """

    @classmethod
    def run(cls, ops_: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of several ops of this class, each for its input: where calls are fused.

        Args:
            ops_: of this class.
            inputs: as many, each checked by its op.

        Returns:
            As many results.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(
            f"{cls.__name__} has no run(): a subclass computes its results there"
        )

    def forward(self, value: Any) -> Any:
        """The result for one input.

        Args:
            value: what the op takes.

        Raises:
            TypeError, ValueError: it is nothing for the op.
        """
        self.check(type(self).__name__, value)
        return self.run([self], [value])[0]


__all__ = ["FeatureOp"]
