"""Op that takes remainders of ids."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.values import (
    INTEGERS,
    Value,
    check_dtype,
    flat_values,
    with_values,
)


class Mod(FeatureOp):
    """Ids modulo a number, as unsigned 64-bit numbers; int64.

    Args:
        mod_value: at least 1.

    Raises:
        TypeError: ``mod_value`` is not an int.
        ValueError: ``mod_value`` is less than 1, or exceeds int64.
    """

    def __init__(self, mod_value: int) -> None:
        super().__init__()
        self.mod_value = integer("Mod: mod_value", mod_value, least=1)

    def config(self) -> Hashable:
        return self.mod_value

    def check(self, owner: str, value: Any) -> None:
        check_dtype(f"{owner}: Mod", value, INTEGERS)

    @classmethod
    def run(cls, ops_: Sequence[Mod], inputs: Sequence[Value]) -> list[Value]:
        ids = [flat_values(value).to(torch.int64) for value in inputs]
        results = ops.mod(ids, [op.mod_value for op in ops_])
        return [with_values(v, result) for v, result in zip(inputs, results, strict=True)]


__all__ = ["Mod"]
