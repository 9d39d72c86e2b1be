"""Optimizers and storage of rows on a GPU, emulated or real, against the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from emulator.mode import set_seed
from group_calls import Call, call_of, read_bags, same_bits
from optimizer_pairs import FLOAT32, OPTIMIZERS, SEEDS, Pair, name_of, random_call
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Hyper, Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.optim import OptimizerConfig

pytestmark = [pytest.mark.own_device, pytest.mark.usefixtures("order_of_threads")]


def train_a_while(pair: Pair, steps: int = 3) -> None:
    for step in range(steps):
        call = random_call(pair, step, distinct=30 * (step + 1))
        pair.train(call, pooling=Pooling(step % 2), weighted=step == 1)
        pair.check_state()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_optimizers(optimizer: OptimizerConfig, seed: int, gpu: str) -> None:
    set_seed(seed)
    pair = Pair(gpu, optimizer, [(3, FLOAT32), (8, FLOAT32), (132, FLOAT32)])
    train_a_while(pair)
    pair.row_clock()


ROW_STEPS = [
    replace(config, row_steps=True)
    for config in OPTIMIZERS
    if isinstance(config, td.Adam) and not isinstance(config, td.SmartDecayAdam)
]


@pytest.mark.parametrize("optimizer", ROW_STEPS, ids=name_of)
def test_steps_of_rows(optimizer: OptimizerConfig, gpu: str) -> None:
    pair = Pair(gpu, optimizer, [(8, FLOAT32), (5, FLOAT32)])
    train_a_while(pair)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_rows_below_float32(
    optimizer: OptimizerConfig, dtype: torch.dtype, stochastic: bool, gpu: str
) -> None:
    config = replace(optimizer, stochastic_rounding=stochastic)
    # a sum that is rounded otherwise may round a weight to the next value
    pair = Pair(gpu, config, [(3, dtype), (8, dtype), (132, FLOAT32)])
    if pair.rounded:
        pair.train(random_call(pair, 0))
        check_close(pair, 2.0**-7 if dtype == torch.bfloat16 else 2.0**-9)
    else:
        train_a_while(pair)


def check_close(pair: Pair, tolerance: float) -> None:
    """Weights within a unit or two in the last place of their dtype."""
    with torch.device("cpu"):
        pair.cpu.materialize()
    with pair.on_gpu():
        pair.gpu.materialize()
    for slab, (on_cpu, on_gpu) in enumerate(
        zip(pair.cpu.rows.weights, pair.gpu.rows.weights, strict=True)
    ):
        used = pair.cpu.index.used_rows(slab)
        torch.testing.assert_close(
            on_gpu[:used].float().cpu(), on_cpu[:used].float(), rtol=tolerance, atol=tolerance / 8
        )


def test_slabs_of_one_dim(gpu: str) -> None:
    """Which rows a feature reads and updates is for its table to say, not for its dim."""
    dtypes = [torch.bfloat16, FLOAT32, torch.float16, FLOAT32, FLOAT32]
    pair = Pair(gpu, td.Adagrad(lr=0.5), list(zip([8, 8, 8, 5, 8], dtypes, strict=True)))
    train_a_while(pair)
    for group, device in ((pair.cpu, partial(torch.device, "cpu")), (pair.gpu, pair.on_gpu)):
        with device():
            ids = torch.tensor([1, 7869, 7, 5], device=group.device)
            offsets = torch.tensor([0, 1, 2, 3, 4], device=group.device)
            batch = td.ops.LookupBatch.of_rows(ids, offsets, [0, 1, 2, 4], 8)
            handles = group.find_or_insert(*batch.index_arguments)
            output = td.ops.embedding(
                group.rows,
                batch,
                handles,
                torch.zeros(1, requires_grad=True, device=group.device),
                optimizer=group.config.optimizer_code,
            )
            output.sum().backward()
    pair.check_state()
    call = random_call(pair, 9)
    with torch.device("cpu"):
        expected = read_bags(pair.cpu, call)
    with pair.on_gpu():
        on_device = call._replace(
            ids=call.ids.to(pair.gpu.device), offsets=call.offsets.to(pair.gpu.device)
        )
        assert same_bits(read_bags(pair.gpu, on_device).cpu(), expected)


STATE_OPTIMIZERS = [config for config in OPTIMIZERS if config.element_state]
BLOCK_OPTIMIZERS = [config for config in OPTIMIZERS if isinstance(config, td.Adam)]


@pytest.mark.parametrize("optimizer", STATE_OPTIMIZERS, ids=name_of)
def test_state_of_bfloat16(optimizer: OptimizerConfig, gpu: str) -> None:
    """Rows of two dtypes beside it."""
    config = replace(optimizer, state_dtype=torch.bfloat16)  # type: ignore[call-arg]
    pair = Pair(gpu, config, [(3, torch.bfloat16), (8, FLOAT32), (132, FLOAT32)])
    if pair.rounded:
        pair.train(random_call(pair, 0))
        check_close(pair, 2.0**-6)
    else:
        train_a_while(pair)


@pytest.mark.parametrize("optimizer", BLOCK_OPTIMIZERS, ids=name_of)
def test_state_of_8_bits(optimizer: OptimizerConfig, gpu: str) -> None:
    config = replace(optimizer, state_dtype=torch.uint8)  # type: ignore[call-arg]
    pair = Pair(gpu, config, [(3, FLOAT32), (8, torch.float16), (132, FLOAT32)])
    if pair.rounded:
        pair.train(random_call(pair, 0))
        check_close(pair, 2.0**-8)
    else:
        train_a_while(pair)


@pytest.mark.parametrize("dim", [1, 2, 4, 7, 12, 30, 64, 65, 127, 128, 129, 132, 256, 257, 516])
def test_dims_of_8_bit_state(dim: int, gpu: str) -> None:
    """Blocks of 128 columns in rows of any width."""
    config = td.Adam(lr=0.1, state_dtype=torch.uint8, row_steps=True)
    pair = Pair(gpu, config, [(dim, torch.bfloat16)], max_rows=100)
    train_a_while(pair)


@pytest.mark.parametrize("dim", [1, 5, 8, 128, 131, 132, 260])
def test_dims_with_sums_and_clipping(dim: int, gpu: str) -> None:
    config = td.LAMB(lr=0.1, weight_decay=0.1, clip_norm=0.5, clip_value=0.4)
    train_a_while(Pair(gpu, config, [(dim, FLOAT32)], max_rows=100))


# -- what is done to gradients -------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer", [td.SGD(lr=0.5), td.Adam(lr=0.1), td.LAMB(lr=0.1)], ids=name_of
)
def test_clipping_and_scaling(optimizer: OptimizerConfig, gpu: str) -> None:
    pair = Pair(gpu, replace(optimizer, clip_value=0.3), [(8, FLOAT32), (5, FLOAT32)])
    pair.set_hyper(Hyper.DOWN_SCALE_BY, 4.0)
    train_a_while(pair)
    # factors of 1 have the CPU's bits, others are of a sum over the row
    for limit, rounded in ((1000.0, pair.rounded), (0.5, True)):
        config = replace(optimizer, clip_norm=limit)
        train_a_while(Pair(gpu, config, [(8, FLOAT32), (132, FLOAT32)], rounded=rounded))


def non_finite_call(pair: Pair) -> tuple[Call, Tensor]:
    """Rows of which some get NaN or infinity."""
    with torch.device("cpu"):
        call = call_of(pair.cpu, [(0, [[1], [2], [3], [1, 4]]), (1, [[5], [6], [7], [8]])])
        gradient = torch.linspace(-1.0, 1.0, 4 * sum(call.dims)).reshape(4, -1)
        gradient[1, 3] = float("nan")
        gradient[2, call.dims[0] + 1] = float("inf")
        gradient[3, call.dims[0] + 2] = -float("inf")
    return call, gradient


@pytest.mark.parametrize("seed", SEEDS)
def test_non_finite_gradients_are_skipped(seed: int, gpu: str) -> None:
    set_seed(seed)
    for optimizer in (td.Adam(lr=0.1, row_steps=True), td.SmartDecayAdam(lr=0.1), td.SGD(lr=0.5)):
        config = replace(optimizer, non_finite="skip")
        pair = Pair(gpu, config, [(8, FLOAT32), (133, FLOAT32)])
        call, gradient = non_finite_call(pair)
        pair.train(call)
        pair.train(call, gradient=gradient)
        pair.check_state()
        assert pair.row_clock()[2 + RowClock.NON_FINITE] == 2  # 7 is padding


def test_rows_that_are_skipped_are_not_written(gpu: str) -> None:
    pair = Pair(gpu, td.Adagrad(lr=0.5, non_finite="skip"), [(8, FLOAT32), (5, FLOAT32)])
    call, gradient = non_finite_call(pair)
    pair.train(call, gradient=gradient)
    for on_cpu, on_gpu in zip(pair.cpu.rows.generations, pair.gpu.rows.generations, strict=True):
        assert torch.equal(on_cpu[:6], on_gpu[:6].cpu())
    pair.check_state()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("split", [False, True], ids=["backward", "split"])
def test_non_finite_gradients_are_an_error(split: bool, seed: int, gpu: str) -> None:
    set_seed(seed)
    config = td.Adam(lr=0.1, non_finite="raise", row_steps=True)
    pair = Pair(gpu, config, [(8, FLOAT32), (5, torch.bfloat16)], split=split)
    call, gradient = non_finite_call(pair)
    pair.train(call)
    if split:
        pair.apply()
    with pair.on_gpu():
        pair.gpu.materialize()
    before = [
        t.clone() for t in (*pair.gpu.rows.weights, *pair.gpu.rows.state, pair.gpu.rows.row_clock)
    ]
    with pair.on_gpu():
        output = pair.forward(pair.gpu, call)
        output.backward(gradient.to(output.device))
        if split:
            rows = pair.gpu.rows
            updates = rows.row_clock[2 + RowClock.UPDATES].reshape(1).clone()
            pending = PendingGradients.of(rows.pending)
            counts = pending.counts[:, 0].contiguous()
            given = (*pending[:-1], counts, updates, [0, 1], config.kernel_number)
            torch.ops.dynemb.apply_grad_(*rows.updated, *given)
            pending.counts.zero_()
            # a lookup that added gradients counts as one since the last step
            before[-1][2 + RowClock.SINCE_STEP] += 1
        with pytest.raises(RuntimeError, match="non_finite is 'raise': no row has been updated"):
            pair.raise_errors()
    after = [*pair.gpu.rows.weights, *pair.gpu.rows.state, pair.gpu.rows.row_clock]
    assert all(same_bits(a[:50], b[:50]) for a, b in zip(before, after, strict=True))
    with torch.device("cpu"):
        pair.cpu.materialize()
    pair.train(call)  # goes on as if nothing had been


def test_a_step_that_is_skipped(gpu: str) -> None:
    pair = Pair(gpu, td.Adam(lr=0.1, non_finite="skip"), [(8, FLOAT32), (5, FLOAT32)])
    call, gradient = non_finite_call(pair)
    pair.train(call)
    pair.set_hyper(Hyper.SKIP_IF, 1.0)
    pair.train(call, gradient=gradient)
    clock = pair.row_clock()
    assert clock[:2] == [1, 1]
    assert clock[2 + RowClock.UPDATES] == 2
    pair.set_hyper(Hyper.SKIP_IF, 0.0)
    pair.train(call)
    pair.check_state()
