"""Rows of less than float32: how they are read, and how they are rounded when written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from execution import simd, simd_levels, threads
from group_calls import differences, flat_call, read_bags, snapshot
from seeding import seeded
from small_rows import DIM, SMALL, make_group, small_dtypes, step
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device


def patterns(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit dtype."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def difficult_floats() -> Tensor:
    """Random bits, and neighbours of every value and midpoint of both dtypes."""
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=seeded(1)).to(torch.int32)
    edges = []
    for dtype in SMALL:
        bits = patterns(dtype).float().view(torch.int32)
        half = 1 << 15 if dtype == torch.bfloat16 else 1 << 12
        edges += [bits + offset for offset in (-1, 0, 1, half - 1, half, half + 1)]
    subnormal = (torch.rand(1 << 12, generator=seeded(2)) * 2**-13).view(torch.int32)
    return torch.cat([random, *edges, subnormal]).view(torch.float32)


def stored(values: Tensor, dtype: torch.dtype, **arguments: Any) -> Tensor:
    """What a row of zeros becomes by a step of SGD from 0 to ``values``, float [n * DIM]."""
    padded = nn.functional.pad(values, (0, -len(values) % DIM)).reshape(-1, DIM)
    table = td.TableConfig("t", DIM, initializer=td.Constant(0.0), dtype=dtype)
    group = td.TableGroup(
        [table], optimizer=td.SGD(lr=1.0, **arguments), max_rows=len(padded), seed=3
    )
    ids = torch.arange(len(padded))
    step(group, ids, -padded)
    return group.rows.weights[0][: len(padded)].flatten()[: len(values)]


@small_dtypes
def test_every_value_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    group = make_group(td.SGD(lr=0.1), dtype, dim=16, max_rows=4096)
    ids = torch.arange(4096)
    values = patterns(dtype).reshape(4096, 16)
    group.insert_or_assign(0, ids, values.float())
    group.rows.weights[0][:] = values  # with the bits of every NaN
    given = group.read(0, ids)
    expected = values.float()
    torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    pooled = read_bags(group, flat_call(group, 0, ids))
    torch.testing.assert_close(pooled, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", simd_levels())
@small_dtypes
def test_rounding_to_nearest_is_that_of_torch(dtype: torch.dtype, level: int) -> None:
    values = difficult_floats()
    with simd(level):
        given = stored(values, dtype, stochastic_rounding=False)
    expected = values.to(dtype)
    nan = values.isnan()
    assert bool(given[nan].isnan().all())
    # 0 - (-x) loses the sign of zero
    finite = ~nan & (expected != 0)
    assert torch.equal(given[finite].view(torch.int16), expected[finite].view(torch.int16))
    assert bool((given[~nan & (expected == 0)] == 0).all())


@pytest.mark.parametrize("level", simd_levels())
@small_dtypes
def test_stochastic_rounding_gives_a_neighbour(dtype: torch.dtype, level: int) -> None:
    values = difficult_floats()
    with simd(level):
        given = stored(values, dtype)
    assert torch.equal(given.isnan(), values.isnan())
    finite = values.isfinite() & (values.abs() < 65504.0 if dtype == torch.float16 else True)
    below, above = neighbours(values[finite], dtype)
    ok = (given[finite].float() == below) | (given[finite].float() == above)
    assert bool(ok.all())
    infinite = values.isinf()
    assert torch.equal(given[infinite].float(), values[infinite])


@pytest.mark.parametrize("stochastic", [False, True])
@small_dtypes
def test_every_instruction_set_rounds_difficult_floats_alike(
    dtype: torch.dtype, stochastic: bool
) -> None:
    """To the last bit, also of a NaN: some have a conversion of the processor, some do not."""
    values = difficult_floats()
    bits = []
    for level in simd_levels():
        with simd(level):
            given = stored(values, dtype, stochastic_rounding=stochastic)
        bits.append(given.view(torch.int16))
    for other in bits[1:]:
        assert torch.equal(bits[0], other)


def neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of a dtype next to float32 ones, towards zero and away from it."""
    if dtype == torch.bfloat16:
        bits = values.view(torch.int32) & ~0xFFFF
        towards = bits.view(torch.float32)
        exact = towards == values
        away = torch.where(exact, towards, (bits + 0x10000).view(torch.float32))
        return towards, away
    towards = values.half()
    wrong = towards.float().abs() > values.abs()
    bits = towards.view(torch.int16)
    towards = torch.where(wrong, (bits - 1).view(torch.float16), towards)
    exact = towards.float() == values
    away = torch.where(exact, towards, (towards.view(torch.int16) + 1).view(torch.float16))
    return towards.float(), away.float()


@small_dtypes
def test_stochastic_rounding_has_no_bias(dtype: torch.dtype) -> None:
    """Between 1 and the next value, at a known fraction, over many ids and columns."""
    ulp = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    for fraction in (0.125, 0.5, 0.8125):
        count = 40_000
        values = torch.full((count,), 1 + fraction * ulp)
        up = (stored(values, dtype).float() > 1).double()
        error = abs(float(up.mean()) - fraction)
        assert error < 5 * np.sqrt(fraction * (1 - fraction) / count)
        # neighbouring columns and rows are independent
        centred = (up - up.mean())[: count // DIM * DIM].reshape(-1, DIM)
        for other in (centred.roll(1, 1), centred.roll(8, 1), centred.roll(1, 0)):
            correlation = float((centred * other).mean() / centred.square().mean())
            assert abs(correlation) < 5 / np.sqrt(count)


@small_dtypes
def test_rounding_is_reproducible(dtype: torch.dtype) -> None:
    """Whatever the threads, the order of ids, or the rows they have."""
    states = []
    for count, order in ((1, torch.arange(300)), (2, torch.arange(300).flip(0))):
        group = make_group(td.Adam(lr=0.01), dtype)
        with threads(count):
            for number in range(3):
                gradient = torch.randn(300, DIM, generator=seeded(number))
                step(group, order, gradient[order])
        states.append(group.read(0, torch.arange(300)))
    assert torch.equal(*states)
    other = make_group(td.Adam(lr=0.01), dtype, seed=4)
    assert not torch.equal(other.read(0, torch.arange(300)), states[0])


@pytest.mark.parametrize(
    "config",
    [
        td.RowWiseAdagrad(lr=0.1),
        td.RowWiseAdagrad(lr=0.1, weight_decay=0.1),
        td.LAMB(lr=0.1),
        td.Adam(lr=0.1, state_dtype=torch.bfloat16),
        td.Adam(lr=0.1, state_dtype=torch.uint8),
        td.Ftrl(lr=0.1, l1=0.1, state_dtype=torch.bfloat16, stochastic_rounding=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, *SMALL], ids=str)
@pytest.mark.parametrize("dim", [5, 16, 40, 131])
def test_bits_do_not_depend_on_the_instruction_set(
    config: OptimizerConfig, dtype: torch.dtype, dim: int
) -> None:
    states = []
    for level in simd_levels():
        with simd(level):
            group = make_group(config, dtype, dim=dim, max_rows=50)
            for number in range(3):
                step(group, torch.arange(40), torch.randn(40, dim, generator=seeded(number)))
        states.append(snapshot(group))
    for state in states[1:]:
        assert differences(states[0], state) == []
