"""What tests of tables that processes share ask of a loaded package."""

from __future__ import annotations

from typing import Literal

import torch
from publishing import INPUTS
from torch import Tensor

from torch_dynemb import serving

U = "bags.u"
Dense = Literal["follow", "keep"]


def pooled(served: serving.ServedModel) -> Tensor:
    return served.run(*INPUTS)[1]["pooled"]


def rows_of(served: serving.ServedModel, ids: Tensor) -> Tensor:
    """Rows of table u: float32 [n, 8]."""
    count = ids.numel()
    given = {"u": (ids, torch.arange(count + 1)), "v": torch.zeros(count, 3, dtype=torch.int64)}
    return served.run(given, torch.zeros(count, 1))[1]["pooled"][:, :8]


def assert_same(served: serving.ServedModel, expected: list[Tensor], *, dense: bool = True) -> None:
    score, others = served.run(*INPUTS)
    assert torch.equal(others["pooled"], expected[1])
    if dense:
        assert torch.equal(score, expected[0])


__all__ = ["Dense", "U", "assert_same", "pooled", "rows_of"]
