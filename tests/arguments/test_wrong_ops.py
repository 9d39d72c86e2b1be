"""Functions of ``torch_dynemb.ops``: values that the fuzzer does not draw, with what is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from refusing import Row, cases, raising

from torch_dynemb import ops
from torch_dynemb.ops.columns import RowFormat
from torch_dynemb.ops.quantized import row_bytes

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")

V, OF = torch.arange(3), torch.tensor([0, 2, 3])
TEXT = torch.tensor(list(b"abcdef"), dtype=torch.uint8)
PACKED = ops.quantize_rows(torch.ones(3, 5), RowFormat.INT8)
TILED = (torch.zeros(3, 4), torch.tensor([2, 0]), torch.tensor([0, 1, 2]))


ROWS: list[Row] = [
    *raising(
        RuntimeError,
        (
            lambda: ops.crc32c(torch.zeros(4), -1),
            "dynemb::crc32c: .*crc is -1, expected 0 to 4294967295, the sum",
        ),
        (
            lambda: ops.crc32c(torch.zeros(4), 2**32),
            "dynemb::crc32c: .*crc is 4294967296, expected 0 to 4294967295",
        ),
        (
            lambda: ops.crc32c(torch.eye(3).to_sparse()),
            "dynemb::crc32c: .*sparse_coo tensor, expected a dense one",
        ),
        (lambda: ops.reserve((-1, 2), torch.float32), r"size\[0\] is -1: the tensor would exceed"),
        (lambda: ops.reserve((1 << 40, 1 << 40), torch.float32), r"would exceed the address space"),
        (
            lambda: ops.reserve((1 << 46,), torch.int64),
            r"could not reserve \d+ bytes .* Lower max_rows",
        ),
        (
            lambda: ops.mod([torch.tensor([1])], [0]),
            r"mod: divisors\[0\] is 0, expected at least 1",
        ),
        (
            lambda: ops.mod([torch.tensor([1])] * 2, [1, -5]),
            r"mod: divisors\[1\] is -5, expected at least 1",
        ),
        (
            lambda: ops.mod([torch.tensor([1])] * 2, [1]),
            "mod: divisors has 1 entries, expected one for each of 2",
        ),
        (
            lambda: ops.mod([torch.tensor([1]), torch.tensor([1.0])], [1, 1]),
            r"mod: values\[1\] has dtype float32, expected int64",
        ),
        (
            lambda: ops.mod([torch.tensor([1]), torch.ones(2, 4).long()[:, ::2]], [1, 1]),
            r"mod: values\[1\] is not contiguous",
        ),
        (
            lambda: ops.bucketize(
                [torch.ones(1)] * 2, [torch.ones(1), torch.tensor([1.0, 3.0, 2.0])]
            ),
            r"boundaries\[1\]\[2\] is 2, expected at least the one before, 3",
        ),
        (
            lambda: ops.bucketize([torch.ones(1)], [torch.tensor([float("nan")])]),
            r"boundaries\[0\]\[0\] is -?nan",
        ),
        (
            lambda: ops.bucketize([torch.ones(1)], [torch.ones(1).double()]),
            r"boundaries\[0\] has dtype float64, expected float32, as values\[0\]",
        ),
        (
            lambda: ops.bucketize([torch.ones(1)], [torch.ones(1, 1)]),
            r"boundaries\[0\] has 2 dimensions, expected 1",
        ),
        (
            lambda: ops.bucketize([torch.ones(1)], []),
            "boundaries has 0 entries, expected one for each of 1 features",
        ),
        (
            lambda: ops.bucketize([torch.ones(1).bool()], [torch.ones(1)]),
            r"values\[0\] has dtype bool, expected float32",
        ),
        (
            lambda: ops.multi_hash([torch.tensor([1])], [[1, 1]], [[5, 0]], [[1, 1]]),
            r"primes\[1\] is 0, expected at least 1",
        ),
        (
            lambda: ops.multi_hash([torch.tensor([1])], [[1]], [[5]], [[-1]]),
            r"buckets\[0\] is -1, expected at least 1",
        ),
        (
            lambda: ops.ragged_tile(*TILED, features=2, tile_lens=[1, 2**62]),
            r"tile_lens\[1\] is 4611686018427387904, with which",
        ),
        (
            lambda: ops.quantize_rows(torch.ones(3, 5), RowFormat.INT4),
            r"rows.size\(1\) is 5, but rows of int4 have an even",
        ),
        (
            lambda: ops.quantize_rows(torch.ones(3, 5), 4),
            r"format is 4, expected 1 \(int8\), 2 \(int4\) or 3",
        ),
        (
            lambda: ops.dequantize_rows(PACKED, RowFormat.INT8, 6),
            r"packed.size\(1\) is 13, expected 14, the bytes of a",
        ),
        (lambda: ops.dequantize_rows(PACKED, RowFormat.INT8, 0), "dim is 0, expected at least 1"),
        (
            lambda: ops.ragged_cutoff_2d([V], [OF, OF], [1]),
            "offsets has 2 entries, expected one for",
        ),
        (
            lambda: ops.ragged_cutoff_2d([V], [OF], [-1]),
            r"keep_lengths\[0\] is -1, expected at lea",
        ),
        (lambda: ops.ragged_cutoff_2d([V], [OF], []), "keep_lengths has 0 entries, expected one"),
        (
            lambda: ops.ragged_cutoff_2d([V, V], [OF, OF + 3], [1, 1]),
            r"offsets\[1\] begins with 3, expected 0",
        ),
        (
            lambda: ops.ragged_cutoff_2d([V, V[1:]], [OF, OF], [1, 1]),
            r"offsets\[1\] ends with 3, expected the number of values, 2",
        ),
        (
            lambda: ops.ragged_cutoff_2d([V], [torch.tensor([0, 3, 2, 3])], [1]),
            r"offsets\[0\]\[2\] is 2, less than offsets\[0\]\[1\] = 3",
        ),
        (lambda: ops.ragged_cutoff_2d([V], [OF[:0]], [1]), r"offsets\[0\] is empty"),
        (
            lambda: ops.ragged_cutoff_2d([V.to(torch.complex128)], [OF], [1]),
            r"values\[0\] has a dtype that is not of 1, 2, 4 or 8 bytes",
        ),
        (
            lambda: ops.ragged_cutoff_2d([V, V], [OF, OF], [1, 1], weights=[None, torch.ones(2)]),
            r"weights\[1\] has 2 elements, expected one for each of 3 values",
        ),
        (
            lambda: ops.ragged_cutoff_3d([V], [OF + 1], [OF], [1]),
            r"outer_offsets\[0\] begins with 1, expected 0",
        ),
        (
            lambda: ops.ragged_topk_index_cutoff([V], [OF], [torch.zeros(3, 1).long()]),
            r"indices\[0\]\.size\(0\) is 3, expected 2",
        ),
        (
            lambda: ops.ragged_to_dense([V], [[OF]], lengths=[[1]]),
            r"offsets\[0\] has a row of 2, expected at most 1",
        ),
        (
            lambda: ops.ragged_to_dense([V], [[OF, torch.tensor([0, 1, 2, 3])]], lengths=[[2, 0]]),
            r"offsets\[0\]\[1\] has a row of 1, expected at most 0",
        ),
        (
            lambda: ops.ragged_to_sparse([V], [[OF]], lengths=[[1]]),
            r"offsets\[0\] has a row of 2, expected at most 1",
        ),
        (lambda: ops.dense_to_ragged([V]), r"dense\[0\] has 1 dimensions, expected at least 2"),
        (
            lambda: ops.feature_cross_ragged([V], [OF], [V], [torch.tensor([0, 3])]),
            r"y_offsets\[0\] has 1 rows, expected those of x_offsets\[0\], 2",
        ),
        (lambda: ops.mix_ids(torch.zeros(2, 2).long()), "ids has 2 dimensions, expected 1"),
        (
            lambda: ops.unmix_ids(torch.zeros(2).long(), parts=2, part=2),
            "part is 2, expected 0 to 1",
        ),
        (
            lambda: ops.unmix_ids(torch.zeros(2).long(), parts=0, part=0),
            "parts is 0, expected at least 1",
        ),
        (
            lambda: ops.unique_ids(torch.zeros(3).long(), torch.tensor([1, 3])),
            r"offsets\[0\] is 1, expected 0",
        ),
        (
            lambda: ops.unique_ids(torch.zeros(3).long(), torch.tensor([0, 2])),
            "the last offset is 2, expected the number of ids, 3",
        ),
        (
            lambda: ops.unique_ids(torch.zeros(3).long(), torch.tensor([0, 2, 1, 3])),
            r"offsets\[2\] is 1, less than offsets\[1\] = 2: offsets must not decrease",
        ),
        (
            lambda: ops.unique_ids(torch.zeros(0).long(), torch.zeros(0).long()),
            r"offsets is empty, expected \[groups \+ 1\]",
        ),
        (
            lambda: ops.id_owners(torch.zeros(3).long(), parts=8, slots=7),
            "id_owners: parts is 8, expected at most the number of slots, 7",
        ),
        (
            lambda: ops.ids_partition(torch.zeros(1).long(), torch.tensor([0, 1]), parts=0),
            "ids_partition: parts is 0, expected at least 1",
        ),
        (
            lambda: ops.ids_partition(torch.zeros(3).long(), torch.tensor([0, 2]), parts=1),
            "ids_partition: the last offset is 2, expected the number of ids, 3",
        ),
        (
            lambda: ops.ids_encode([torch.zeros(2).long()], [1, 2]),
            "ids_encode: tables has 2 entries, expected one for each of 1 features",
        ),
        (
            lambda: ops.ids_encode([torch.zeros(2).long(), torch.zeros(2)], [1, 2]),
            r"ids_encode: ids\[1\] has dtype float32, expected int64",
        ),
    ),
    *raising(
        TypeError,
        (
            lambda: ops.reserve((2, 2), torch.float64),
            r"reserve: dtype is torch\.float64, expected one of",
        ),
    ),
    *raising(
        ValueError,
        (
            lambda: ops.multi_hash([torch.tensor([1])], [[1]], [[5, 7]], [[1]]),
            r"primes has \[2\] entries.*expected \[1\]",
        ),
        (
            lambda: ops.multi_hash([torch.tensor([1])], [], [], []),
            "multipliers has 0 entries, expected one for each of 1",
        ),
        (lambda: ops.ids_concat([], bags=1), "ids is empty, expected those of a feature or more"),
        (
            lambda: ops.ids_concat([torch.arange(2)] * 2, bags=1, offsets=[None]),
            "offsets has 1 entries, expected one for each of 2",
        ),
        (lambda: row_bytes(RowFormat.FLOATS, 4), "format is 0, expected 1"),
        (lambda: row_bytes(RowFormat.INT4, 3), "dim is 3, expected 1 or more, and an even number"),
        (
            lambda: ops.ragged_cutoff_2d([V], [OF], [1], weights=[]),
            "weights has 0 entries, expected one, or None, for each of 1 features",
        ),
        (
            lambda: ops.ragged_to_dense([V], [[OF]], lengths=[[1, 2]]),
            "feature 0 has 1 offsets and 2 lengths",
        ),
        (
            lambda: ops.ragged_to_dense([V], [], lengths=[[1]]),
            "offsets has 0 entries, expected one",
        ),
        (
            lambda: ops.ragged_to_dense([V], [[OF]], lengths=[[2]], padding_value=0.5),
            "padding_value is 0.5, expected an integer for values of torch.int64",
        ),
        (
            lambda: ops.dense_to_ragged([V[None]], invalid_value=math.nan),
            "invalid_value is nan, which equals nothing",
        ),
        (
            lambda: ops.feature_cross_ragged(
                [V], [OF], [V], [OF], y_weights=[torch.ones(3, requires_grad=True)]
            ),
            r"y_weights\[0\] requires grad",
        ),
    ),
]

# hashes of strings
ROWS += [
    (
        partial(hash_of, [TEXT, TEXT], [torch.tensor([0, 6]), torch.tensor(edges).long()]),
        RuntimeError,
        f"dynemb::string_hash: {words}",
    )
    for hash_of in (ops.farmhash, ops.murmurhash, ops.murmurhash64a)
    for edges, words in (
        ([1, 6], r"offsets\[1\] begins with 1, expected 0"),
        ([0, 4, 3, 6], r"offsets\[1\]\[2\] is 3, less than offsets\[1\]\[1\] = 4"),
        ([0, 5], r"offsets\[1\] ends with 5, expected the number of values, 6"),
        ([], r"offsets\[1\] is empty, expected \[n \+ 1\]"),
    )
]


@pytest.mark.parametrize(("call", "error", "words"), cases(ROWS))
def test_wrong_argument(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
