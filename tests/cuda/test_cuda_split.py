"""Split mode on a GPU, emulated or real, against the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from emulator.mode import launches, set_capturing, set_seed
from group_calls import call_of, same_bits, take_rows
from optimizer_pairs import FLOAT32, OPTIMIZERS, SEEDS, Pair, name_of, random_call

import torch_dynemb as td
from torch_dynemb.ops.columns import Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients, merge_grad_
from torch_dynemb.optim import OptimizerConfig

pytestmark = [pytest.mark.own_device, pytest.mark.usefixtures("order_of_threads")]


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
            merge_grad_(PendingGradients.of(group.rows.pending), group.rows)


def test_pending_entries(gpu: str) -> None:
    """As lookups append and merging sums them; rows that change their owner between."""
    pair = Pair(gpu, td.SGD(lr=0.5), [(4, FLOAT32), (5, torch.bfloat16)], split=True)
    for number in range(4):
        pair.train(random_call(pair, number, distinct=25))
        check_pending(pair)
        for group, device in ((pair.cpu, partial(torch.device, "cpu")), (pair.gpu, pair.on_gpu)):
            with device():
                ids = torch.arange(number, 25, 5, device=group.device) * 7919 - 50
                take_rows(group, 0, ids)
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


@pytest.mark.long
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
            merge_grad_(PendingGradients.of(pair.gpu.rows.pending), pair.gpu.rows)
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
        merge_grad_(pending, pair.gpu.rows)
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
        output = td.ops.embedding(
            rows,
            call.batch(),
            handles_of_call,
            torch.zeros(1, requires_grad=True),
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
