"""Op that marks values to leave out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, number, text
from torch_dynemb.recis.arguments import entries
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.values import INTEGERS, Value, check_dtype, flat_values
from torch_dynemb.recis.functional.string_ops import fused_number_mask, fused_string_mask
from torch_dynemb.recis.ragged.tensor import RaggedTensor

_NUMBERS = (torch.float32, torch.float64, *INTEGERS)
_BYTES = (torch.int8, torch.uint8)


class Mask(FeatureOp):
    """0 for values of a list, 1 for others, as float32: such as weights of ids.

    Numbers of a RaggedTensor give [n], those of a tensor its shape. Strings are the innermost rows
    of a RaggedTensor of int8 or uint8, and give [strings].

    Args:
        masks: numbers; or strings, compared as UTF-8. A float value equals a number that is rounded
            to its dtype, an integer only the same integer.
        dtype: ``torch.int8`` for strings, else that of numbers: float32, float64, int32 or int64.

    Raises:
        TypeError: ``masks`` is not a list of strings, or of numbers.
        ValueError: another dtype.

    Example:
        >>> Mask([0, -1], torch.int64)(torch.tensor([7, 0, -1]))
        tensor([1., 0., 0.])
    """

    def __init__(
        self, masks: Sequence[str] | Sequence[float], dtype: torch.dtype = torch.int8
    ) -> None:
        super().__init__()
        if dtype not in (torch.int8, *_NUMBERS):
            raise ValueError(
                f"Mask: dtype is {described(dtype)}, expected torch.int8 for strings, or one of "
                f"{list(_NUMBERS)}"
            )
        owner = "Mask: masks"
        given = entries(owner, masks, "a list of strings" if dtype == torch.int8 else "numbers")
        for i, value in enumerate(given):
            check: Any = text if dtype == torch.int8 else number
            check(f"{owner}[{i}]", value)
        self.masks, self.dtype = given, dtype

    def config(self) -> Hashable:
        return tuple(self.masks), self.dtype

    def check(self, owner: str, value: Any) -> None:
        owner = f"{owner}: Mask"
        if self.dtype != torch.int8:
            check_dtype(owner, value, (self.dtype,))
            return
        if not isinstance(value, RaggedTensor):
            raise TypeError(f"{owner} got a {type(value).__name__}, expected a RaggedTensor")
        check_dtype(owner, value, _BYTES)

    @classmethod
    def run(cls, ops_: Sequence[Mask], inputs: Sequence[Value]) -> list[Tensor]:
        results: list[Tensor] = []
        for op, value in zip(ops_, inputs, strict=True):
            values = [flat_values(value)]
            if isinstance(value, RaggedTensor) and op.dtype == torch.int8:
                results += fused_string_mask(values, value.offsets()[-1:], [op.masks])
            else:
                results += fused_number_mask(values, [op.masks])
        return results


__all__ = ["Mask"]
