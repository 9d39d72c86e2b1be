"""Rows and optimizer state of less than float32: training, state, memory, and the rest."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from group_calls import differences, snapshot
from seeding import seeded
from small_rows import DIM, SMALL, make_group, small_dtypes, step
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.any_device


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
    bag = td.DynamicEmbeddingBag(8, mode="sum", name="t", optimizer=config, dtype=dtype)
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
        static.weight.to(dtype), mode="sum", optimizer=config, dtype=dtype
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


@pytest.mark.long
@pytest.mark.traced
@small_dtypes
def test_compiled_equals_eager(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    modules = [
        td.DynamicEmbeddingBag(
            8,
            mode="sum",
            name="t",
            optimizer=td.Adam(lr=0.1),
            dtype=dtype,
            output_dtype=dtype,
            max_rows=100,
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


@pytest.mark.long_cases("True")
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.traced)])
def test_autocast(is_compiled: bool) -> None:
    """Lookups stay what output_dtype says; weights of ids may come from a layer under autocast."""
    torch._dynamo.reset()
    bag = td.DynamicEmbeddingBag(
        8, mode="sum", name="t", optimizer=td.Adam(lr=0.1), dtype=torch.bfloat16
    )
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


@small_dtypes
def test_conversion_of_a_module_is_refused(dtype: torch.dtype) -> None:
    module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    with pytest.raises(TypeError, match=r"rows keep the dtype they were constructed with"):
        module.to(dtype)
