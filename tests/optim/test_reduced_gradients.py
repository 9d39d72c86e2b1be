"""Gradients that many ids of a batch add up to: split against fused, and heavy hitters."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from execution import threads
from group_calls import (
    Call,
    bag_lookup,
    call_of,
    differences,
    snapshot,
    train,
)
from optimizer_groups import exact_gradient, make_group, plain_optimizers
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling, RowClock
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device


# -- split and fused -----------------------------------------------------------------------------


def gradient_arguments(
    group: td.TableGroup, call: Call, weights: Tensor | None, gradient: Tensor
) -> tuple[Any, ...]:
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    return gradient, call.ids, handles, call.offsets, weights


def fused(
    group: td.TableGroup, call: Call, weights: Tensor | None, gradient: Tensor, pooling: Pooling
) -> None:
    updates = group.rows.row_clock[-4 + RowClock.UPDATES].reshape(1).clone()
    arguments = gradient_arguments(group, call, weights, gradient)
    features = (call.tables, call.dims, pooling, group.config.optimizer.kernel_number)
    torch.ops.dynemb.embedding_backward_(*group.rows.updated, *arguments, updates, *features)


def split(
    group: td.TableGroup, call: Call, weights: Tensor | None, gradient: Tensor, pooling: Pooling
) -> None:
    updates = group.rows.row_clock[-4 + RowClock.UPDATES].reshape(1).clone()
    rows = group.rows
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    reduced = ops.reduce_grad(rows, gradient, call.batch(pooling, weights), handles)
    number = group.config.optimizer.kernel_number
    torch.ops.dynemb.apply_grad_(*rows.updated, *reduced, updates, call.tables, number)


def random_call(group: td.TableGroup, tables: list[int], batch: int, *, seed: int) -> Call:
    """Bags of 0 to 5 ids with many repeats."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 6, (len(tables), batch))
    return call_of(
        group,
        [
            (t, [random.zipf(1.3, size).clip(0, 500).tolist() for size in of_table])
            for t, of_table in zip(tables, sizes, strict=True)
        ],
    )


@plain_optimizers
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN], ids=["sum", "mean"])
@pytest.mark.parametrize("batch", [7, 500])
def test_split_equals_fused(config: OptimizerConfig, pooling: Pooling, batch: int) -> None:
    groups = [make_group(config, (6, 17, 6), 5000) for _ in range(3)]
    for step in range(3):
        tables = [[0, 1, 2], [2, 2], [1, 0, 1]][step]
        call = random_call(groups[0], tables, batch, seed=step)
        generator = seeded(step)
        gradient = torch.randn(batch, sum(call.dims), generator=generator)
        weights = None if step == 0 else torch.rand(len(call.ids), generator=generator)
        for group, path in zip(groups, (fused, split, split), strict=True):
            with threads(1 if group is groups[2] else 2):
                path(group, call, weights, gradient, pooling)
    assert groups[0].rows.row_clock[-4 + RowClock.UPDATES] == 3
    assert differences(snapshot(groups[0]), snapshot(groups[1])) == []
    assert differences(snapshot(groups[0]), snapshot(groups[2])) == []


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_bags_of_one_length_equal_ragged_ones(mode: Literal["sum", "mean"], length: int) -> None:
    ids = torch.randint(50, (301, length), generator=seeded(0))
    gradient = torch.randn(len(ids), 8, generator=seeded(1))
    even, ragged = (
        td.DynamicEmbeddingBag(8, mode=mode, optimizer=td.SGD(lr=0.1), name="t") for _ in range(2)
    )
    even(ids).backward(gradient)
    offsets = torch.arange(len(ids) + 1) * length  # the last bag is empty
    ragged(ids.flatten(), offsets).backward(torch.cat([gradient, gradient[:1]]))
    numbers = torch.arange(50)
    assert torch.equal(even.group.read(0, numbers), ragged.group.read(0, numbers))


def test_reduced_gradients() -> None:
    """What reduce_grad promises: one entry per row, ascending by row, sums of occurrences."""
    group = make_group(td.SGD(lr=1.0), (2, 3, 2))
    call = call_of(group, [(2, [[5, 5], [6]]), (1, [[5], []]), (0, [[9], [9, 8]])])
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    handles[2] = -1  # id 6 of the first feature is missing
    gradient = torch.arange(14.0).reshape(2, 7)
    reduced = ops.reduce_grad(group.rows, gradient, call.batch(), handles)
    assert reduced.counts.tolist() == [3, 1]
    assert [h.shape for h in reduced.handles] == [(7,), (7,)]
    assert (reduced.handles[0][:3] >> 28).tolist() == [0, 2, 3]
    assert reduced.ids[0][:3].tolist() == [5, 9, 8]
    assert reduced.tables[0][:3].tolist() == [2, 0, 0]
    assert reduced.gradients[0][:3].tolist() == [[0.0, 2.0], [17.0, 19.0], [12.0, 13.0]]
    assert (reduced.ids[1][0].item(), reduced.tables[1][0].item()) == (5, 1)
    assert reduced.gradients[1][0].tolist() == [2.0, 3.0, 4.0]


# -- heavy hitters -------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN], ids=["sum", "mean"])
def test_heavy_hitter_sums_exactly(pooling: Pooling) -> None:
    """One id 10^5 times among others, in bags of two: every occurrence counts once."""
    group = make_group(td.SGD(lr=1.0), (5,), 5000)
    count = 100_000
    ids = torch.stack([torch.full((count,), 7), torch.arange(count) % 3000], 1).flatten()
    call = Call(ids, torch.arange(0, 2 * count + 1, 2), [0], [5])
    before = group.read(0, torch.arange(3000)).double()
    gradient = exact_gradient(count, 5, seed=1)
    bag_lookup(group, call, pooling=pooling).backward(gradient)
    per_id = gradient.double() / (2 if pooling == Pooling.MEAN else 1)
    sums = torch.zeros(3000, 5, dtype=torch.float64)
    sums.index_add_(0, torch.arange(count) % 3000, per_id)
    sums[7] += per_id.sum(0)
    expected = (before.float() - sums.float()).double()
    assert torch.equal(group.read(0, torch.arange(3000)).double(), expected)


@plain_optimizers
def test_heavy_hitter_bits_do_not_depend_on_threads(config: OptimizerConfig) -> None:
    count = 30_000
    generator = seeded(4)
    ids = torch.randint(2000, (count,), generator=generator)
    ids[torch.rand(count, generator=generator) < 0.6] = 11
    gradient = torch.randn(count, 6, generator=generator)
    states = []
    for number in (1, 2):
        group = make_group(config, max_rows=5000)
        with threads(number):
            for part in (slice(None), slice(count // 2)):
                train(group, 0, ids[part], gradient[part])
        states.append(snapshot(group))
    assert differences(*states) == []


@pytest.mark.parametrize("first", [0, 1, 37, 63])
def test_sums_of_more_than_128_occurrences_are_sums_of_pieces(first: int) -> None:
    """Added in the order of occurrence, and wherever the run of an id begins."""
    times = [first, 127, 128, 129, 1, 191, 192, 193, 2, 256, 257, 640, 130]
    dim = 6
    gradient = torch.randn(sum(times), dim, generator=seeded(6))
    ids = torch.repeat_interleave(torch.arange(len(times)), torch.tensor(times))
    group = make_group(td.SGD(lr=1.0), max_rows=100)
    train(group, 0, torch.arange(len(times)), torch.zeros(len(times), dim))
    before = group.read(0, torch.arange(len(times))).cpu()
    order = torch.randperm(len(ids), generator=seeded(7))
    ids, gradient = ids[order], gradient[order]
    train(group, 0, ids, gradient)
    after = group.read(0, torch.arange(len(times))).cpu()
    for number, count in enumerate(times):
        of_id = gradient[ids == number].cpu().numpy()
        pieces = [of_id[i : i + 128] for i in range(0, count, 128)]
        total = np.zeros(dim, np.float32)
        for p, piece in enumerate(pieces):
            of_piece = piece[0].copy()
            for row in piece[1:]:
                of_piece += row
            total = of_piece if p == 0 else total + of_piece
        assert np.array_equal(after[number].numpy(), before[number].numpy() - total), count
