"""RecIS's functions, fused ops and the values of its own tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.recis import (
    Bucketize,
    FusedBoundaryOP,
    FusedCutoffOP,
    FusedHashOP,
    FusedModOP,
    FusedMultiHashOP,
    Hash,
    IDMultiHash,
    Mod,
    RaggedTensor,
    SequenceLengthError,
    SequenceTruncate,
)
from torch_dynemb.recis import functional as F

pytestmark = pytest.mark.cpu_only("modules over ops that test_cuda_kernels compares")

INT_DTYPES = (torch.int32, torch.int64)


def assert_lists(given: Any, expected: Any) -> None:
    assert [tensor.tolist() for tensor in given] == expected


def strided(tensor: Tensor) -> Tensor:
    """The same values, each beside another one."""
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def test_hashes_of_strings_are_recis_s() -> None:
    values = [torch.tensor([0, 1, 2, 1, 2, 3]).char(), torch.tensor([0, 5, 5, 5, 6, 7]).char()]
    splits = [torch.tensor([0, 3, 6], dtype=dtype) for dtype in INT_DTYPES]
    farm = [
        [-7736835464683084646, -5546720800891377920],
        [-4442022684725028445, -909183002746659612],
    ]
    murmur = [
        [-4003751876240412087, -1042754718167355375],
        [-5541886947548579749, 4434088491466393040],
    ]
    assert_lists(F.farmhash(values, splits), farm)
    assert_lists(F.murmurhash(values, splits), murmur)


def test_buckets_and_remainders() -> None:
    values = torch.tensor([[0.5, 1.5], [2.5, 4.5]]).T
    expected = torch.tensor([[0, 1], [2, 4]]).T
    assert torch.equal(F.bucketize(values, [1, 2, 3, 4]), expected)
    (again,) = F.fused_bucketize_gpu([values], [torch.arange(1.0, 5.0)])
    assert torch.equal(again, expected)
    ids = torch.tensor([[12345, -1], [7, 2**62]]).T
    remainders = [[345, 7], [(2**64 - 1) % 1000, 2**62 % 1000]]
    assert F.bucketize_mod(ids, 1000).tolist() == remainders
    assert_lists(
        F.fused_uint64_mod_gpu([ids, ids[:1]], torch.tensor([1000, 5])), [remainders, [[0, 2]]]
    )
    muls, primes = torch.tensor([1, 3]), [29, 47]
    hashes = [
        [[x * m % 2**64 % p % 10 for x in row] for row in ids.tolist()]
        for m, p in ((1, 29), (3, 47))
    ]
    assert_lists(F.multi_hash(ids, muls, primes, 10), hashes)
    fused = F.fused_multi_hash([ids, ids], [muls, muls], [primes] * 2, [[10, 10], muls])
    assert_lists(fused[:2], hashes)
    assert len(fused) == 4


def test_ids_of_tables_and_ranks() -> None:
    ids = torch.tensor([2, 1, 2, 3])
    distinct, lengths, inverse = F.ids_partition(strided(ids), 65536, 2)
    assert torch.equal(distinct[inverse], ids)
    owners = ops.id_owners(distinct, parts=2)
    assert owners.tolist() == [0] * int(lengths[0]) + [1] * int(lengths[1])
    encoded = F.ids_encode([ids, ids[:1]], torch.tensor([0, 5]))
    assert torch.equal(encoded, ops.ids_encode([ids, ids[:1]], [0, 5]))
    assert F.merge_offsets([torch.tensor([0, 2, 5]), torch.tensor([0, 3, 6])]).tolist() == [
        0,
        2,
        5,
        8,
        11,
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_dense_to_ragged_and_back(dtype: torch.dtype) -> None:
    dense = torch.tensor([[1, 0, 3, 0, 0], [6, 7, 8, 0, 0]], dtype=dtype)
    values, offsets = F.dense_to_ragged(dense, True, 0)
    assert torch.equal(values, torch.tensor([1, 0, 3, 6, 7, 8], dtype=dtype))
    assert torch.equal(offsets[0], torch.tensor([0, 3, 6], dtype=torch.int32))
    assert torch.equal(F.ragged_to_dense(values, offsets, 9), dense[:, :3])
    assert torch.equal(F.ragged_to_sparse(strided(values), offsets).to_dense(), dense[:, :3])
    cube = torch.arange(24, dtype=dtype).reshape(2, 3, 4)
    assert torch.equal(F.ragged_to_dense(*F.dense_to_ragged(cube), 0), cube)


def test_cutoffs_have_the_results_of_recis_s_documentation() -> None:
    values = torch.tensor([9155707040084860980, 11, 12, 20, 21, 30, 31, 32, 33])
    offsets = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    right = torch.tensor([False])
    cut = F.fused_ragged_cutoff_2D([values], [offsets], torch.tensor([3]), right, right)
    assert torch.equal(cut[0][0], values[:-1])
    assert torch.equal(cut[1][0], torch.tensor([0, 3, 5, 8], dtype=torch.int32))
    assert torch.equal(cut[2][0], torch.tensor([0, 0, 1], dtype=torch.int32))
    assert torch.equal(cut[3][0], torch.tensor([0, 1, 0], dtype=torch.int32))
    assert cut[4] is cut[5] is right
    left = torch.tensor([True])
    kept = F.fused_ragged_cutoff_2D([values], [offsets], [3], left, right)[0][0]
    assert kept.tolist() == [*values[:5].tolist(), 31, 32, 33]
    lists = torch.arange(10, 20)
    nested = [torch.tensor([0, 3, 4, 6]).int(), torch.tensor([0, 1, 4, 4, 8, 8, 10]).int()]
    given, ((outer, inner),) = F.fused_ragged_cutoff_3D([lists], [nested], [2], left, left)
    assert given[0].tolist() == [11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert torch.equal(outer, torch.tensor([0, 2, 4, 6]).int())
    assert torch.equal(inner, torch.tensor([0, 3, 3, 3, 7, 7, 9]).int())
    given, ((outer, inner),) = F.fused_ragged_cutoff_3D([lists], [nested], [2])
    assert given[0].tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert inner.tolist() == [0, 1, 4, 8, 8, 8, 10]


def test_a_cross() -> None:
    x, y = torch.tensor([1001, 1002, 1003]), torch.tensor([1, 2, 3])
    offsets = torch.arange(4, dtype=torch.int32)
    weight = torch.tensor([1.0, 2.0, 3.0])
    values, rows, weights = F.feature_cross_ragged(x, offsets, y, offsets, None, weight)
    assert values.tolist() == [-7808879811642834040, -4967483181219983279, 1752425377096056168]
    assert torch.equal(rows, offsets)
    assert torch.equal(weights, weight)


INDICES, OFFSETS = torch.tensor([0, 1, 2, 0, 1, 2, 1]), torch.tensor([0, 3, 3, 7])


def reduced(table: Tensor, weight: Tensor | None, combiner: str) -> Tensor:
    factors = torch.ones(7) if weight is None else weight
    rows = table[INDICES] * factors[:, None]
    bags, of_bag = rows.tensor_split(OFFSETS[1:-1]), factors.tensor_split(OFFSETS[1:-1])
    sums = torch.stack([bag.sum(0) for bag in bags])
    return (
        sums
        if combiner == "sum"
        else sums / torch.stack([f.sum() for f in of_bag]).clamp(min=1e-9)[:, None]
    )


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_segments_are_reduced(combiner: str, weighted: bool) -> None:
    plain = torch.randn(3, 5, requires_grad=True)
    table = plain.detach().clone().requires_grad_()
    weight = torch.rand(7) if weighted else None
    expected = reduced(plain, weight, combiner)
    given = F.ragged_embedding_segment_reduce(
        strided(table),
        None if weight is None else strided(weight),
        strided(INDICES.int()),
        strided(OFFSETS.int()),
        combiner,
    )
    torch.testing.assert_close(given, expected)
    for result in (given, expected):
        result.square().sum().backward()
    torch.testing.assert_close(table.grad, plain.grad)
    order = torch.randperm(7)
    segments = torch.tensor([0, 0, 0, 2, 2, 2, 2])[order]
    factors = torch.ones(7) if weight is None else weight
    sparse = F.sparse_embedding_segment_reduce(
        strided(table), strided(factors[order]), INDICES[order], segments, 3, combiner
    )
    torch.testing.assert_close(sparse, expected)
    if combiner == "sum":
        chosen = None if weight is None else weight[order]
        summed = F.segment_sum_sparse(table, chosen, INDICES[order], segments, 3)
        torch.testing.assert_close(summed, expected)
    with pytest.raises(ValueError, match="combiner is 'max', expected one of"):
        F.ragged_embedding_segment_reduce(table, weight, INDICES, OFFSETS, "max")


def test_tiles_have_the_results_of_recis_s_documentation() -> None:
    table = torch.tensor([[0.0, 1.0], [2.0, 3.0]], requires_grad=True)
    indices, offset = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 2, 3, 4])
    a, b, none = [0.0, 1.0], [2.0, 3.0], [0.0, 0.0]
    tiles = F.ragged_tile([2, 1], [3, 4], indices, offset, table)
    assert tiles.tolist() == [a, b, none, a, none, none, b, none, none, none]
    tiles.sum().backward()
    assert table.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    kwargs = {"bs": [2, 1], "tile_len": [1, 2], "left_pad": [torch.tensor([False, True])]}
    weight = torch.tensor([2.0, 1.0, 1.0, 1.0])
    given = F.ragged_embedding_segment_reduce(table, weight, indices, offset, "tile", kwargs)
    assert given.tolist() == [[0.0, 2.0], a, none, b]


def test_fused_ops_do_what_their_ops_do() -> None:
    ids = RaggedTensor(torch.tensor([1001, 1002, 1003]), torch.arange(4))
    prices = RaggedTensor(torch.tensor([0.5, 2.5, 9.0]), torch.arange(4))
    text = RaggedTensor(
        torch.tensor([0, 1, 2, 1, 2, 3]).char(), [torch.tensor([0, 2]), torch.tensor([0, 3, 6])]
    )
    rows = RaggedTensor(torch.arange(10), torch.tensor([0, 4, 7, 10]))
    cases: list[tuple[Any, list[Any], Any]] = [
        (FusedBoundaryOP, [Bucketize([1.0, 2.0]), Bucketize([3.0])], prices),
        (FusedModOP, [Mod(1000), Mod(7)], ids),
        (FusedHashOP, [Hash("farm"), Hash("murmur"), Hash("farm")], text),
        (FusedCutoffOP, [SequenceTruncate(2, False), SequenceTruncate(3, False)], rows),
    ]
    for kind, chain, value in cases:
        fused = kind(chain[:1])
        for op in chain[1:]:
            fused.add_op(op)
        for op, result in zip(chain, fused.process([value] * len(chain)), strict=True):
            single = op(value)
            assert torch.equal(result.values(), single.values())
            assert all(map(torch.equal, result.offsets(), single.offsets()))
    hashes = IDMultiHash([1000] * 3)
    (result,) = FusedMultiHashOP([hashes])([ids])
    assert result["multi_hash_2"].values().tolist() == [5, 10, 15]
    assert FusedModOP().process([]) == []
    with pytest.raises(TypeError, match=r"FusedModOP.add_op: op is a Hash, expected a Mod"):
        FusedModOP([Hash("farm")])
    with pytest.raises(ValueError, match="inputs has 1 entries, expected one for each of 0 ops"):
        FusedModOP().process([ids])
    with pytest.raises(TypeError, match=r"FusedModOP: inputs\[0\]: Mod got values of"):
        FusedModOP([Mod(5)]).process([prices])


def test_a_row_that_is_too_long_fails_an_assertion_of_recis() -> None:
    outer, inner = torch.tensor([0, 256, 512]).int(), torch.arange(513).int()
    lists = RaggedTensor(torch.randn(512), [outer, inner])
    for error in (AssertionError, ValueError, SequenceLengthError):
        with pytest.raises(error, match="got a row of 256 elements, expected at most seq_len, 128"):
            SequenceTruncate(128)(lists)


# -- wrong types ---------------------------------------------------------------------------------

INTS, FLOATS, BYTES = torch.tensor([0, 1]), torch.ones(2), torch.tensor([1, 2]).byte()
BOUNDS, ROWS = torch.tensor([0, 2]), torch.ones(2, 3)
CALLS: dict[str, dict[str, Any]] = {
    "bucketize": {"input": FLOATS, "boundaries": [1.0, 2.0]},
    "bucketize_mod": {"input": INTS, "bucket": 2},
    "dense_to_ragged": {"tensor": ROWS, "check_invalid": True, "invalid_value": 0},
    "farmhash": {"inputs": [BYTES], "splits": [BOUNDS]},
    "feature_cross_ragged": {
        "x_val": INTS,
        "x_offsets": BOUNDS,
        "y_val": INTS,
        "y_offsets": BOUNDS,
        "x_weight": FLOATS,
        "y_weight": FLOATS,
    },
    "fused_bucketize_gpu": {"values": [FLOATS], "boundaries": [FLOATS]},
    "fused_multi_hash": {"inputs": [INTS], "muls": [[1]], "primes": [[7]], "bucket_nums": [[3]]},
    "fused_ragged_cutoff_2D": {
        "values": [INTS],
        "offsets": [BOUNDS],
        "keep_lengths": [2],
        "drop_sides": [True],
    },
    "fused_ragged_cutoff_3D": {
        "values": [INTS],
        "offsets": [[BOUNDS, torch.arange(3)]],
        "keep_lengths": [2],
        "drop_sides": [True],
        "pad_sides": [True],
    },
    "fused_uint64_mod_gpu": {"values": [INTS], "mods": [3]},
    "ids_encode": {"ids_list": [INTS], "table_ids": [1]},
    "ids_partition": {"ids": INTS, "max_partition_num": 10, "world_size": 2},
    "merge_offsets": {"offsets": [BOUNDS]},
    "multi_hash": {"input": INTS, "muls": [1], "primes": [7], "bucket_num": 3},
    "murmurhash": {"inputs": [BYTES], "splits": [BOUNDS]},
    "ragged_embedding_segment_reduce": {
        "unique_emb": ROWS,
        "weight": FLOATS,
        "reverse_indices": INTS,
        "offsets": BOUNDS,
        "combiner": "tile",
        "combiner_kwargs": {"bs": [1], "tile_len": [2]},
    },
    "ragged_tile": {
        "batch": [1],
        "seq": [2],
        "indices": INTS,
        "offset": BOUNDS,
        "table": ROWS,
        "left_pad": torch.tensor([True]),
    },
    "ragged_to_dense": {"values": INTS, "offsets": [BOUNDS], "default_value": 0},
    "segment_sum_sparse": {
        "data": ROWS,
        "weight": FLOATS,
        "indices": INTS,
        "segment_ids": INTS,
        "num_segments": 2,
    },
    "sparse_embedding_segment_reduce": {
        "unique_emb": ROWS,
        "weight": FLOATS,
        "reverse_indices": INTS,
        "segment_ids": INTS,
        "num_segments": 2,
        "combiner": "sum",
    },
}
NEVER_RIGHT = ["x", object(), 1.5j, ["a"], [object()], {"a": 1}, ROWS.to_sparse()]
NEVER_RIGHT_IN = [(name, argument) for name, call in CALLS.items() for argument in call]


@pytest.mark.parametrize(("name", "argument"), NEVER_RIGHT_IN)
def test_wrong_types_are_refused_by_name(name: str, argument: str) -> None:
    call = CALLS[name] | ({"pad_sides": INTS} if name == "fused_ragged_cutoff_2D" else {})
    getattr(F, name)(**call)
    for wrong in NEVER_RIGHT:
        with pytest.raises((TypeError, ValueError), match=rf"{name}: {argument}|RaggedTensor: "):
            getattr(F, name)(**{**call, argument: wrong})
