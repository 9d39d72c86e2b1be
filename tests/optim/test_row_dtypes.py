"""Rows and optimizer state of less than float32: rounding, arithmetic, memory, and the rest."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from execution import simd, simd_levels, threads
from group_calls import bag_lookup, differences, flat_call, read_bags, snapshot
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device

SMALL = [torch.bfloat16, torch.float16]
small_dtypes = pytest.mark.parametrize("dtype", SMALL, ids=["bfloat16", "float16"])
DIM = 21  # vectors of 16, and a rest


def make_group(
    optimizer: OptimizerConfig | None,
    dtype: torch.dtype,
    *,
    dim: int = DIM,
    max_rows: int = 1000,
    seed: int = 3,
    **arguments: Any,
) -> td.TableGroup:
    table = td.TableConfig("t", dim, initializer=td.Uniform(-1.0, 1.0), dtype=dtype)
    return td.TableGroup([table], optimizer=optimizer, max_rows=max_rows, seed=seed, **arguments)


def step(group: td.TableGroup, ids: Tensor, gradient: Tensor) -> None:
    bag_lookup(group, flat_call(group, 0, ids)).backward(gradient)


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


# -- conversion ------------------------------------------------------------------------------------


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


# -- training --------------------------------------------------------------------------------------


@small_dtypes
def test_sgd_is_float32_arithmetic_with_rounded_rows(dtype: torch.dtype) -> None:
    group = make_group(td.SGD(lr=0.1, stochastic_rounding=False), dtype)
    ids = torch.arange(50)
    expected = group.read(0, ids)
    assert torch.equal(expected, expected.to(dtype).float())  # before they are written, too
    for number in range(5):
        gradient = torch.randn(50, DIM, generator=seeded(number))
        step(group, ids, gradient)
        expected = (expected - 0.1 * gradient).to(dtype).float()
        assert torch.equal(group.read(0, ids), expected)


@small_dtypes
def test_materialised_rows_are_what_was_read(dtype: torch.dtype) -> None:
    group = make_group(td.Adam(), dtype)
    ids = torch.arange(50)
    group.insert(0, ids)
    before = group.read(0, ids)
    assert group.materialize() == 50
    assert torch.equal(group.read(0, ids), before)
    default = group.read(0, torch.tensor([99]))
    assert torch.equal(default, default.to(dtype).float())


@small_dtypes
def test_small_updates_are_lost_to_nearest_only(dtype: torch.dtype) -> None:
    """A thousand steps of a hundredth of the last bit."""
    ulp = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    moved = {}
    for stochastic in (True, False):
        table = td.TableConfig("t", DIM, initializer=td.Constant(1.0), dtype=dtype)
        config = td.SGD(lr=1.0, stochastic_rounding=stochastic)
        group = td.TableGroup([table], optimizer=config, max_rows=100, seed=3)
        ids = torch.arange(100)
        for _ in range(1000):
            step(group, ids, torch.full((100, DIM), -ulp / 100))
        moved[stochastic] = (group.read(0, ids) - 1) / ulp
    assert float(moved[False].abs().max()) == 0
    assert abs(float(moved[True].mean()) - 10) < 0.5


def regression_loss(module: td.DynamicEmbedding, steps: int = 300) -> float:
    """Mean squared error of rows that are fitted to targets by noisy gradients."""
    targets = torch.randn(200, 16, generator=seeded(5))
    for number in range(steps):
        generator = seeded(number)
        ids = torch.randint(200, (64,), generator=generator)
        noise = 0.1 * torch.randn(64, 16, generator=generator)
        (module(ids) - targets[ids] + noise).square().sum().backward()
        module.optimizer.step()
    return float((module.group.read(0, torch.arange(200)) - targets).square().mean())


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.uint8),
        (torch.bfloat16, torch.uint8),
    ],
    ids=str,
)
def test_training_is_as_good_as_in_float32(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    def loss(rows: torch.dtype, state: torch.dtype) -> float:
        config = td.Adam(lr=0.05, betas=(0.9, 0.99), state_dtype=state)
        return regression_loss(td.DynamicEmbedding(16, name="t", optimizer=config, dtype=rows))

    full = loss(torch.float32, torch.float32)
    assert full < 0.01
    assert loss(dtype, state_dtype) < 1.5 * full


# -- state -----------------------------------------------------------------------------------------


def decoded(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """8-bit floats as their definition has them: exponent and three bits of mantissa."""
    magnitude = (codes & 0x7F if signed else codes).double()
    exponent, mantissa = magnitude.div(8, rounding_mode="floor"), magnitude % 8
    value = torch.exp2(exponent - (15 if signed else 31)) * (1 + mantissa / 8)
    value = torch.where(magnitude == 0, 0.0, value) * scales.double()
    return torch.where((codes & 0x80).bool(), -value, value) if signed else value


@pytest.mark.parametrize("dim", [6, 128, 200])
def test_block_state(dim: int) -> None:
    """After one step m = 0.1 g and v = 0.001 g^2, as near as the codes allow."""
    group = make_group(
        td.Adam(lr=0.01, state_dtype=torch.uint8), torch.float32, dim=dim, max_rows=300
    )
    ids = torch.arange(300)
    gradient = torch.randn(300, dim, generator=seeded(1)) * torch.logspace(-4, 2, 300)[:, None]
    gradient[:, 1] = 0
    gradient[7] = 0
    step(group, ids, gradient)
    padded, blocks = -(-dim // 4) * 4, -(-dim // 128)
    wanted = [0.1 * gradient.double(), 0.001 * gradient.double().square()]
    for k, signed in ((0, True), (1, False)):
        state = group.rows.state[k][:300]
        assert state.shape[1] == padded + 4 * blocks
        scales = state[:, padded:].contiguous().view(torch.float32).repeat_interleave(128, 1)
        value = decoded(state[:, :dim], scales[:, :dim], signed=signed)
        close = (value - wanted[k]).abs() <= wanted[k].abs() / 8 + scales[:, :dim] * 2.0**-14
        assert bool(close.all())
        assert bool((value[wanted[k] == 0] == 0).all())
        bias = (value.sum() / wanted[k].sum() - 1).abs() if not signed else torch.tensor(0.0)
        assert float(bias) < 0.01
        if not signed:
            assert bool((value[wanted[k] > 0] > 0).all())  # Adam divides by its root


def test_state_dtypes_of_the_tensors() -> None:
    adam = td.Adam(row_steps=True, state_dtype=torch.bfloat16)
    group = make_group(adam, torch.bfloat16)
    assert [t.dtype for t in group.rows.state] == [torch.bfloat16, torch.bfloat16, torch.int32]
    partial = make_group(td.PartialRowWiseAdam(state_dtype=torch.uint8), torch.float16, dim=64)
    assert [(t.dtype, t.shape[1:]) for t in partial.rows.state] == [
        (torch.uint8, (68,)),
        (torch.float32, ()),
    ]


def test_fresh_state_of_less_than_float32() -> None:
    config = td.Adagrad(lr=0.1, initial_accumulator_value=0.5, state_dtype=torch.bfloat16)
    group = make_group(config, torch.float32)
    group.insert(0, torch.arange(3))
    group.materialize()
    group.insert_or_assign(0, torch.tensor([7]), torch.ones(1, DIM))
    assert bool((group.rows.state[0][:4] == 0.5).all())


# -- everything around -----------------------------------------------------------------------------


def test_tables_of_different_dtypes_in_one_group() -> None:
    tables = [
        td.TableConfig("a", 8),
        td.TableConfig("b", 8, dtype=torch.bfloat16),
        td.TableConfig("c", 4, dtype=torch.float16),
    ]
    module = td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adam(lr=0.1), max_rows=100)
    assert [slab.name for slab in module.group.config.slabs] == [
        "dim4_float16",
        "dim8",
        "dim8_bfloat16",
    ]
    ids = {name: torch.tensor([[1, 2], [2, 3]]) for name in "abc"}
    before = module(ids)
    before.sum().backward()
    module.optimizer.step()
    after = module(ids)
    assert after.dtype == torch.float32
    torch.testing.assert_close(before - after, torch.full_like(after, 0.2), rtol=0, atol=0.02)
    state = module.state_dict()
    assert state["dim8_bfloat16.weights"].dtype == torch.bfloat16
    twin = td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adam(lr=0.1), max_rows=100)
    twin.load_state_dict(state)
    assert torch.equal(twin(ids), after)
    other = [td.TableConfig("a", 8), td.TableConfig("b", 8), td.TableConfig("c", 4)]
    wrong = td.DynamicEmbeddingBagCollection(other, optimizer=td.Adam(lr=0.1), max_rows=100)
    with pytest.raises(RuntimeError, match=r"'dtype': 'bfloat16'.*'dtype': 'float32'"):
        wrong.load_state_dict(state)


def test_state_of_another_dtype_is_refused() -> None:
    def module(state_dtype: torch.dtype) -> td.DynamicEmbedding:
        config = td.Adam(state_dtype=state_dtype)
        return td.DynamicEmbedding(4, name="t", optimizer=config, max_rows=10)

    state = module(torch.bfloat16).state_dict()
    with pytest.raises(RuntimeError, match=r"\['exp_avg', False, 'bfloat16'\].*'float32'"):
        module(torch.float32).load_state_dict(state)


@pytest.mark.traced
@small_dtypes
def test_files_frozen_copies_and_exports(dtype: torch.dtype) -> None:
    config = td.Adam(lr=0.1, state_dtype=torch.uint8)
    bag = td.DynamicEmbeddingBag(8, name="t", optimizer=config, dtype=dtype)
    ids = torch.tensor([[1, 2], [3, 1]])
    for _ in range(3):
        bag(ids).sum().backward()
        bag.optimizer.step()
    expected = bag.eval()(ids)
    file = io.BytesIO()
    torch.save(bag, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(ids), expected)
    for module in (bag, twin):
        module.train()
        module(ids).sum().backward()
        module.optimizer.step()
    assert torch.equal(twin.eval()(ids), bag.eval()(ids))
    frozen = td.freeze(bag)
    assert torch.equal(frozen(ids), bag(ids))
    program = torch.export.export(frozen, (ids,))
    assert torch.equal(program.module()(ids), bag(ids))
    static, _ = bag.to_embedding()
    assert static.weight.dtype == torch.float32
    again = td.DynamicEmbeddingBag.from_embedding(
        static.weight.to(dtype), optimizer=config, dtype=dtype
    )
    assert again.group.rows.weights[0].dtype == dtype


def test_moves_of_rows() -> None:
    """Compaction and another table keep the state of small dtypes."""
    tables = [td.TableConfig("a", 8, dtype=torch.bfloat16)]
    config = td.Adam(lr=0.1, state_dtype=torch.uint8, row_steps=True)
    module = td.DynamicEmbeddingBagCollection(tables, optimizer=config, max_rows=100)
    twin = td.DynamicEmbeddingBagCollection(tables, optimizer=config, max_rows=100)
    ids = torch.arange(20)[:, None]
    for each in (module, twin):
        each({"a": ids}).sum().backward()
        each.group.erase(0, torch.arange(10))
    module.group.compact()
    module.add_table(td.TableConfig("b", 8, dtype=torch.bfloat16))
    kept = torch.arange(10, 20)[:, None]
    module({"a": kept, "b": kept}).sum().backward()
    twin({"a": kept}).sum().backward()
    read = torch.arange(10, 20)
    assert torch.equal(module.group.read(0, read), twin.group.read(0, read))


@pytest.mark.traced
@small_dtypes
def test_compiled_equals_eager(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    modules = [
        td.DynamicEmbeddingBag(
            8, name="t", optimizer=td.Adam(lr=0.1), dtype=dtype, output_dtype=dtype, max_rows=100
        )
        for _ in range(2)
    ]
    with torch._inductor.config.patch(force_disable_caches=True):
        functions = [modules[0], torch.compile(modules[1], fullgraph=True)]
        for number in range(3):
            ids = torch.randint(40, (6, 3), generator=seeded(number))
            outputs = [function(ids) for function in functions]
            assert torch.equal(*outputs)
            assert outputs[0].dtype == dtype
            for output in outputs:
                output.float().square().sum().backward()
    assert differences(snapshot(modules[0].group), snapshot(modules[1].group)) == []
    torch._dynamo.reset()


@pytest.mark.parametrize("output_dtype", SMALL, ids=str)
def test_output_dtype(output_dtype: torch.dtype) -> None:
    """Rounded once, from the float32 sum; its gradient is of the same dtype."""
    arguments: dict[str, Any] = {"name": "t", "optimizer": td.SGD(lr=1.0), "max_rows": 100}
    small = td.DynamicEmbeddingBag(8, output_dtype=output_dtype, **arguments)
    full = td.DynamicEmbeddingBag(8, **arguments)
    ids = torch.arange(12).reshape(3, 4)
    output, expected = small(ids), full(ids)
    assert output.dtype == output_dtype
    assert torch.equal(output, expected.to(output_dtype))
    gradient = torch.randn(3, 8, generator=seeded(1)).to(output_dtype)
    output.backward(gradient)
    expected.backward(gradient.float())
    assert torch.equal(small.group.read(0, torch.arange(12)), full.group.read(0, torch.arange(12)))
    assert small.eval()(ids).dtype == output_dtype
    assert td.freeze(small)(ids).dtype == output_dtype


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.traced)])
def test_autocast(is_compiled: bool) -> None:
    """Lookups stay what output_dtype says; weights of ids may come from a layer under autocast."""
    torch._dynamo.reset()
    bag = td.DynamicEmbeddingBag(8, name="t", optimizer=td.Adam(lr=0.1), dtype=torch.bfloat16)
    gate, head = nn.Linear(2, 3), nn.Linear(8, 1)

    def loss(ids: Tensor, features: Tensor) -> Tensor:
        return head(bag(ids, per_sample_weights=gate(features))).float().square().sum()

    function = torch.compile(loss, fullgraph=True) if is_compiled else loss
    ids = torch.arange(6).reshape(2, 3)
    before = bag.group.read(0, torch.arange(6))
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        assert bag(ids).dtype == torch.float32
        assert gate(torch.ones(2, 2)).dtype == torch.bfloat16
        function(ids, torch.ones(2, 2)).backward()
    assert gate.weight.grad is not None
    assert float(gate.weight.grad.abs().sum()) > 0
    assert not torch.equal(bag.group.read(0, torch.arange(6)), before)
    torch._dynamo.reset()


def test_bfloat16_rows_with_rowwise_adagrad_take_about_half() -> None:
    taken = {}
    for dtype in (torch.float32, torch.bfloat16):
        module = td.DynamicEmbedding(128, optimizer=td.RowWiseAdagrad(lr=0.1), dtype=dtype)
        module(torch.arange(1000))
        memory = module.memory()
        taken[dtype] = memory["rows"] + memory["state"]
    assert taken[torch.float32] == 1000 * (4 * 128 + 4 + 4)
    assert taken[torch.bfloat16] <= 0.52 * taken[torch.float32]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float64])
def test_rows_that_cannot_be_trained(dtype: torch.dtype) -> None:
    message = rf"dtype is {dtype}, expected one of .*: rows of other types cannot be trained"
    with pytest.raises(TypeError, match=message):
        td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), dtype=dtype)
    with pytest.raises(TypeError, match=message):
        td.TableConfig("t", 4, dtype=dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: td.SGD(lr=0.1, state_dtype=torch.bfloat16), "state_dtype"),
        (
            lambda: td.Adagrad(0.1, state_dtype=torch.uint8),
            r"state_dtype is torch\.uint8, expected",
        ),
        (
            lambda: td.Adam(state_dtype=torch.float16),
            r"state_dtype is torch\.float16, expected one",
        ),
    ],
)
def test_state_dtypes_that_do_not_exist(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@small_dtypes
def test_conversion_of_a_module_is_refused(dtype: torch.dtype) -> None:
    module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    with pytest.raises(TypeError, match=r"rows keep the dtype they were constructed with"):
        module.to(dtype)
