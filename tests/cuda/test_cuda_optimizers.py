"""Optimizers, storage of rows and split mode on a GPU, emulated or real, against the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from emulated_groups import different_state, emulated_cuda
from emulator.mode import launches, set_capturing, set_seed
from group_calls import Call, bag_lookup, call_of, read_bags, same_bits
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Hyper, Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients, merge_grad_
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.own_device

OPTIMIZERS: list[OptimizerConfig] = [
    td.SGD(lr=0.5, weight_decay=0.125),
    td.MomentumSGD(lr=0.1, nesterov=True),
    td.Adagrad(lr=0.5, initial_accumulator_value=0.5),
    td.RowWiseAdagrad(lr=0.5, initial_accumulator_value=0.5, weight_decay=0.125),
    td.Adam(lr=0.1),
    td.AdamW(lr=0.1, weight_decay=0.25),
    td.AdamWTF(lr=0.01),
    td.AMSGrad(lr=0.01),
    td.SmartDecayAdam(lr=0.1),
    td.PartialRowWiseAdam(lr=0.1),
    td.LAMB(lr=0.1, weight_decay=0.1),
    td.PartialRowWiseLAMB(lr=0.1, weight_decay=0.1),
    td.LARSSGD(lr=0.5, trust_coefficient=0.5, weight_decay=0.125),
    td.Ftrl(lr=0.5, l1=0.1, l2=0.1, beta=1.0),
    td.GroupFtrl(lr=0.5, l1=0.01, group_l1=0.1),
]
# Sums over a row are rounded in another order than on the CPU.
SUMMED = (
    td.RowWiseAdagrad,
    td.PartialRowWiseAdam,
    td.LAMB,
    td.PartialRowWiseLAMB,
    td.LARSSGD,
    td.GroupFtrl,
)
SEEDS = [0, 1, 5]  # orders of threads on the emulator; 0: ascending


@pytest.fixture(autouse=True)
def order_of_threads() -> Iterator[None]:
    set_seed(5)
    yield
    set_seed(0)
    set_capturing(False)


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.cuda)])
def gpu(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def name_of(value: Any) -> str:
    return value.name if isinstance(value, OptimizerConfig) else str(value)


class Pair:
    """The same training on a group of the CPU and one of a GPU.

    Args:
        slabs: dim and dtype of the rows of each table.
        rounded: floats need only be close.
    """

    def __init__(
        self,
        gpu: str,
        optimizer: OptimizerConfig,
        slabs: list[tuple[int, torch.dtype]],
        *,
        rounded: bool | None = None,
        **arguments: Any,
    ) -> None:
        self.rounded = isinstance(optimizer, SUMMED) if rounded is None else rounded
        self.on_gpu = emulated_cuda if gpu == "emulated" else partial(torch.device, "cuda")
        initializers = [td.Uniform(-1.0, 1.0), td.Normal(), td.TruncatedNormal(std=0.5)]
        tables = [
            td.TableConfig(
                f"table{number}",
                dim,
                dtype=dtype,
                initializer=initializers[number % 3],
                padding_idx=7 if number == 1 else None,
            )
            for number, (dim, dtype) in enumerate(slabs)
        ]
        arguments = {"optimizer": optimizer, "seed": 3, "max_rows": 600, **arguments}
        self.cpu = td.TableGroup(tables, device="cpu", **arguments)
        with self.on_gpu():
            self.gpu = td.TableGroup(tables, **arguments)

    def groups(self) -> list[td.TableGroup]:
        return [self.cpu, self.gpu]

    def forward(self, group: td.TableGroup, call: Call, **arguments: Any) -> Tensor:
        ids, offsets = call.ids.to(group.device), call.offsets.to(group.device)
        return bag_lookup(group, call._replace(ids=ids, offsets=offsets), **arguments)

    def train(
        self,
        call: Call,
        *,
        pooling: Pooling = Pooling.SUM,
        weighted: bool = False,
        gradient: Tensor | None = None,
    ) -> None:
        """One lookup and its backward on both; the outputs must be equal."""
        count = call.ids.numel()
        weights = torch.linspace(0.5, 1.5, count, device="cpu") if weighted else None

        def step(group: td.TableGroup) -> Tensor:
            on_device = None if weights is None else weights.to(group.device)
            output = self.forward(group, call, pooling=pooling, weights=on_device)
            given = gradient
            if given is None:
                given = torch.linspace(-1.0, 1.0, output.numel(), device="cpu") ** 3
            output.backward(given.to(group.device).reshape(output.shape))
            group.index.clock[0] += 1
            return output.detach().cpu()

        with torch.device("cpu"):
            expected = step(self.cpu)
        with self.on_gpu():
            given = step(self.gpu)
            self.raise_errors()
        if self.rounded:
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
        else:
            assert same_bits(given, expected)

    def raise_errors(self) -> None:
        """What the device has found wrong; the step goes on."""
        torch.ops.dynemb.raise_device_errors(self.gpu.device.index or 0)

    def apply(self) -> None:
        """The step of split mode, as ``SplitOptimizer`` does it."""
        for group, device in ((self.cpu, partial(torch.device, "cpu")), (self.gpu, self.on_gpu)):
            with device():
                pending = PendingGradients.of(group.rows.pending)
                merge_grad_(pending, group.rows.row_clock)
                tables = len(group.config.tables)
                updates = group.rows.row_clock[tables + RowClock.UPDATES].reshape(1).clone()
                assert group.config.optimizer is not None
                update = getattr(torch.ops.dynemb, f"{group.config.optimizer.op_name}_update_")
                counts = pending.counts[:, 0].contiguous()
                update(
                    *group.rows.updated,
                    *pending[:-1],
                    counts,
                    updates,
                    list(range(tables)),
                )
                pending.counts.zero_()
                group.end_step()

    def set_hyper(self, column: Hyper, value: float) -> None:
        for group in self.groups():
            group.rows.hyper[:, column] = value

    def check_state(self) -> None:
        with torch.device("cpu"):
            self.cpu.materialize()
        with self.on_gpu():
            self.gpu.materialize()
        assert different_state(self.cpu, self.gpu, rounded=self.rounded) == []

    def row_clock(self) -> list[int]:
        on_cpu, on_gpu = (group.rows.row_clock.tolist() for group in self.groups())
        assert on_cpu == on_gpu
        return on_cpu


def random_call(pair: Pair, seed: int, distinct: int = 40) -> Call:
    """A feature per table, bags of 0 to 9 ids."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    features = []
    for table in range(len(pair.cpu.config.tables)):
        ids = torch.randint(0, distinct, (10, 9), generator=generator, device="cpu") * 7919 - 50
        features.append((table, [row[:length].tolist() for length, row in enumerate(ids)]))
    with torch.device("cpu"):
        return call_of(pair.cpu, features)


def train_a_while(pair: Pair, steps: int = 3) -> None:
    for step in range(steps):
        call = random_call(pair, step, distinct=30 * (step + 1))
        pair.train(call, pooling=Pooling(step % 2), weighted=step == 1)
        pair.check_state()


FLOAT32 = torch.float32


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
            handles = group.find_or_insert(
                ids, torch.tensor([0, 1, 2, 3, 4], device=group.device), [0, 1, 2, 4]
            )
            output = td.ops.embedding(
                group.rows,
                ids,
                handles,
                torch.tensor([0, 1, 2, 3, 4], device=group.device),
                torch.zeros(1, requires_grad=True, device=group.device),
                feature_tables=[0, 1, 2, 4],
                dim=8,
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
            torch.ops.dynemb.adam_update_(*rows.updated, *pending[:-1], counts, updates, [0, 1])
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


# -- split mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_split_mode(optimizer: OptimizerConfig, seed: int, gpu: str) -> None:
    """Two lookups, then one step, several times."""
    set_seed(seed)
    pair = Pair(gpu, optimizer, [(3, FLOAT32), (8, FLOAT32), (132, FLOAT32)], split=True)
    for step in range(3):
        for lookup in range(2):
            call = random_call(pair, 2 * step + lookup, distinct=20 * (step + 1))
            pair.train(call, pooling=Pooling(step % 2), weighted=lookup == 1)
        pair.apply()
        pair.check_state()
        pair.row_clock()


def check_pending(pair: Pair) -> list[int]:
    """Entries of each slab, which must be equal bit for bit."""
    on_cpu, on_gpu = (PendingGradients.of(group.rows.pending) for group in pair.groups())
    assert torch.equal(on_cpu.counts, on_gpu.counts.cpu())
    counts: list[int] = on_cpu.counts[:, 0].tolist()
    for slab, count in enumerate(counts):
        for of_cpu, of_gpu in zip(on_cpu[:-1], on_gpu[:-1], strict=True):
            assert same_bits(of_gpu[slab][:count].cpu(), of_cpu[slab][:count])
    return counts


def merge_both(pair: Pair) -> None:
    for group, device in ((pair.cpu, partial(torch.device, "cpu")), (pair.gpu, pair.on_gpu)):
        with device():
            merge_grad_(PendingGradients.of(group.rows.pending), group.rows.row_clock)


def test_pending_entries(gpu: str) -> None:
    """As lookups append and merging sums them; rows that change their owner between."""
    pair = Pair(gpu, td.SGD(lr=0.5), [(4, FLOAT32), (5, torch.bfloat16)], split=True)
    for number in range(4):
        pair.train(random_call(pair, number, distinct=25))
        check_pending(pair)
        for group, device in ((pair.cpu, partial(torch.device, "cpu")), (pair.gpu, pair.on_gpu)):
            with device():
                ids = torch.arange(number, 25, 5, device=group.device) * 7919 - 50
                group.erase(0, ids)
    merge_both(pair)
    counts = check_pending(pair)
    assert 0 < counts[1] <= 25
    assert pair.row_clock()[2 + RowClock.STALE] > 0
    merge_both(pair)  # nothing to do
    assert check_pending(pair) == counts
    pair.apply()
    pair.check_state()


def test_pending_entries_of_more_lookups_than_there_is_room(gpu: str) -> None:
    """Merging makes room: there are no more rows than half the entries."""
    pair = Pair(gpu, td.SGD(lr=0.5), [(4, FLOAT32)], split=True, max_rows=32)
    for number in range(7):
        pair.train(random_call(pair, number, distinct=16))
    merge_both(pair)
    assert check_pending(pair)[0] <= 32
    pair.apply()
    pair.check_state()


def test_memory_for_pending_entries_grows(gpu: str) -> None:
    """Pages of 2 MiB, and no error."""
    pair = Pair(gpu, td.SGD(lr=0.5), [(256, FLOAT32)], split=True, max_rows=60_000)
    with torch.device("cpu"):
        call = call_of(pair.cpu, [(0, [list(range(4000))])])
    for _ in range(3):
        for _ in range(2):
            pair.train(call)
        pair.apply()
    pair.check_state()


def test_one_lookup_needs_no_merge() -> None:
    pair = Pair("emulated", td.SGD(lr=0.5), [(8, FLOAT32)], split=True)
    for _ in range(2):
        pair.train(random_call(pair, 1))
        before = launches()
        with pair.on_gpu():
            merge_grad_(PendingGradients.of(pair.gpu.rows.pending), pair.gpu.rows.row_clock)
        assert launches() == before
        pair.apply()


def test_captured_lookups_have_room_for_three_replays() -> None:
    """Capture is a flag on the emulator: what the host prepares, and calls that follow."""
    pair = Pair("emulated", td.SGD(lr=0.5), [(256, FLOAT32)], split=True, max_rows=60_000)
    with torch.device("cpu"):
        call = call_of(pair.cpu, [(0, [list(range(1000))])])
    pair.train(call)
    pair.apply()
    set_capturing(True)
    with pair.on_gpu():
        pair.forward(pair.gpu, call).sum().backward()
    set_capturing(False)
    with pair.on_gpu():
        pending = PendingGradients.of(pair.gpu.rows.pending)
        pending.gradients[0][2999].fill_(1.0)  # mapped, or the process would end here
        for _ in range(3):
            pair.forward(pair.gpu, call).sum().backward()
        pair.raise_errors()
        merge_grad_(pending, pair.gpu.rows.row_clock)
        assert pending.counts.tolist() == [[1000, 1]]
        assert torch.all(pending.gradients[0][:1000] == 4.0)


def test_gradients_that_do_not_fit_are_an_error() -> None:
    """Tensors that were not reserved: nothing is appended."""
    pair = Pair("emulated", td.SGD(lr=0.5), [(4, FLOAT32), (5, FLOAT32)], split=True)
    call = random_call(pair, 0)
    pair.train(call)
    pending = PendingGradients.of(pair.cpu.rows.pending)
    handles, ids, tables, gradients = (
        [tensor[:10].clone() for tensor in tensors] for tensors in pending[:-1]
    )
    small = PendingGradients(handles, ids, tables, gradients, torch.zeros(2, 2, dtype=torch.int64))
    rows = pair.cpu.rows._replace(pending=small.flat())
    handles_of_call = pair.cpu.find(call.ids, call.offsets, call.tables).handles
    with pair.on_gpu():
        output = td.ops.embedding_bag(
            rows,
            call.ids,
            handles_of_call,
            call.offsets,
            None,
            torch.zeros(1, requires_grad=True),
            feature_tables=call.tables,
            feature_dims=call.dims,
            pooling=Pooling.SUM,
            optimizer=pair.cpu.config.optimizer_code,
        )
        output.sum().backward()
        with pytest.raises(RuntimeError, match=r"accumulate_grad_: row slab 0 has no room"):
            pair.raise_errors()
    assert small.counts.tolist() == [[0, 0], [0, 0]]


def test_gradients_of_weights_are_of_the_rows_of_the_forward() -> None:
    pair = Pair("emulated", td.SGD(lr=0.5), [(4, FLOAT32)], split=True)
    call = random_call(pair, 0)
    pair.train(call)
    with pair.on_gpu():
        weights = torch.ones(call.ids.numel())
        output = pair.forward(pair.gpu, call, weights=weights)
    pair.apply()
    with pair.on_gpu():
        output.sum().backward()
        with pytest.raises(RuntimeError, match="gradients of per_sample_weights no longer fit"):
            pair.raise_errors()
        assert pair.gpu.rows.pending[-1].tolist() == [[0, 0]]
