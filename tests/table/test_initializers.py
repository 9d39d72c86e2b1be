"""Initial values: the formulas, their distributions, and what they depend on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from execution import simd, simd_levels, threads
from group_calls import bag_lookup, call_of, flat_call, same_bits, train
from oracle import random_words, uniform_row
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.initializers import Initializer
from torch_dynemb.ops.columns import Meta
from torch_dynemb.table.config import ColumnShard

pytestmark = pytest.mark.any_device

DIM = 17


def make_group(
    initializer: Initializer, dim: int = DIM, *, name: str = "table", **arguments: Any
) -> td.TableGroup:
    table = td.TableConfig(name, dim, initializer=initializer)
    return td.TableGroup([table], optimizer=td.SGD(lr=0.1), max_rows=10_000, **arguments)


def initial_rows(initializer: Initializer, ids: Tensor, dim: int = DIM) -> Tensor:
    """float32 [n, dim], read without inserting anything."""
    return make_group(initializer, dim, seed=11).read(0, ids)


# name, initializer, distribution of a value of a row of DIM columns
UNIFORMS = [
    ("Uniform", td.Uniform(-0.25, 0.75), (-0.25, 0.75)),
    ("XavierUniform", td.XavierUniform(2.0), (-2 * math.sqrt(3 / DIM), 2 * math.sqrt(3 / DIM))),
    (
        "XavierUniform fan_out",
        td.XavierUniform(fan_out=7),
        (-math.sqrt(6 / (DIM + 7)), math.sqrt(6 / (DIM + 7))),
    ),
    (
        "KaimingUniform",
        td.KaimingUniform(slope=0.5),
        (-math.sqrt(6 / (1.25 * DIM)), math.sqrt(6 / (1.25 * DIM))),
    ),
]
NORMALS = [
    ("Normal", td.Normal(0.5, 2.0), (0.5, 2.0)),
    ("XavierNormal", td.XavierNormal(3.0), (0.0, 3 / math.sqrt(DIM))),
    ("XavierNormal fan_out", td.XavierNormal(fan_out=7), (0.0, math.sqrt(2 / (DIM + 7)))),
    ("KaimingNormal", td.KaimingNormal(slope=0.5), (0.0, math.sqrt(2 / (1.25 * DIM)))),
]
TRUNCATED = [
    ("TruncatedNormal", td.TruncatedNormal(), (0.0, 1.0, -2.0, 2.0)),
    ("TruncatedNormal one-sided", td.TruncatedNormal(1.0, 0.5, 1.5, 9.0), (1.0, 0.5, 1.5, 9.0)),
]
EVERY = [case[1] for case in (*UNIFORMS, *NORMALS, *TRUNCATED)] + [td.Constant(0.125)]


def check_distribution(values: Tensor, cdf: Tensor, mean: float, std: float) -> None:
    """Mean and standard deviation within 5 standard errors, Kolmogorov-Smirnov at 1 in 10^5."""
    count = values.numel()
    assert abs(values.mean().item() - mean) < 5 * std / math.sqrt(count)
    assert abs(values.std().item() - std) < 5 * std / math.sqrt(count)
    empirical = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((cdf - empirical[:-1]).abs(), (cdf - empirical[1:]).abs()).max()
    assert distance < math.sqrt(-math.log(0.5e-5) / 2) / math.sqrt(count)


def sample(initializer: Initializer) -> Tensor:
    """float64, sorted; 340,000 values."""
    return initial_rows(initializer, torch.arange(20_000)).double().flatten().sort().values


@pytest.mark.parametrize(("initializer", "bounds"), [case[1:] for case in UNIFORMS])
def test_uniform_distribution(initializer: Initializer, bounds: tuple[float, float]) -> None:
    values = sample(initializer)
    low, high = bounds
    assert low - 1e-6 <= values[0]
    assert values[-1] < high + 1e-6
    cdf = (values - low) / (high - low)
    check_distribution(values, cdf, (low + high) / 2, (high - low) / math.sqrt(12))


@pytest.mark.parametrize(("initializer", "moments"), [case[1:] for case in NORMALS])
def test_normal_distribution(initializer: Initializer, moments: tuple[float, float]) -> None:
    values = sample(initializer)
    mean, std = moments
    check_distribution(values, torch.special.ndtr((values - mean) / std), mean, std)


@pytest.mark.parametrize(("initializer", "case"), [case[1:] for case in TRUNCATED])
def test_truncated_normal_distribution(
    initializer: Initializer, case: tuple[float, float, float, float]
) -> None:
    values = sample(initializer)
    mean, std, low, high = case
    assert low <= values[0]
    assert values[-1] <= high
    ends = torch.special.ndtr((torch.tensor([low, high], dtype=torch.float64) - mean) / std)
    cdf = (torch.special.ndtr((values - mean) / std) - ends[0]) / (ends[1] - ends[0])
    probabilities = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    exact = mean + std * torch.special.ndtri(ends[0] + probabilities * (ends[1] - ends[0]))
    check_distribution(values, cdf, exact.mean().item(), exact.std().item())


def test_constant() -> None:
    values = initial_rows(td.Constant(0.1), torch.arange(100))
    assert torch.equal(values, torch.full((100, DIM), 0.1))


def test_columns_and_ids_are_uncorrelated() -> None:
    rows = initial_rows(td.Normal(), torch.arange(10_000), 16).double()
    assert (torch.corrcoef(rows.T) - torch.eye(16)).abs().max() < 0.06
    assert abs((rows[1:] * rows[:-1]).mean().item()) < 0.02


# -- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3, 4, 64, 65, 130])
def test_uniform_bits(dim: int) -> None:
    """Philox4x32-10 with key = seed, counter = (id, column / 4): the oracle's own version."""
    group = make_group(td.Uniform(-0.3, 0.7), dim, seed=11)
    seed = int(group.index.meta[0, Meta.SEED])
    ids = [0, -1, 5, 1 << 40, -(1 << 63), (1 << 63) - 1]
    expected = np.array([uniform_row(seed, id, dim, td.Uniform(-0.3, 0.7)) for id in ids])
    assert same_bits(group.read(0, torch.tensor(ids)), torch.tensor(expected))


def test_normal_values() -> None:
    """The quantile of the column's word: a sign bit and 31 bits of probability."""
    group = make_group(td.Normal(), DIM, seed=11)
    seed = int(group.index.meta[0, Meta.SEED])
    words = torch.tensor([random_words(seed, id, DIM) for id in range(500)])
    tail = ((words >> 1).double() + 0.5) / 2**32
    expected = torch.special.ndtri(tail) * torch.where(words % 2 == 1, -1.0, 1.0)
    assert torch.allclose(group.read(0, torch.arange(500)).double(), expected, rtol=1e-5, atol=1e-6)


def test_by_column() -> None:
    parts = ((2, td.Constant(1.0)), (68, td.Normal(0.0, 2.0)), (3, td.Uniform(5.0, 6.0)))
    ids = torch.arange(100)
    rows = initial_rows(td.ByColumn(parts), ids, 73)
    assert torch.equal(rows[:, :2], torch.ones(100, 2))
    assert torch.equal(rows[:, 2:70], initial_rows(td.Normal(0.0, 2.0), ids, 73)[:, 2:70])
    assert torch.equal(rows[:, 70:], initial_rows(td.Uniform(5.0, 6.0), ids, 73)[:, 70:])


def test_by_column_scales_by_the_whole_row() -> None:
    """fan_in of a part is the row's dim, not the part's."""
    parts = ((1, td.Constant()), (DIM - 1, td.XavierNormal()))
    rows = initial_rows(td.ByColumn(parts), torch.arange(50))
    assert torch.equal(rows[:, 1:], initial_rows(td.XavierNormal(), torch.arange(50))[:, 1:])


# -- what values depend on -----------------------------------------------------------------------


@pytest.mark.parametrize("initializer", EVERY, ids=lambda i: type(i).__name__)
def test_values_do_not_depend_on_how_they_are_made(initializer: Initializer) -> None:
    """Read before insertion, in forward, written by backward, by materialize_; any order, level."""
    ids = torch.arange(-1500, 1500)
    expected = initial_rows(initializer, ids)
    group = make_group(initializer, seed=11)
    shuffled = ids[torch.randperm(len(ids), generator=seeded(1))]
    position = shuffled + 1500
    for level in simd_levels():
        with simd(level):
            assert same_bits(initial_rows(initializer, ids), expected)
    for count in (1, 2):
        with threads(count):
            output = bag_lookup(group, flat_call(group, 0, shuffled))
            assert same_bits(output.detach(), expected[position])
    train(group, 0, shuffled[:1000], torch.zeros(1000, DIM))
    assert same_bits(group.rows.weights[0][:1000], expected[position[:1000]])
    group.materialize()
    assert same_bits(group.rows.weights[0][:3000], expected[position])


@pytest.mark.parametrize("dim", [3, 64, 65, 130])
@pytest.mark.parametrize("initializer", [td.Normal(), td.TruncatedNormal()], ids=["normal", "cut"])
def test_rows_of_any_width_are_the_same_with_every_instruction_set(
    initializer: Initializer, dim: int
) -> None:
    ids = torch.arange(-500, 500)
    with simd(0):
        expected = initial_rows(initializer, ids, dim)
    assert (expected.abs() > 1.5 * initializer.std).any()  # tails, which are computed apart
    for level in simd_levels():
        with simd(level):
            assert same_bits(initial_rows(initializer, ids, dim), expected)


def test_seed_and_name_and_id_matter() -> None:
    ids = torch.arange(10)
    base = make_group(td.Normal(), seed=11).read(0, ids)
    assert not torch.equal(make_group(td.Normal(), seed=12).read(0, ids), base)
    assert not torch.equal(make_group(td.Normal(), seed=11, name="other").read(0, ids), base)
    assert len({tuple(row) for row in base.tolist()}) == 10
    assert len(set(base.flatten().tolist())) == base.numel()


def test_values_follow_manual_seed() -> None:
    ids = torch.arange(10)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = make_group(td.Normal())
        torch.rand(100)  # what has been drawn since does not matter
        second = make_group(td.Normal())
        torch.manual_seed(6)
        third = make_group(td.Normal())
    assert torch.equal(first.read(0, ids), second.read(0, ids))
    assert not torch.equal(first.read(0, ids), third.read(0, ids))


def test_tables_of_a_group_differ_and_do_not_depend_on_each_other() -> None:
    def group_of(*names: str) -> td.TableGroup:
        tables = [td.TableConfig(name, 4) for name in names]
        return td.TableGroup(tables, optimizer=None, max_rows=100, seed=3)

    ids = torch.arange(10)
    both, alone = group_of("a", "b"), group_of("b")
    assert not torch.equal(both.read(0, ids), both.read(1, ids))
    assert torch.equal(both.read(1, ids), alone.read(0, ids))


def test_initial_values_survive_a_reload_under_another_seed() -> None:
    group = make_group(td.Normal(), seed=11)
    group.insert(0, torch.arange(5))
    other = make_group(td.Normal(), seed=12)
    other.state.load(group.state.tensors())
    assert torch.equal(other.read(0, torch.arange(10)), group.read(0, torch.arange(10)))


@pytest.mark.parametrize(
    ("default", "expected"),
    [("zeros", [0.0, 0.0, 0.0]), (torch.tensor([1.0, -2.0, 0.5]), [1.0, -2.0, 0.5])],
)
def test_default_of_missing_ids(default: Any, expected: list[float]) -> None:
    table = td.TableConfig("table", 3, initializer=td.Constant(7.0), eval_default=default)
    group = td.TableGroup([table], optimizer=td.SGD(lr=1.0), max_rows=100)
    group.insert(0, torch.tensor([1]))
    call = call_of(group, [(0, [[1], [2]])])
    assert group.read(0, call.ids).tolist() == [[7.0] * 3, expected]


@pytest.mark.parametrize("columns", [range(DIM), range(4, 12)])
@pytest.mark.parametrize(
    "default", [td.Normal(1.0, 0.5), td.ByColumn(((5, td.Constant(3.0)), (12, td.Uniform())))]
)
def test_default_of_missing_ids_by_another_initializer(
    default: Initializer, columns: range
) -> None:
    """Missing ids read what their rows would begin with by it, also in some columns of a table."""
    ids = torch.tensor([-1, 2, 2**40])
    shard = ColumnShard("table", DIM, columns.start)
    table = td.TableConfig(
        "table", len(columns), initializer=td.Constant(7.0), eval_default=default, shard=shard
    )
    group = td.TableGroup([table], optimizer=td.SGD(lr=1.0), max_rows=100, seed=11)
    group.insert(0, ids[:1])
    expected = initial_rows(default, ids)[:, columns.start : columns.stop]
    expected[0] = 7.0
    assert same_bits(group.read(0, ids), expected)


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "initializer",
    [
        td.Normal(),
        td.Uniform(-1.0, 1.0),
        td.TruncatedNormal(),
        td.XavierUniform(),
        td.ByColumn(((10, td.Constant(2.0)), (14, td.Normal()))),
    ],
    ids=lambda initializer: type(initializer).__name__,
)
def test_a_column_shard_starts_as_the_columns_of_the_whole_table(
    initializer: td.Initializer,
) -> None:
    ids = torch.tensor([5, -1, 2**40, 7])
    config = td.TableConfig("whole", 24, initializer=initializer)
    whole = td.TableGroup([config], optimizer=None, seed=3, max_rows=64).read(0, ids)
    for first, columns in ((0, 8), (8, 16), (4, 4), (20, 4)):
        config = td.TableConfig(
            "part", columns, initializer=initializer, shard=ColumnShard("whole", 24, first)
        )
        part = td.TableGroup([config], optimizer=None, seed=3, max_rows=64).read(0, ids)
        assert torch.equal(part, whole[:, first : first + columns])
