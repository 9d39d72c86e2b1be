"""pool_rows against nn.functional.embedding_bag and against torch's ops that run on a GPU."""

from __future__ import annotations

import pytest
import torch
from execution import simd
from torch import Tensor
from torch.nn import functional as F

from torch_dynemb import ops
from torch_dynemb.ops.pooling import torch_pool_rows, torch_pool_rows_grad


def arguments(features: int, batch: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 5, (features * batch,), generator=generator)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    return torch.randint(rows, (int(offsets[-1]),), generator=generator), offsets


@pytest.mark.parametrize("level", range(ops.simd_level() + 1))
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [1, 12, 64, 100])
@pytest.mark.parametrize(("features", "batch"), [(3, 700), (1, 1), (2, 0)])
def test_as_embedding_bag(features: int, batch: int, dim: int, threads: int, level: int) -> None:
    positions, offsets = arguments(features, batch, rows=90)
    rows = torch.randn(90, dim, requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with simd(level):
            pooled = ops.pool_rows(rows, positions, offsets, features=features)
            grad = torch.randn(pooled.shape)
            pooled.backward(grad)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(pooled, torch_pool_rows(rows, positions, offsets, features))
    assert rows.grad is not None
    torch.testing.assert_close(
        rows.grad, torch_pool_rows_grad(grad, positions, offsets, features, 90)
    )
    bags = F.embedding_bag(positions, rows, offsets, mode="sum", include_last_offset=True)
    expected = bags.view(features, batch, dim).transpose(0, 1).reshape(batch, features * dim)
    (of_rows,) = torch.autograd.grad(expected, rows, grad)
    torch.testing.assert_close(pooled, expected)
    torch.testing.assert_close(rows.grad, of_rows)


ROWS, POSITIONS, OFFSETS = torch.zeros(3, 4), torch.tensor([2, 0]), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": ROWS.double()}, "rows has dtype float64, expected float32"),
        ({"rows": ROWS[0]}, "rows has 1 dimensions, expected 2"),
        ({"positions": torch.tensor([3, 0])}, "positions has 3, expected 0 to 2"),
        ({"positions": torch.tensor([0, -1])}, "positions has -1, expected 0 to 2"),
        ({"offsets": torch.tensor([1, 1, 2])}, r"offsets\[0\] is 1, expected 0"),
        ({"offsets": torch.tensor([0, 1, 1])}, "the last offset is 1, expected the number of pos"),
        ({"offsets": torch.tensor([0, 3, 2])}, r"offsets\[2\] is 2, less than offsets\[1\] = 3"),
        ({"offsets": torch.tensor([0]), "positions": POSITIONS[:0]}, None),
        ({"features": 0}, "features is 0, expected at least 1"),
        ({"features": 3}, "offsets has 3 elements, expected one more than a multiple of features"),
    ],
)
def test_errors(changed: dict[str, Tensor | int], message: str | None) -> None:
    given = {"rows": ROWS, "positions": POSITIONS, "offsets": OFFSETS, "features": 2} | changed
    if message is None:
        assert ops.pool_rows(**given).shape == (0, 8)
        return
    with pytest.raises(RuntimeError, match=message):
        ops.pool_rows(**given)


def test_grad_of_another_shape() -> None:
    for grad, message in (
        (torch.zeros(2, 8), "grad.size.0. is 2, expected 1"),
        (torch.zeros(1, 7), "grad has 7 columns, expected a multiple of features, 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.dynemb.pool_rows_grad(grad, POSITIONS, OFFSETS, 2, 3)
