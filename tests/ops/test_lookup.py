"""Lookups at the level of ops, against gather and autograd of plain PyTorch."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from execution import threads
from group_calls import (
    Call,
    bag_lookup,
    call_of,
    differences,
    flat_call,
    read_bags,
    same_bits,
    snapshot,
    train,
)
from seeding import seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.table import lookup as table_lookup

pytestmark = pytest.mark.any_device

POOLINGS = pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN], ids=["sum", "mean"])
PADDING = 3


def make_group(
    dims: tuple[int, ...],
    *,
    padding_idx: int | None = None,
    eval_default: Any = "initial",
    max_rows: int = 5000,
    lr: float = 1.0,
) -> td.TableGroup:
    tables = [
        td.TableConfig(f"t{t}", dim, padding_idx=padding_idx, eval_default=eval_default)
        for t, dim in enumerate(dims)
    ]
    return td.TableGroup(tables, optimizer=td.SGD(lr=lr), max_rows=max_rows, seed=8)


def random_call(group: td.TableGroup, tables: list[int], batch: int, longest: int) -> Call:
    """Bags of 0 to ``longest`` ids below 60."""
    generator = seeded(batch)
    lengths = torch.randint(longest + 1, (len(tables) * batch,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(60, (int(offsets[-1]),), generator=generator)
    return Call(ids, offsets, tables, [group.config.tables[t].embedding_dim for t in tables])


def plain_bags(
    group: td.TableGroup, call: Call, dense: list[Tensor], pooling: Pooling, weights: Tensor | None
) -> Tensor:
    """The lookup with differentiable torch ops; ``dense[t]`` holds the rows of ids 0 to 59."""
    batch = (len(call.offsets) - 1) // len(call.tables)
    columns = []
    for f, table in enumerate(call.tables):
        bags = []
        for b in range(f * batch, (f + 1) * batch):
            members = slice(int(call.offsets[b]), int(call.offsets[b + 1]))
            kept = call.ids[members] != (group.config.tables[table].padding_idx or -1)
            factors = (torch.ones(len(call.ids)) if weights is None else weights)[members][kept]
            rows = dense[table][call.ids[members][kept]] * factors[:, None]
            total = factors.sum() if pooling == Pooling.MEAN and len(rows) > 0 else 1.0
            bags.append(rows.sum(0) / total)
        columns.append(torch.stack(bags) if bags else torch.zeros(0, call.dims[f]))
    return torch.cat(columns, 1)


def dense_rows(group: td.TableGroup) -> list[Tensor]:
    ids = torch.arange(60)
    return [group.read(t, ids).requires_grad_() for t in range(len(group.config.tables))]


# -- pooled --------------------------------------------------------------------------------------


@POOLINGS
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("padding_idx", [None, PADDING], ids=["all", "padding"])
@pytest.mark.parametrize(
    ("batch", "longest"), [(0, 4), (1, 40), (9, 4), (300, 6)], ids=["empty", "long", "few", "many"]
)
def test_bags_equal_plain_torch(
    pooling: Pooling, weighted: bool, padding_idx: int | None, batch: int, longest: int
) -> None:
    """Output, weight gradients and updated rows, with features of mixed dims and shared tables."""
    group = make_group((3, 8, 33, 8), padding_idx=padding_idx)
    call = random_call(group, [2, 0, 1, 0, 3], batch, longest)
    dense = dense_rows(group)
    generator = seeded(1)
    values = torch.rand(len(call.ids), generator=generator) + 0.1
    mine = values.clone().requires_grad_() if weighted else None
    theirs = values.clone().requires_grad_() if weighted else None
    gradient = torch.randn(batch, sum(call.dims), generator=generator)

    expected = plain_bags(group, call, dense, pooling, theirs)
    output = bag_lookup(group, call, pooling=pooling, weights=mine)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    read = read_bags(group, call, pooling=pooling, weights=None if mine is None else mine.detach())
    assert same_bits(read, output.detach())

    output.backward(gradient)
    if expected.requires_grad:
        expected.backward(gradient)
    if mine is not None and theirs is not None:
        wanted = torch.zeros_like(values) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(mine.grad, wanted, rtol=1e-4, atol=1e-4)
    for table, rows in enumerate(dense):
        moved = rows if rows.grad is None else rows - rows.grad  # SGD with lr 1
        after = group.read(table, torch.arange(60))
        torch.testing.assert_close(after, moved, rtol=1e-4, atol=1e-4)


@POOLINGS
def test_weight_gradient_equals_finite_differences(pooling: Pooling) -> None:
    group = make_group((4, 5), padding_idx=PADDING)
    call = call_of(group, [(0, [[1, 2, 1], [], [PADDING, 4]]), (1, [[5], [6, 7, 8, 9], [PADDING]])])
    group.find_or_insert(call.ids, call.offsets, call.tables)
    values = torch.rand(len(call.ids), generator=seeded(2)) + 0.5
    gradient = torch.randn(3, 9, generator=seeded(3))
    weights = values.clone().requires_grad_()
    bag_lookup(group, call, pooling=pooling, weights=weights, optimizer=-1).backward(gradient)
    step = 1e-2
    for i in range(len(values)):
        ends = []
        for sign in (-1, 1):
            moved = values.clone()
            moved[i] += sign * step
            output = read_bags(group, call, pooling=pooling, weights=moved)
            ends.append((output.double() * gradient.double()).sum().item())
        assert weights.grad is not None
        assert weights.grad[i].item() == pytest.approx((ends[1] - ends[0]) / (2 * step), abs=2e-3)


def test_weights_without_gradient_need_none() -> None:
    group = make_group((4,))
    call = flat_call(group, 0, torch.arange(5))
    counter = CountOps()
    with counter:
        bag_lookup(group, call, weights=torch.ones(5)).sum().backward()
    assert "bag_weight_grad" not in counter.names


def test_mean_of_weights_that_cancel_is_zero() -> None:
    group = make_group((4,))
    call = call_of(group, [(0, [[1, 2], [1]])])
    weights = torch.tensor([1.0, -1.0, 2.0])
    output = read_bags(group, call, pooling=Pooling.MEAN, weights=weights)
    assert output[0].tolist() == [0.0] * 4
    assert same_bits(output[1], group.read(0, torch.tensor([1]))[0])


def test_a_mean_of_weights_that_sum_to_a_subnormal_number() -> None:
    """Against float64: the reciprocal of the sum exceeds float32."""
    group = make_group((4,))
    ids = torch.arange(7)
    call = call_of(group, [(0, [[0, 1], [2], [3, 4], [5, 6]])])
    group.find_or_insert(call.ids, call.offsets, call.tables)
    rows = group.read(0, ids).double().requires_grad_()
    weights = torch.tensor([1.1e-40, 3e-40, -2e-41, 1.0, -1.0, 9e-39, 3e-39], requires_grad=True)
    exact = weights.detach().double()
    bags = torch.tensor([0, 0, 1, 2, 2, 3, 3])
    sums = torch.zeros(4, dtype=torch.float64).index_add(0, bags, exact)
    shares = torch.where(sums == 0, 0.0, exact.new_ones(4) / sums)[bags] * exact
    wanted = torch.zeros(4, 4, dtype=torch.float64).index_add(0, bags, shares[:, None] * rows)
    pooled = bag_lookup(group, call, pooling=Pooling.MEAN, weights=weights)
    torch.testing.assert_close(pooled.double(), wanted, rtol=0.01, atol=1e-4)
    read = read_bags(group, call, pooling=Pooling.MEAN, weights=weights.detach())
    assert same_bits(read, pooled.detach())
    gradient = torch.randn(4, 4, generator=seeded(5))
    pooled.backward(gradient)
    wanted.backward(gradient.double())
    assert rows.grad is not None
    assert weights.grad is not None
    moved = rows.detach() - rows.grad  # SGD with lr 1
    torch.testing.assert_close(group.read(0, ids).double(), moved, rtol=1e-4, atol=1e-5)
    assert not weights.grad.isnan().any()


def test_equals_nn_embedding_bag() -> None:
    group = make_group((16,))
    ids = torch.randint(60, (500,), generator=seeded(1))
    offsets = torch.arange(0, 501, 5)
    static = torch.nn.EmbeddingBag.from_pretrained(
        group.read(0, torch.arange(60)), mode="mean", include_last_offset=True
    )
    output = read_bags(group, Call(ids, offsets, [0], [16]), pooling=Pooling.MEAN)
    torch.testing.assert_close(output, static(ids, offsets))


# -- sequences -----------------------------------------------------------------------------------


def sequence_lookup(group: td.TableGroup, call: Call, handles: Tensor, optimizer: int) -> Tensor:
    return ops.embedding(
        group.rows,
        call.batch(Pooling.NONE),
        handles,
        torch.zeros(1, requires_grad=True),
        optimizer=optimizer,
    )


@pytest.mark.parametrize("count", [0, 5, 6000])
def test_sequences_equal_plain_torch(count: int) -> None:
    group = make_group((7, 7), padding_idx=PADDING)
    generator = seeded(4)
    ids = torch.randint(60, (2 * count,), generator=generator)
    call = Call(ids, torch.tensor([0, count, 2 * count]), [1, 0], [7, 7])
    dense = dense_rows(group)
    expected = torch.cat([dense[1][ids[:count]], dense[0][ids[count:]]])
    expected = expected * (ids != PADDING)[:, None]
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    output = sequence_lookup(group, call, handles, group.config.optimizer_code)
    assert torch.equal(output, expected)
    read = ops.embedding_inference(group.rows, call.batch(Pooling.NONE), handles)
    assert same_bits(read, output.detach())
    gradient = torch.randn(2 * count, 7, generator=generator)
    output.backward(gradient)
    expected.backward(gradient)
    for table, rows in enumerate(dense):
        assert rows.grad is not None
        after = group.read(table, torch.arange(60))
        torch.testing.assert_close(after, rows - rows.grad, rtol=1e-4, atol=1e-4)


@POOLINGS
def test_gradient_layouts(pooling: Pooling) -> None:
    """An expanded or transposed gradient gives what its contiguous copy gives."""
    groups = [make_group((4,)) for _ in range(2)]
    call = call_of(groups[0], [(0, [[1, 2], [2, 3], [4]])])
    wide = torch.randn(4, 3, generator=seeded(5)).T
    for gradient in (torch.ones(1, 1).expand(3, 4), wide):
        for group, given in zip(groups, (gradient, gradient.contiguous()), strict=True):
            bag_lookup(group, call, pooling=pooling).backward(given)
    assert differences(*(snapshot(group) for group in groups)) == []


def test_lookup_bits_do_not_depend_on_threads() -> None:
    group = make_group((33, 8))
    call = random_call(group, [0, 1, 0], 2000, 5)
    weights = torch.rand(len(call.ids), generator=seeded(6))
    train(group, 0, torch.arange(30), torch.ones(30, 33))
    outputs = []
    for number in (1, 2):
        with threads(number):
            leaf = weights.clone().requires_grad_()
            output = bag_lookup(group, call, pooling=Pooling.MEAN, weights=leaf, optimizer=-1)
            output.backward(torch.ones_like(output))
            assert leaf.grad is not None
            outputs.append((output.detach(), leaf.grad))
    assert all(same_bits(a, b) for a, b in zip(*outputs, strict=True))


# -- rows that are not there -----------------------------------------------------------------------


def test_stale_handles_give_zeros_and_change_nothing() -> None:
    """Handles of an id that was erased, after its row's next owner has been trained."""
    group = make_group((4, 4))
    call = call_of(group, [(0, [[1], [2]]), (1, [[7], [7]])])
    old = group.find_or_insert(call.ids, call.offsets, call.tables)
    group.erase(0, torch.tensor([1]))
    train(group, 0, torch.tensor([9]), torch.ones(1, 4))  # takes the row of id 1
    lookup = bag_lookup(group, call, handles=old)
    assert lookup[0, :4].tolist() == [0.0] * 4
    assert same_bits(lookup[1, :4].detach(), group.read(0, torch.tensor([2]))[0])
    before = group.read(0, torch.tensor([9])), group.read(0, torch.tensor([2]))
    assert group.usage.stale_gradients() == 0
    lookup.backward(torch.ones(2, 8))
    assert group.usage.stale_gradients() == 1
    assert torch.equal(group.read(0, torch.tensor([9])), before[0])
    assert torch.equal(group.read(0, torch.tensor([2])), before[1] - 1)
    sequence = flat_call(group, 0, call.ids[:1])
    assert not sequence_lookup(group, sequence, old[:1], group.config.optimizer_code).any()
    weights = torch.ones(4, requires_grad=True)
    bag_lookup(group, call, handles=old, weights=weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad[0] == 0
    assert weights.grad[1] != 0
    assert group.usage.stale_gradients() == 2


@pytest.mark.parametrize("weighted", [False, True])
def test_one_id_without_a_live_row_changes_no_other(weighted: bool) -> None:
    """Blocks of rows are summed where they lie only if all of them are live."""
    group = make_group((16,), padding_idx=PADDING)
    known = torch.arange(10, 210)
    train(group, 0, known, torch.ones(200, 16))
    group.insert(0, torch.tensor([500]))  # has an unwritten row
    rows = {int(id): group.read(0, id.reshape(1))[0].cpu() for id in known}
    for special in (PADDING, 500, 999):
        for place in (0, 15, 16, 70):
            ids = known[:100].clone()
            ids[place] = special
            call = flat_call(group, 0, ids)._replace(offsets=torch.tensor([0, 90, 100]))
            weights = torch.rand(100, generator=seeded(place)) if weighted else None
            alone = call._replace(ids=ids[place : place + 1], offsets=torch.tensor([0, 1]))
            at_place = bag_lookup(group, alone)[0].detach().cpu()
            of_ids = [at_place if i == place else rows[int(id)] for i, id in enumerate(ids)]
            terms = torch.stack(of_ids) * (1 if weights is None else weights.cpu()[:, None])
            expected = torch.stack([terms[:90].sum(0), terms[90:].sum(0)])
            output = bag_lookup(group, call, weights=weights).detach().cpu()
            assert torch.allclose(output, expected, atol=1e-5), (special, place)


def test_handle_of_an_erased_id_works_until_the_row_has_a_new_owner() -> None:
    """Erasing between a forward and its backward: the row's old owner still trains it."""
    group = make_group((4,))
    call = flat_call(group, 0, torch.tensor([1]))
    train(group, 0, call.ids, torch.ones(1, 4))
    lookup = bag_lookup(group, call)
    group.erase(0, call.ids)
    lookup.sum().backward()
    assert group.usage.stale_gradients() == 0
    assert group.insert(0, torch.tensor([2])).item() >> 28 == 0
    fresh = make_group((4,))
    assert torch.equal(group.read(0, torch.tensor([2])), fresh.read(0, torch.tensor([2])))


@pytest.mark.parametrize(
    "default", ["initial", "zeros", torch.tensor([1.0, 2.0, 3.0])], ids=["initial", "zeros", "own"]
)
def test_missing_ids_give_the_default(default: Any) -> None:
    group = make_group((3,), eval_default=default)
    initial = make_group((3,)).read(0, torch.tensor([5]))[0]
    expected = {"initial": initial, "zeros": torch.zeros(3)}.get(str(default), default)
    call = call_of(group, [(0, [[5], [5, 5]])])
    output = read_bags(group, call)
    torch.testing.assert_close(output, torch.stack([expected, 2 * expected]))
    lookup = bag_lookup(group, call, handles=torch.full((3,), -1))
    assert same_bits(lookup.detach(), output)
    before = snapshot(group)
    lookup.sum().backward()
    after = snapshot(group)
    assert differences(before, after) == ["row_clock"]  # nothing was there to be updated
    train(group, 0, torch.tensor([5]), torch.zeros(1, 3))
    torch.testing.assert_close(read_bags(group, call), torch.stack([initial, 2 * initial]))


def test_rows_that_have_no_backward_yet_read_as_initial() -> None:
    group = make_group((6,))
    expected = group.read(0, torch.arange(50))
    group.insert(0, torch.arange(50).flip(0))
    assert same_bits(group.read(0, torch.arange(50)), expected)
    assert not group.rows.weights[0].any()


# -- calls ---------------------------------------------------------------------------------------


class CountOps(TorchDispatchMode):
    """Counts the dispatched ops of this library by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "dynemb":
            self.names[func.name().removeprefix("dynemb::").split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dims", [[16] * 26, [4, 8, 16, 32] * 6 + [64, 1]], ids=["one", "mixed"])
def test_26_tables_take_two_ops_and_others_before_and_after_them(dims: list[int]) -> None:
    tables = [td.TableConfig(f"t{t}", dim) for t, dim in enumerate(dims)]
    collection = td.DynamicEmbeddingBagCollection(
        tables, optimizer=td.RowWiseAdagrad(lr=0.1), max_rows=1000
    )
    features = {name: torch.randint(50, (8, 2)) for name in collection.feature_names}
    with CountOps() as forward:
        output = collection(features)
    # the first puts the ids of the dict one after another, which aten's ops did before
    assert forward.names == {"ids_concat": 1, "find_or_insert_": 1, "embedding": 1}
    with CountOps() as backward:
        output.sum().backward()
    assert backward.names == {"embedding_backward_": 1}
    collection.eval()
    with CountOps() as reading, torch.no_grad():
        collection(features)
    on_host = collection.group.device.type == "cpu"
    expected = ["find_and_read"] if on_host else ["find", "embedding_inference"]
    assert reading.names == dict.fromkeys(["ids_concat", *expected], 1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", list(Pooling), ids=[pooling.name for pooling in Pooling])
def test_lookup_is_the_same_whoever_sees_its_ops(pooling: Pooling, weighted: bool) -> None:
    """If autograd is the only observer, its formula is applied without a call of the op."""
    outcomes = []
    for watcher in (CountOps(), nullcontext()):
        group = make_group((4, 4), padding_idx=PADDING)
        call = random_call(group, [0, 1, 0], batch=5, longest=4)
        weights = torch.linspace(-1, 1, call.ids.numel()).requires_grad_() if weighted else None
        handles = group.find_or_insert(call.ids, call.offsets, call.tables)
        with watcher:
            output = bag_lookup(group, call, handles=handles, pooling=pooling, weights=weights)
            output.backward(torch.linspace(-2, 1, output.numel()).reshape(output.shape))
        gradient = None if weights is None else weights.grad
        outcomes.append((output.detach(), gradient, snapshot(group)))
    (seen, seen_gradient, seen_state), (unseen, gradient, state) = outcomes
    assert same_bits(seen, unseen)
    assert differences(seen_state, state) == []
    if weighted and pooling != Pooling.NONE:
        assert seen_gradient is not None
        assert gradient is not None
        assert same_bits(seen_gradient, gradient)


@pytest.mark.parametrize("pooling", list(Pooling), ids=[pooling.name for pooling in Pooling])
def test_find_and_read_is_find_and_a_lookup(pooling: Pooling) -> None:
    """Of ids that have been trained, that only have a row, that are missing, and of padding."""
    group = make_group((4, 4), padding_idx=PADDING, eval_default="zeros")
    train(group, 0, torch.arange(0, 60, 3), torch.ones(20, 4))
    group.insert(1, torch.arange(0, 60, 2))
    call = random_call(group, [1, 0], batch=6, longest=5)
    batch = call.batch(pooling)
    handles = group.find(call.ids, call.offsets, call.tables).handles
    assert len({int(handle) for handle in handles if handle < 0}) == 2
    expected = ops.embedding_inference(group.rows, batch, handles)
    if group.device.type == "cpu":
        before = snapshot(group)
        read = ops.find_and_read(group.index, group.rows, batch)
        assert same_bits(read, expected)
        assert differences(before, snapshot(group)) == []
    assert same_bits(table_lookup.find_and_read(group.tables, batch), expected)


def test_rows_of_one_table_are_found_and_read_without_a_word_about_features() -> None:
    group = make_group((4,), padding_idx=PADDING, eval_default="zeros")
    train(group, 0, torch.arange(0, 60, 3), torch.ones(20, 4))
    ids = torch.tensor([6, 4, PADDING, 6, 9])
    if group.device.type != "cpu":
        pytest.skip("find_and_read is an op of the CPU")
    none = group.tables.one_bag
    batch = ops.LookupBatch.of_rows(ids, none, [0], 4)
    expected = ops.find_and_read(group.index, group.rows, batch)
    assert expected[0].any()
    assert same_bits(ops.find_and_read_rows(group.index, group.rows, ids, none), expected)


@pytest.mark.parametrize("last", [False, True])
@POOLINGS
def test_bags_of_one_table_are_found_and_read_with_offsets_as_given(
    pooling: Pooling, last: bool
) -> None:
    group = make_group((4,), padding_idx=PADDING, eval_default="zeros")
    if group.device.type != "cpu":
        pytest.skip("find_and_read is an op of the CPU")
    train(group, 0, torch.arange(0, 60, 3), torch.ones(20, 4))
    call = random_call(group, [0], batch=6, longest=5)
    expected = ops.find_and_read(group.index, group.rows, call.batch(pooling))
    assert expected.any()
    offsets = call.offsets if last else call.offsets[:-1].contiguous()
    read = ops.find_and_read_bags(
        group.index, group.rows, call.ids, offsets, pooling, include_last_offset=last
    )
    assert same_bits(read, expected)
    none = call.ids[:0]
    empty = ops.find_and_read_bags(
        group.index, group.rows, none, none, pooling, include_last_offset=False
    )
    assert empty.shape == (0, 4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", list(Pooling), ids=[pooling.name for pooling in Pooling])
def test_one_op_inserts_and_reads_as_two_do(pooling: Pooling, weighted: bool) -> None:
    """And its backward updates the same rows."""
    groups = [make_group((4, 4), padding_idx=PADDING) for _ in range(2)]
    if groups[0].device.type != "cpu":
        pytest.skip("insert_and_read is an op of the CPU")
    if torch._C._len_torch_dispatch_stack() > 0:
        pytest.skip(
            "insert_and_embed is for code without dispatch modes, and here tensors are marked"
        )
    outcomes = []
    for group, alone in zip(groups, (True, False), strict=True):
        train(group, 0, torch.arange(0, 60, 3), torch.ones(20, 4))
        group.erase(0, torch.arange(3))
        call = random_call(group, [0, 1, 0], batch=5, longest=4)
        weights = torch.linspace(-1, 1, call.ids.numel()).requires_grad_() if weighted else None
        batch = call.batch(pooling, weights if pooling != Pooling.NONE else None)
        anchor = torch.zeros(1, requires_grad=True)
        code = group.config.optimizer_code
        if alone:
            assert ops.is_eager(batch.ids, batch.offsets)
            number = ops.bind_lookup(group.index, group.rows)
            output = ops.insert_and_embed(
                group.rows, number, batch, anchor, optimizer=code, feature_policies=[]
            )
            ops.release_lookup(number)
        else:
            handles = group.find_or_insert(call.ids, call.offsets, call.tables)
            output = ops.embedding(group.rows, batch, handles, anchor, optimizer=code)
        inserted = snapshot(group)
        output.backward(torch.linspace(-2, 1, output.numel()).reshape(output.shape))
        gradient = None if weights is None else weights.grad
        outcomes.append((output.detach(), gradient, inserted, snapshot(group)))
    (one, one_gradient, one_inserted, one_state), (two, two_gradient, inserted, state) = outcomes
    assert same_bits(one, two)
    assert differences(one_inserted, inserted) == []
    assert differences(one_state, state) == []
    assert (one_gradient is None) == (two_gradient is None)
    if one_gradient is not None and two_gradient is not None:
        assert same_bits(one_gradient, two_gradient)


def test_a_wrong_lookup_inserts_no_id() -> None:
    group = make_group((4, 4))
    if group.device.type != "cpu":
        pytest.skip("insert_and_read is an op of the CPU")
    number = ops.bind_lookup(group.index, group.rows)
    ids, offsets = torch.arange(6), torch.tensor([0, 2, 6])
    before = snapshot(group)
    for features, message in [
        ((None, [0, 1], [4, 5], 0, []), r"feature_dims\[1\] is 5, but its table has dim 4"),
        ((torch.ones(5), [0, 1], [4, 4], 0, []), r"per_sample_weights.size\(0\) is 5, expected 6"),
        ((None, [0, 2], [4, 4], 0, []), r"feature_tables\[1\] is 2"),
    ]:
        with pytest.raises(RuntimeError, match=rf"insert_and_read: {message}"):
            torch.ops.dynemb.insert_and_read(number, ids, offsets, *features)
        assert differences(before, snapshot(group)) == []
    ops.release_lookup(number)
    with pytest.raises(RuntimeError, match=rf"lookup is {number}, .* or which has been released"):
        torch.ops.dynemb.insert_and_read(number, ids, offsets, None, [0, 1], [4, 4], 0, [])


def test_modules_train_alike_whoever_sees_their_ops() -> None:
    """Eager training is one op, unless something else observes the calls."""
    policy = td.Policy(score="frequency", capacity=40)
    outcomes = []
    for watcher in (CountOps(), nullcontext()):
        tables = [
            td.TableConfig("a", 4, ["f", "g"], policy=policy, padding_idx=PADDING),
            td.TableConfig("b", 3, ["h"], policy=policy),
        ]
        module = td.DynamicEmbeddingBagCollection(
            tables, mode="mean", optimizer=td.Adam(lr=0.1), max_rows=200
        )
        outputs = []
        for step in range(4):
            ids = torch.arange(12) * (step + 3) % 50
            features = td.KeyedJagged(["f", "g", "h"], ids, torch.tensor([0, 2, 3, 4, 7, 9, 12]))
            with watcher:
                output = module(features)
                output.sum().backward()
                module.optimizer.step()
            outputs.append(output.detach())
        outcomes.append((torch.stack(outputs), snapshot(module.group)))
    (seen, seen_state), (unseen, state) = outcomes
    assert same_bits(seen, unseen)
    assert differences(seen_state, state) == []


def test_features_of_several_tables_are_not_left_out() -> None:
    group = make_group((4, 4))
    if group.device.type != "cpu":
        pytest.skip("find_and_read is an op of the CPU")
    with pytest.raises(RuntimeError, match=r"feature_tables is empty, .* where there is one table"):
        ops.find_and_read_rows(group.index, group.rows, torch.arange(3), group.tables.one_bag)


def test_inference_ops_give_no_gradient() -> None:
    group = make_group((4,))
    call = flat_call(group, 0, torch.arange(3))
    weights = torch.ones(3, requires_grad=True)
    assert not read_bags(group, call).requires_grad
    with torch.no_grad():
        read_bags(group, call, weights=weights)


def test_second_derivatives_are_refused() -> None:
    group = make_group((4,))
    scale = torch.ones(3, 4, requires_grad=True)
    weights = torch.ones(3, requires_grad=True)
    output = bag_lookup(group, flat_call(group, 0, torch.arange(3)), weights=weights)
    with pytest.raises(RuntimeError, match="create_graph=True through a dynamic table"):
        torch.autograd.grad((output * scale).sum(), weights, create_graph=True)
