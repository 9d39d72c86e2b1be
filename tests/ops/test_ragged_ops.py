"""Ragged ops of many features against one-screen references over Python lists."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_routing import signed
from test_strings import reference_murmur64a
from torch import Tensor

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")

DTYPES = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]
DTYPES += [torch.float32, torch.float64, torch.float16, torch.bfloat16]
Rows = list[list[Any]]

rows_of_numbers = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=5)
features_of_rows = st.lists(rows_of_numbers, min_size=1, max_size=4)
nested_rows = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4), max_size=4)


def offsets_of(rows: Sequence[Sequence[Any]]) -> Tensor:
    return torch.tensor([0, *map(len, rows)]).cumsum(0)


def flat(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for row in rows for item in row]


def ragged(rows: Rows, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    return torch.tensor(flat(rows)).to(dtype), offsets_of(rows)


def rows_of(values: Tensor, offsets: Tensor) -> Rows:
    bounds = offsets.tolist()
    assert len(values) == bounds[-1]
    return [values[a:b].tolist() for a, b in pairwise(bounds)]


def positions(features: list[Rows]) -> list[Rows]:
    """Each value replaced by its number, so that all are distinct."""
    return [
        [[sum(map(len, rows[:r])) + i for i in range(len(row))] for r, row in enumerate(rows)]
        for rows in features
    ]


def kept(row: list[Any], keep: int, drop_left: bool) -> list[Any]:
    return row[max(len(row) - keep, 0) :] if drop_left else row[:keep]


@given(st.data(), features_of_rows)
def test_cutoff_2d(data: st.DataObject, features: list[Rows]) -> None:
    features = positions(features)
    count = len(features)
    keep = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    left = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count))
    weighted = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    given_rows = [ragged(rows, dtype) for rows, dtype in zip(features, dtypes, strict=True)]
    weights = [
        torch.arange(len(values)) / 2 if flag else None
        for (values, _), flag in zip(given_rows, weighted, strict=True)
    ]
    values, offsets = map(list, zip(*given_rows, strict=True))
    cut = ops.ragged_cutoff_2d(values, offsets, keep, weights=weights, drop_left=left)
    for f, rows in enumerate(features):
        expected = [kept(row, keep[f], left[f]) for row in rows]
        assert cut.offsets[f].tolist() == offsets_of(expected).tolist()
        assert cut.values[f].dtype == dtypes[f]
        assert torch.equal(cut.values[f], values[f][flat(expected)])
        of_feature, weight = cut.weights[f], weights[f]
        assert (of_feature is None) == (weight is None)
        if of_feature is not None and weight is not None:
            assert torch.equal(of_feature, weight[flat(expected)])


@given(st.data(), st.lists(nested_rows, min_size=1, max_size=3))
def test_cutoff_3d(data: st.DataObject, features: list[list[Rows]]) -> None:
    count = len(features)
    keep = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    left = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    pad = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    outer = [offsets_of(rows) for rows in features]
    values, inner = map(list, zip(*(ragged(flat(rows)) for rows in features), strict=True))
    weights = [torch.arange(len(tensor)) / 2 for tensor in values]
    cut = ops.ragged_cutoff_3d(
        values, outer, inner, keep, weights=weights, drop_left=left, pad_left=pad
    )
    for f, rows in enumerate(features):
        expected = []
        for row in rows:
            lists = kept(row, keep[f], left[f])
            empty: Rows = [[] for _ in range(keep[f] - len(lists))]
            expected.append(empty + lists if pad[f] else lists + empty)
        assert cut.outer_offsets[f].tolist() == [r * keep[f] for r in range(len(rows) + 1)]
        assert rows_of(cut.values[f], cut.inner_offsets[f]) == flat(expected)
        pairs = dict(zip(weights[f].tolist(), values[f].tolist(), strict=True))
        of_feature = cut.weights[f]
        assert of_feature is not None
        assert [pairs[w] for w in of_feature.tolist()] == cut.values[f].tolist()


@given(st.data(), features_of_rows)
def test_topk_index_cutoff(data: st.DataObject, features: list[Rows]) -> None:
    features = positions(features)
    indices = []
    for rows in features:
        k = data.draw(st.integers(0, 4))
        row = st.lists(st.integers(-2, 7), min_size=k, max_size=k)
        drawn = data.draw(st.lists(row, min_size=len(rows), max_size=len(rows)))
        indices.append(torch.tensor(drawn, dtype=torch.int64).reshape(len(rows), k))
    values, offsets = map(list, zip(*map(ragged, features), strict=True))
    weights = [None, *(torch.arange(len(tensor)) / 2 for tensor in values[1:])]
    cut = ops.ragged_topk_index_cutoff(values, offsets, indices, weights=weights)
    for f, rows in enumerate(features):
        expected = [
            [row[i] for i in of_row if 0 <= i < len(row)]
            for row, of_row in zip(rows, indices[f].tolist(), strict=True)
        ]
        assert rows_of(cut.values[f], cut.offsets[f]) == expected
        of_feature = cut.weights[f]
        assert (of_feature is None) == (f == 0)
        if of_feature is not None:
            assert (of_feature * 2).tolist() == flat(expected)


def padded(rows: list[Any], lengths: Sequence[int], padding: Any) -> Any:
    """A list of lists of this depth, as long as `lengths` says."""
    if not lengths:
        return rows
    size = lengths[0]
    result = [padded(row, lengths[1:], padding) for row in rows]
    hole = torch.full(tuple(lengths[1:]), padding).tolist()
    return result + [hole] * (size - len(rows))


@given(st.data(), nested_rows, rows_of_numbers, st.sampled_from(DTYPES), st.integers(0, 1))
def test_dense_and_back(
    data: st.DataObject, deep: list[Rows], shallow: Rows, dtype: torch.dtype, padding: int
) -> None:
    longest = (
        max(map(len, deep), default=0),
        max(map(len, flat(deep)), default=0),
        max(map(len, shallow), default=0),
    )
    a, b, c = (size + data.draw(st.integers(0, 2)) for size in longest)
    deep_values = ragged(flat(deep))
    shallow_values = ragged(shallow, dtype)
    offsets = [[offsets_of(deep), deep_values[1]], [shallow_values[1]]]
    values = [deep_values[0], shallow_values[0]]
    dense = ops.ragged_to_dense(values, offsets, lengths=[[a, b], [c]], padding_value=padding)
    assert dense[0].shape == (len(deep), a, b)
    assert dense[0].tolist() == [padded(row, (a, b), padding) for row in deep]
    expected = torch.tensor([padded(row, (c,), padding) for row in shallow]).to(dtype)
    assert torch.equal(dense[1], expected.reshape(len(shallow), c))

    back = ops.dense_to_ragged(dense, invalid_value=padding)
    for tensor, (kept_values, kept_offsets) in zip(dense, back, strict=True):
        rows = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1]).tolist()
        for row in rows:
            while row and row[-1] == padding:
                row.pop()
        assert rows_of(kept_values, kept_offsets[-1]) == rows
        for d, regular in enumerate(kept_offsets[:-1]):
            parts = math.prod(tensor.shape[: d + 1])
            assert regular.tolist() == [i * tensor.shape[d + 1] for i in range(parts + 1)]

    for sparse, one, of_feature in zip(
        ops.ragged_to_sparse(values, offsets, lengths=[[a, b], [c]]), values, offsets, strict=True
    ):
        (zeros,) = ops.ragged_to_dense([one], [of_feature], lengths=[list(sparse.shape[1:])])
        assert sparse.is_coalesced()
        assert torch.equal(sparse.to_dense(), zeros)


def test_dense_of_three_depths() -> None:
    values = torch.arange(1, 5)
    offsets = [torch.tensor(o) for o in ([0, 1, 3], [0, 2, 2, 3], [0, 1, 3, 4])]
    (dense,) = ops.ragged_to_dense([values], [offsets], lengths=[[2, 2, 2]])
    assert dense.tolist() == [
        [[[1, 0], [2, 3]], [[0, 0], [0, 0]]],
        [[[0, 0], [0, 0]], [[4, 0], [0, 0]]],
    ]


def test_dense_to_ragged_keeps_all() -> None:
    dense = torch.arange(6.0).reshape(2, 3)
    (kept_all,) = ops.dense_to_ragged([dense])
    assert rows_of(kept_all.values, kept_all.offsets[0]) == dense.tolist()


def reference_cross(x: list[int], y: list[int], of_x: list[float], of_y: list[float]) -> Any:
    def distinct(ids: list[int], weights: list[float]) -> dict[int, float]:
        first: dict[int, float] = {}
        for i, w in zip(ids, weights, strict=True):
            first.setdefault(i, w)
        return first

    def crossed(a: int, b: int) -> int:
        return signed(reference_murmur64a(struct.pack("<qq", a, b), 0))

    pairs = product(distinct(x, of_x).items(), distinct(y, of_y).items())
    return [(crossed(a, b), of_a * of_b) for (a, of_a), (b, of_b) in pairs]


many_ids = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=40)


@given(st.data(), st.lists(many_ids, max_size=4), st.booleans())
def test_cross(data: st.DataObject, x_rows: Rows, weighted: bool) -> None:
    y_rows = data.draw(st.lists(many_ids, min_size=len(x_rows), max_size=len(x_rows)))
    given_rows = [(x_rows, y_rows), (y_rows, x_rows)]  # two pairs of features
    x, x_offsets = map(list, zip(*(ragged(a) for a, _ in given_rows), strict=True))
    y, y_offsets = map(list, zip(*(ragged(b) for _, b in given_rows), strict=True))
    x, y = [t.long() for t in x], [t.long() for t in y]
    of_x = [torch.arange(len(tensor)) / 4 for tensor in x]
    of_y = [torch.ones(len(tensor)) for tensor in y]
    crossed = ops.feature_cross_ragged(
        x, x_offsets, y, y_offsets, x_weights=of_x if weighted else None
    )
    for f, (a_rows, b_rows) in enumerate(given_rows):
        a_weights = rows_of(of_x[f] if weighted else torch.ones(len(x[f])), x_offsets[f])
        b_weights = rows_of(of_y[f], y_offsets[f])
        expected = [
            reference_cross(*row) for row in zip(a_rows, b_rows, a_weights, b_weights, strict=True)
        ]
        assert crossed.offsets[f].tolist() == offsets_of(expected).tolist()
        assert list(
            zip(crossed.values[f].tolist(), crossed.weights[f].tolist(), strict=True)
        ) == flat(expected)


# -- gradients -----------------------------------------------------------------------------------

OFFSETS = torch.tensor([0, 3, 3, 7])
OUTER, INNER = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 2, 7])
INDICES = torch.tensor([[0, 2, 2], [0, -1, 1], [3, 9, 0]])
CALLS: dict[str, Callable[[Tensor, Tensor], list[Any]]] = {
    "cutoff 2d": lambda v, w: _flat_cut(
        ops.ragged_cutoff_2d([v, v], [OFFSETS, OFFSETS], [2, 3], weights=[w, w], drop_left=[1, 0])
    ),
    "cutoff 2d of a feature with integers": lambda v, w: _flat_cut(
        ops.ragged_cutoff_2d([torch.arange(7), v], [OFFSETS, OFFSETS], [2, 3], weights=[w, None])
    ),
    "cutoff 3d": lambda v, w: _flat_cut(
        ops.ragged_cutoff_3d(
            [v, v],
            [OUTER, OUTER],
            [INNER, INNER],
            [1, 3],
            weights=[None, w],
            drop_left=[True, False],
            pad_left=[False, True],
        )
    ),
    "top k": lambda v, w: _flat_cut(
        ops.ragged_topk_index_cutoff([v], [OFFSETS], [INDICES], weights=[w])
    ),
    "dense": lambda v, w: ops.ragged_to_dense(
        [v, w], [[OFFSETS], [OUTER, INNER]], lengths=[[5], [2, 5]], padding_value=0.5
    ),
    "sparse": lambda v, w: [
        s.to_dense() for s in ops.ragged_to_sparse([v], [[OFFSETS]], lengths=[[5]])
    ],
    "from dense": lambda v, w: [
        ops.dense_to_ragged([torch.stack([v, w]), v[:6].reshape(1, 2, 3)])[i].values
        for i in range(2)
    ],
}


def _flat_cut(cut: Any) -> list[Tensor]:
    tensors = [*cut.values, *(w for w in cut.weights if w is not None)]
    return [t for t in tensors if t.dtype.is_floating_point]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_what_is_taken(name: str) -> None:
    """All results are values that were given: a value's gradient is the sum over its places."""
    values = torch.arange(1.0, 8.0, requires_grad=True)
    weights = torch.arange(11.0, 18.0, requires_grad=True)
    results = CALLS[name](values, weights)
    grads = [torch.rand(result.shape) for result in results]
    torch.autograd.backward(results, grads)
    for tensor in (values, weights):
        given_grad = torch.zeros(7) if tensor.grad is None else tensor.grad
        for number, value in enumerate(tensor.tolist()):
            places = [(r.detach() == value, g) for r, g in zip(results, grads, strict=True)]
            expected = sum((g[place].sum() for place, g in places), torch.zeros(()))
            torch.testing.assert_close(given_grad[number], expected)


def test_gradients_of_doubles_and_halves() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        values = torch.arange(7).to(dtype).requires_grad_()
        (cut, *_), *_ = ops.ragged_cutoff_2d([values], [OFFSETS], [2])
        cut.sum().backward()
        assert values.grad is not None
        assert values.grad.dtype == dtype
        assert values.grad.tolist() == [1, 1, 0, 1, 1, 0, 0]


@pytest.mark.long
def test_compiled_with_gradients() -> None:
    def step(values: Tensor, weights: Tensor) -> Tensor:
        cut = ops.ragged_cutoff_2d([values], [OFFSETS], [2], weights=[weights])
        (dense,) = ops.ragged_to_dense(cut.values, [[cut.offsets[0]]], lengths=[[2]])
        assert cut.weights[0] is not None
        return dense.square().sum() + (cut.weights[0] * 3).sum()

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        values = torch.arange(1.0, 8.0, requires_grad=True)
        weights = torch.ones(7, requires_grad=True)
        loss = run(values, weights)
        loss.backward()
        results.append((loss.item(), values.grad, weights.grad))
    assert results[0][0] == results[1][0]
    for eager, compiled in zip(results[0][1:], results[1][1:], strict=True):
        assert eager is not None
        assert torch.equal(eager, compiled)


# -- errors --------------------------------------------------------------------------------------
