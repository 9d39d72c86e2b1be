"""Compiled lookups of tables in files: order of the calls, no copies, and the bits of eager ones.

``stage_`` writes rows that are not among its arguments. Ops that read and train them take its
result, so compilers keep the order; rows that no op trains are read in the same call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from execution import threads
from generated_code import ROWS, called_ops, generated_code, table_sized_lines
from group_calls import same_bits
from record_dict import RecordDict
from tiered_pairs import CACHE, SEGMENT
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Tier

pytestmark = pytest.mark.cpu_only("stores are of the CPU")

DIM = 8
Make = Callable[..., td.DynamicEmbedding]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make tables with rows in files, or with ``storage=None`` in memory."""

    def table(**arguments: Any) -> td.DynamicEmbedding:
        path = tmp_path_factory.mktemp("store")
        return td.DynamicEmbedding(
            DIM,
            **{
                "name": "t",
                "optimizer": td.Adam(lr=0.1),
                "initializer": td.Uniform(-1.0, 1.0),
                "max_rows": ROWS,
                "storage": td.SSDStore(path, cache=CACHE, segment=SEGMENT),
                **arguments,
            },
        )

    return table


def test_a_step_stages_once_between_index_and_rows(make: Make) -> None:
    table = make()
    code = generated_code(lambda ids: table(ids))
    index = ["reserve_space_", "find_or_insert_"]
    assert called_ops(code) == [*index, "stage_", "embedding_forward", "embedding_backward_"]
    assert table_sized_lines(code) == []


@pytest.mark.long
def test_two_modules_in_one_graph(make: Make) -> None:
    one, other = make(), make(name="other", optimizer=td.SGD(lr=0.1))
    code = generated_code(lambda ids: one(ids) * other(ids + 7))
    calls = called_ops(code)
    assert calls[:8].count("stage_") == calls.count("stage_") == 2
    order = ["reserve_space_", "find_or_insert_", "stage_", "embedding_forward"]
    for before, name in itertools.pairwise(order):
        for k in (1, 2):  # the k-th call of the one comes after the k-th call of the other
            ends = [i for i, call in enumerate(calls) if call == name]
            begins = [i for i, call in enumerate(calls) if call == before]
            assert begins[k - 1] < ends[k - 1]
    assert table_sized_lines(code) == []


@pytest.mark.long
def test_a_table_that_is_looked_up_twice(make: Make) -> None:
    table = make(split=True)
    code = generated_code(lambda ids: table(ids) * table(ids + 7))
    calls = called_ops(code)
    assert [call for call in calls if call != "embedding_forward"][:6] == [
        *("reserve_space_", "find_or_insert_", "stage_") * 2
    ]
    assert calls.count("stage_") == calls.count("reserve_space_") == 2
    assert calls.count("accumulate_grad_") == 2
    assert table_sized_lines(code) == []


@pytest.mark.long
def test_a_lookup_whose_result_nobody_wants_is_staged(make: Make) -> None:
    """Ids are counted and have rows from then on, as in eager code."""
    table, other = make(), make(name="other")

    def step(ids: Tensor) -> Tensor:
        other(ids)
        return table(ids)

    calls = called_ops(generated_code(step))
    assert calls.count("stage_") == calls.count("find_or_insert_") == 2
    assert len(other) == len(table) == 60


@pytest.mark.long
def test_checkpointing_stages_once(make: Make) -> None:
    table, dense = make(), torch.nn.Linear(DIM, 2)

    def body(ids: Tensor) -> Tensor:
        return dense(table(ids).tanh())

    code = generated_code(lambda ids: checkpoint(body, ids, use_reentrant=False))
    calls = called_ops(code)
    assert calls.count("stage_") == calls.count("find_or_insert_") == 1
    assert calls.count("reserve_space_") == 1
    assert calls.count("embedding_forward") == 2
    assert table_sized_lines(code) == []


def trained(tables: list[td.DynamicEmbedding], ids: int = 800) -> None:
    """The same rows in all of them, of which files have the most."""
    for batch in torch.arange(ids).split(40):
        for table in tables:
            table(batch).square().sum().backward()
            table.optimizer.step()


@pytest.mark.long
@pytest.mark.parametrize("count", [40, 500])
def test_rows_that_are_read_do_not_lose_their_slots_before(make: Make, count: int) -> None:
    """Inductor put off what is large, until after a later lookup had taken the slots."""
    plain, table = make(storage=None), make()
    trained([plain, table])
    for module in (plain, table):
        module.eval()

    def read(module: td.DynamicEmbedding, ids: Tensor) -> tuple[Tensor, Tensor]:
        first, second = module(ids), module(ids + 300)
        largest = second.amax(0)
        return first * 1, largest

    compiled = torch.compile(lambda ids: read(table, ids), fullgraph=True)
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        results, codes = run_and_get_code(compiled, torch.arange(count))
        for first in (0, 7):
            expected = read(plain, torch.arange(first, first + count))
            results = compiled(torch.arange(first, first + count))
            assert all(map(same_bits, results, expected))
    assert called_ops("\n".join(codes)).count("staged_lookup_") == 2
    assert "stage_" not in called_ops("\n".join(codes))


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.long
def test_compiled_training_has_the_bits_of_eager_training_in_memory(
    make: Make, split: bool
) -> None:
    plain, table = make(storage=None, split=split), make(split=split)
    torch._dynamo.reset()
    compiled = torch.compile(table, fullgraph=True)
    for step in range(12):
        ids = (torch.arange(50) * (1 + step % 3) + 37 * step) % 300
        outputs = plain(ids), compiled(ids)
        assert same_bits(*outputs)
        weights = torch.linspace(-1, 1, outputs[0].numel()).reshape(outputs[0].shape)
        for output, module in zip(outputs, (plain, table), strict=True):
            (output * weights).sum().backward()
            module.optimizer.step()
        if step % 3 == 2:
            table.prefetch(ids + 37)
    assert same_bits(
        plain.eval()(torch.arange(400)), torch.compile(table.eval())(torch.arange(400))
    )
    tiers = table.group.tables.tiers
    assert tiers is not None
    assert int(tiers.tensors.clock[1, Tier.WRITTEN]) > 100


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing(make: Make, use_reentrant: bool) -> None:
    policy = td.Policy(score="frequency", capacity=200)
    plain, table = make(storage=None, policy=policy), make(policy=policy)
    for step in range(8):
        ids = (torch.arange(60) * (1 + step % 3) + 37 * step) % 300
        outputs = []
        for module in (plain, table):
            shift = torch.zeros(1, requires_grad=True)
            output = checkpoint(
                lambda ids, shift, module=module: module(ids).square() + shift,
                ids,
                shift,
                use_reentrant=use_reentrant,
                determinism_check="none",
            )
            output.sum().backward()
            module.optimizer.step()
            outputs.append(output.detach())
        assert same_bits(*outputs)
    assert torch.equal(plain.group.index.buckets, table.group.index.buckets)
    assert same_bits(plain.eval()(torch.arange(400)), table.eval()(torch.arange(400)))


def test_a_live_table_is_not_exported(make: Make) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = make()

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    for model in (Model(), Model().eval()):
        with pytest.raises(RuntimeError, match="a live table cannot be exported"):
            torch.export.export(model, (torch.arange(3),), strict=False)


def test_a_store_in_python_is_not_compiled() -> None:
    table = td.DynamicEmbedding(
        DIM, optimizer=td.SGD(lr=0.1), storage=td.ExternalStore(RecordDict(), cache=CACHE)
    )
    for module in (table, table.eval()):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="tables with an ExternalStore cannot be compiled"):
            torch.compile(module, fullgraph=True)(torch.arange(3))


@pytest.mark.parametrize("name", ["places", "slots", "free_slots"])
def test_copies_of_a_cache_are_refused(make: Make, name: str) -> None:
    table = make()
    ids = torch.arange(4)
    table(ids).sum().backward()
    group = table.group
    tiers = group.tables.tiers
    assert tiers is not None
    copied = tiers.tensors._replace(**{name: [t.clone() for t in getattr(tiers.tensors, name)]})
    offsets = torch.tensor([0, 4])
    handles = group.find(ids, offsets, [0]).handles
    staged = ops.StagedIds(group.index.meta, ids, handles, offsets, [0])
    with pytest.raises(RuntimeError, match="are not those that the store of tier_clock was opened"):
        ops.stage_(copied, staged, trains=True)
    ops.stage_(tiers.tensors, staged, trains=True)
