"""pool_rows and ragged_tile against torch's ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from execution import simd
from torch import Tensor
from torch.nn import functional as F

from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")


def arguments(features: int, batch: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 5, (features * batch,), generator=generator)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    return torch.randint(rows, (int(offsets[-1]),), generator=generator), offsets


def bags_of(offsets: Tensor) -> Tensor:
    """The bag of every position."""
    return torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())


def reference_pool(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    *,
    features: int,
    weights: Tensor | None,
    pooling: Pooling,
) -> Tensor:
    bags, bag = len(offsets) - 1, bags_of(offsets)
    factors = torch.ones(len(positions)) if weights is None else weights
    sums = rows.new_zeros((bags, rows.shape[1]))
    sums = sums.index_add(0, bag, factors[:, None] * rows[positions])
    if pooling == Pooling.MEAN:
        total = torch.zeros(bags).index_add(0, bag, factors)
        sums = torch.where(total[:, None] == 0, 0.0, sums / total[:, None])
    by_feature = sums.view(features, bags // features, rows.shape[1])
    return by_feature.transpose(0, 1).reshape(bags // features, features * rows.shape[1])


def reference_tile(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    *,
    features: int,
    tile_lens: list[int],
    pad_left: list[bool],
    weights: Tensor | None,
) -> list[Tensor]:
    factors = torch.ones(len(positions)) if weights is None else weights
    taken = factors[:, None] * rows[positions]
    batch = (len(offsets) - 1) // features
    result = []
    for f, (tile_len, left) in enumerate(zip(tile_lens, pad_left, strict=True)):
        tiles = []
        for b in range(batch):
            begin, end = offsets[f * batch + b : f * batch + b + 2].tolist()
            some = taken[begin : min(end, begin + tile_len)]
            missing = tile_len - len(some)
            tiles.append(F.pad(some, (0, 0, missing, 0) if left else (0, 0, 0, missing)).flatten())
        empty = rows.new_zeros((0, tile_len * rows.shape[1]))
        result.append(torch.stack(tiles) if tiles else empty)
    return result


def gradients_of(outputs: list[Tensor], grads: list[Tensor], *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, inputs, grads, allow_unused=False))


def with_threads(count: int, level: int, call: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with simd(level):
            return call()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("level", range(ops.simd_level() + 1))
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [1, 12, 64, 100])
@pytest.mark.parametrize(("features", "batch"), [(3, 700), (1, 1), (2, 0)])
@pytest.mark.parametrize("kind", ["plain", "mean", "weighted", "weighted mean"])
def test_as_the_reference(
    kind: str, features: int, batch: int, dim: int, threads: int, level: int
) -> None:
    positions, offsets = arguments(features, batch, rows=90)
    rows = torch.randn(90, dim, requires_grad=True)
    weights = None
    if kind.startswith("weighted"):
        weights = torch.rand(len(positions)).add(0.1).requires_grad_()
    pooling = Pooling.MEAN if kind.endswith("mean") else Pooling.SUM
    given: dict[str, Any] = {"features": features, "weights": weights, "pooling": pooling}
    inputs = [rows] if weights is None else [rows, weights]

    def call() -> tuple[Tensor, Tensor, list[Tensor]]:
        pooled = ops.pool_rows(rows, positions, offsets, **given)
        grad = torch.randn(pooled.shape)
        return pooled, grad, gradients_of([pooled], [grad], *inputs)

    pooled, grad, gradients = with_threads(threads, level, call)
    expected = reference_pool(rows, positions, offsets, **given)
    torch.testing.assert_close(pooled, expected)
    of_reference = gradients_of([expected], [grad], *inputs)
    for ours, other in zip(gradients, of_reference, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_as_embedding_bag() -> None:
    positions, offsets = arguments(3, 50, rows=90)
    rows = torch.randn(90, 16)
    bags = F.embedding_bag(positions, rows, offsets, mode="mean", include_last_offset=True)
    pooled = ops.pool_rows(rows, positions, offsets, features=3, pooling=Pooling.MEAN)
    torch.testing.assert_close(pooled, bags.view(3, 50, 16).transpose(0, 1).reshape(50, 48))


def test_a_mean_of_weights_that_sum_to_a_subnormal_number() -> None:
    rows = torch.tensor([[0.5, -1.0, 2.0], [4.0, 1.0, -0.25]], requires_grad=True)
    weights = torch.tensor([1e-40, 3e-40], requires_grad=True)
    pooled = ops.pool_rows(
        rows,
        torch.tensor([0, 1]),
        torch.tensor([0, 2]),
        features=1,
        weights=weights,
        pooling=Pooling.MEAN,
    )
    shares = weights.detach().double() / weights.detach().double().sum()
    wanted = (shares[:, None] * rows.detach()).sum(0, keepdim=True)
    torch.testing.assert_close(pooled.double(), wanted, rtol=1e-3, atol=1e-3)
    pooled.sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(rows.grad.double(), shares[:, None].expand(2, 3))
    assert not weights.grad.isnan().any()


def test_a_mean_of_weights_that_sum_to_zero() -> None:
    rows = torch.randn(2, 3, requires_grad=True)
    weights = torch.tensor([1.0, -1.0, 0.0], requires_grad=True)
    pooled = ops.pool_rows(
        rows,
        torch.tensor([0, 1, 1]),
        torch.tensor([0, 2, 3, 3]),
        features=1,
        weights=weights,
        pooling=Pooling.MEAN,
    )
    assert pooled.tolist() == [[0.0] * 3] * 3
    pooled.sum().backward()
    for tensor in (rows, weights):
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [1, 12, 40])
@pytest.mark.parametrize(("features", "batch"), [(3, 30), (1, 1), (2, 0)])
@pytest.mark.parametrize("weighted", [False, True])
def test_tiles(weighted: bool, features: int, batch: int, dim: int, threads: int) -> None:
    positions, offsets = arguments(features, batch, rows=20)
    rows = torch.randn(20, dim, requires_grad=True)
    weights = torch.rand(len(positions)).requires_grad_() if weighted else None
    given: dict[str, Any] = {
        "features": features,
        "tile_lens": [3, 1, 7][:features],
        "pad_left": [False, True, True][:features],
        "weights": weights,
    }
    inputs = [rows] if weights is None else [rows, weights]
    expected = reference_tile(rows, positions, offsets, **given)
    grads = [torch.randn(tile.shape) for tile in expected]

    def call() -> tuple[list[Tensor], list[Tensor]]:
        tiles = ops.ragged_tile(rows, positions, offsets, **given)
        return tiles, gradients_of(tiles, grads, *inputs)

    tiles, gradients = with_threads(threads, ops.simd_level(), call)
    for ours, other in zip(tiles, expected, strict=True):
        assert torch.equal(ours, other)
    if batch == 0:
        assert not any(gradient.any() for gradient in gradients)
        return
    of_reference = gradients_of(expected, grads, *inputs)
    for ours, other in zip(gradients, of_reference, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_only_some_tiles_have_a_gradient() -> None:
    rows = torch.ones(2, 2, requires_grad=True)
    offsets = torch.tensor([0, 1, 2])
    tiles = ops.ragged_tile(rows, torch.tensor([0, 1]), offsets, features=2, tile_lens=[1, 1])
    tiles[1].sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[0, 0], [1, 1]]


ROWS, POSITIONS, OFFSETS = torch.zeros(3, 4), torch.tensor([2, 0]), torch.tensor([0, 1, 2])
WRONG = [
    ({"rows": ROWS.double()}, "rows has dtype float64, expected float32"),
    ({"rows": ROWS[0]}, "rows has 1 dimensions, expected 2"),
    ({"positions": torch.tensor([3, 0])}, "positions has 3, expected 0 to 2"),
    ({"positions": torch.tensor([0, -1])}, "positions has -1, expected 0 to 2"),
    ({"offsets": torch.tensor([1, 1, 2])}, r"offsets\[0\] is 1, expected 0"),
    ({"offsets": torch.tensor([0, 1, 1])}, "the last offset is 1, expected the number of pos"),
    ({"offsets": torch.tensor([0, 3, 2])}, r"offsets\[2\] is 2, less than offsets\[1\] = 3"),
    ({"weights": torch.ones(3)}, r"weights\.size\(0\) is 3, expected 2"),
    ({"weights": torch.ones(2).double()}, "weights has dtype float64, expected float32"),
]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *WRONG,
        ({"offsets": torch.tensor([0]), "positions": POSITIONS[:0]}, None),
        ({"features": 0}, "features is 0, expected at least 1"),
        ({"features": 3}, "offsets has 3 elements, expected one more than a multiple of features"),
        ({"pooling": Pooling.NONE}, r"pooling is 2, expected 0 \(sum\) or 1 \(mean\)"),
    ],
)
def test_errors(changed: dict[str, Any], message: str | None) -> None:
    given: dict[str, Any] = {"rows": ROWS, "positions": POSITIONS, "offsets": OFFSETS}
    given |= {"features": 2} | changed
    if message is None:
        assert ops.pool_rows(**given).shape == (0, 8)
        return
    with pytest.raises(RuntimeError, match=message):
        ops.pool_rows(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *WRONG,
        ({"tile_lens": [1, 0]}, r"tile_lens\[1\] is 0, expected at least 1"),
        ({"tile_lens": [1]}, "tile_lens has 1 entries, expected one for each of 2 features"),
        ({"pad_left": [True]}, "pad_left has 1 entries, expected one for each of 2 features"),
    ],
)
def test_errors_of_tiles(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"rows": ROWS, "positions": POSITIONS, "offsets": OFFSETS}
    given |= {"features": 2, "tile_lens": [1, 2]} | changed
    kind = ValueError if "tile_lens" in changed else RuntimeError
    with pytest.raises(kind, match=message):
        ops.ragged_tile(**given)


def test_grad_of_another_shape() -> None:
    for grad, message in (
        (torch.zeros(2, 8), "grad.size.0. is 2, expected 1"),
        (torch.zeros(1, 7), "grad has 7 columns, expected a multiple of features, 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.dynemb.pool_rows_grad(grad, POSITIONS, OFFSETS, 2, 3, None, 0)
    with pytest.raises(RuntimeError, match=r"grads\[1\]\.size\(1\) is 4, expected 8"):
        torch.ops.dynemb.ragged_tile_grad(
            [torch.zeros(1, 4), torch.zeros(1, 4)], POSITIONS, OFFSETS, None, 3, [1, 2], [0, 0]
        )
