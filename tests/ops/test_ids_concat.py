"""Ids of many features as lookups take them: values, errors, and lookups without offsets."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from emulator.mode import EmulatedCuda
from op_cases import make_group
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")

EMULATED = pytest.mark.parametrize("emulated", [False, True])


def device(emulated: bool) -> Any:
    return EmulatedCuda() if emulated else nullcontext()


def some_features(
    seed: int, bags: int
) -> tuple[list[Tensor], list[Tensor | None], list[list[list[int]]]]:
    """ids and offsets of features of every kind, and their bags as lists."""
    rng = random.Random(seed)
    ids: list[Tensor] = []
    offsets: list[Tensor | None] = []
    expected = []
    for f in range(rng.randint(1, 6)):
        dtype = rng.choice([torch.int32, torch.int64])
        length = rng.randint(0, 4)
        lengths = [rng.randint(0, 4) if f % 2 else length for _ in range(bags)]
        of_bags = [[rng.randint(-(2**31), 2**31 - 1) for _ in range(n)] for n in lengths]
        flat = torch.tensor([id for bag in of_bags for id in bag], dtype=dtype)
        ids.append(flat if f % 2 else flat.reshape(bags, length))
        ends = torch.tensor([0, *lengths]).cumsum(0).to(rng.choice([torch.int32, torch.int64]))
        offsets.append((ends if rng.random() < 0.5 else ends[:-1]) if f % 2 else None)
        expected.append(of_bags)
    return ids, offsets, expected


@EMULATED
@pytest.mark.parametrize("bags", [1, 7, 700])
def test_bags_are_those_of_the_features(emulated: bool, bags: int) -> None:
    for seed in range(8):
        ids, offsets, expected = some_features(seed, bags)
        with device(emulated):
            result = ops.ids_concat(ids, bags=bags, offsets=offsets)
        ends = result.offsets.tolist()
        given = result.ids.tolist()
        bags_given = [given[begin:end] for begin, end in itertools.pairwise(ends)]
        assert bags_given == list(itertools.chain(*expected))
        assert (ends[0], ends[-1]) == (0, len(given))


@pytest.mark.parametrize(
    ("ids", "offsets", "ragged", "bags", "message"),
    [
        ([torch.rand(2)], [], [], 1, r"ids\[0\] has dtype float32, expected int64 or int32"),
        ([torch.arange(3)], [], [], 2, r"ids\[0\] has 3 elements, expected 2 bags of equal length"),
        ([torch.arange(3)], [], [], -1, "bags is -1, expected at least 0"),
        ([torch.arange(3)], [], [0], 1, "ragged names 1 features, expected one for each of 0"),
        ([torch.arange(3)], [torch.arange(2)], [1], 1, r"ragged\[0\] is 1, expected another"),
        (
            [torch.arange(3)],
            [torch.arange(2)] * 2,
            [0, 0],
            1,
            r"ragged\[1\] is 0, expected another",
        ),
        ([torch.arange(3)], [torch.arange(4)], [0], 2, r"offsets\[0\] has 1 dimensions and 4 el"),
    ],
)
@EMULATED
def test_wrong_arguments(
    ids: list[Tensor],
    offsets: list[Tensor],
    ragged: list[int],
    bags: int,
    message: str,
    emulated: bool,
) -> None:
    with device(emulated), pytest.raises(RuntimeError, match=message):
        torch.ops.dynemb.ids_concat(ids, offsets, ragged, bags)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([None, [1, 3]], r"offsets\[0\] (begins with 1|does not begin with 0)"),
        ([[0, 2], None], r"offsets\[0\] (ends with 2|does not end with)"),
        ([[0, 3], [-1, 3]], r"offsets\[1\] (begins with -1|does not begin with 0)"),
    ],
)
@EMULATED
def test_features_that_do_not_meet(
    offsets: list[list[int] | None], message: str, emulated: bool
) -> None:
    """On a GPU a later op says so, and a lookup with the result inserts nothing."""
    given = [None if entry is None else torch.tensor(entry) for entry in offsets]
    ids = [torch.arange(100, 103)] * 2
    group = make_group()
    before = group.sizes()
    with device(emulated):
        if not emulated:
            with pytest.raises(RuntimeError, match=message):
                ops.ids_concat(ids, bags=1, offsets=given)
            return
        result = ops.ids_concat(ids, bags=1, offsets=given)
        with pytest.raises(RuntimeError, match=message):
            ops.mod(ids, [1, 1])
        group.find_or_insert(result.ids, result.offsets, [0, 2])
        with pytest.raises(RuntimeError, match="offset"):
            ops.mod(ids, [1, 1])
    assert group.sizes() == before


@pytest.mark.traced
def test_compiled_with_batches_of_any_size() -> None:
    @torch.compile(fullgraph=True, dynamic=True)
    def concatenated(dense: Tensor, ragged: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return ops.ids_concat([dense, ragged], bags=dense.shape[0], offsets=[None, offsets])

    for bags in (3, 5):
        arguments = (torch.arange(bags * 4).reshape(bags, 4), torch.arange(9), torch.arange(bags))
        expected = torch.cat([torch.arange(bags) * 4, torch.arange(bags) + 4 * bags])
        ids, offsets = concatenated(*arguments)
        assert torch.equal(ids, torch.cat([arguments[0].reshape(-1), arguments[1]]))
        assert torch.equal(offsets[:-1], expected)
        assert offsets[-1] == ids.shape[0]


# -- lookups without offsets ---------------------------------------------------------------------


@EMULATED
def test_empty_offsets_are_one_bag_of_one_feature(emulated: bool) -> None:
    ids = torch.tensor([3, 70, 3, 71, 8])
    results = []
    for offsets in (torch.tensor([0, 5]), torch.empty(0, dtype=torch.int64)):
        group = make_group(score=td.Policy(score="frequency"))
        with device(emulated):
            handles = group.find_or_insert(ids, offsets, [0])
            output = ops.embedding(
                group.rows,
                ops.LookupBatch.of_rows(ids, offsets, [0], 4),
                handles,
                torch.zeros(1, requires_grad=True),
                optimizer=group.config.optimizer_code,
            )
            output.backward(torch.ones(5, 4))
            found = group.find(ids, offsets, [0]).handles
            scores = group.scores.get(0, ids)
            erased = group.erase(0, ids[:2])
        tensors = [
            handles,
            output.detach(),
            found,
            group.index.tables,
            group.rows.row_clock,
            group.rows.weights[0],
        ]
        results.append([*tensors, *scores, torch.tensor(erased)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@EMULATED
def test_where_empty_offsets_are_refused(emulated: bool) -> None:
    group, none, ids = make_group(), torch.empty(0, dtype=torch.int64), torch.tensor([3, 4])
    with device(emulated):
        for call in (group.find, group.find_or_insert):
            with pytest.raises(RuntimeError, match="offsets has 0 elements, expected features"):
                call(ids, none, [0, 2])
        batch = ops.LookupBatch(ids, none, None, [0], [4], Pooling.SUM)
        with pytest.raises(RuntimeError, match="offsets is empty, expected where each of the bags"):
            ops.embedding_inference(group.rows, batch, ids)


def test_keyed_jagged_without_offsets() -> None:
    bags = td.DynamicEmbeddingBagCollection([td.TableConfig("t", 4)], optimizer=td.SGD(lr=0.1))
    with pytest.raises(ValueError, match="offsets has 0 elements, expected 1 features"):
        bags(td.KeyedJagged(["t"], torch.arange(3), torch.empty(0, dtype=torch.int64)))
    assert bags.sizes() == {"t": 0}
