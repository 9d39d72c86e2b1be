"""``torch_dynemb.recis``: options, engines, ragged tensors, feature ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from refusing import Row

import torch_dynemb as td
from torch_dynemb.recis import (
    AdmitHook,
    EmbeddingEngine,
    EmbeddingOption,
    FilterHook,
    HashTable,
    RaggedTensor,
    gen_slice,
)
from torch_dynemb.recis.feature_ops import (
    Bucketize,
    Feature,
    FeatureCross,
    FeatureEngine,
    FeatureOp,
    FusedModOP,
    Hash,
    IDMultiHash,
    Mod,
    SelectField,
    SelectFields,
    SequenceTruncate,
)


def option(**changes: Any) -> EmbeddingOption:
    given = {"embedding_dim": 4, "block_size": 8, "shared_name": "item"}
    return EmbeddingOption(**{**given, **changes})


def ragged(*lengths: int) -> RaggedTensor:
    return RaggedTensor(torch.arange(sum(lengths)), torch.tensor([0, *lengths]).cumsum(0))


def feature(name: str, *chain: FeatureOp) -> Feature:
    result = Feature(name)
    for op in chain:
        result.add_op(op)
    return result


def one(value: Any, *chain: FeatureOp) -> Any:
    return FeatureEngine([feature("out", SelectField("in"), *chain)])({"in": value})


ROWS: list[Row] = [
    (
        lambda: EmbeddingOption(embedding_dim=0),
        ValueError,
        "embedding_dim is 0, expected at least 1",
    ),
    (lambda: EmbeddingOption(embedding_dim=4.0), TypeError, "embedding_dim is 4.0, expected int"),
    (lambda: EmbeddingOption(block_size=0), ValueError, "block_size is 0"),
    (lambda: EmbeddingOption(max_partition_num=-1), ValueError, "max_partition_num is -1"),
    (lambda: EmbeddingOption(max_rows=0), ValueError, "max_rows is 0, expected at least 1"),
    (lambda: EmbeddingOption(max_rows="9"), TypeError, "max_rows is '9', expected int"),
    (lambda: EmbeddingOption(dtype=torch.int64), ValueError, "dtype is torch.int64"),
    (lambda: EmbeddingOption(combiner="max"), ValueError, "combiner is 'max', expected one of"),
    (
        lambda: EmbeddingOption(combiner="tile"),
        ValueError,
        "combiner_kwargs is None, expected {'tile_len': n}",
    ),
    (
        lambda: EmbeddingOption(combiner="tile", combiner_kwargs={"tile_len": -2}),
        ValueError,
        r"combiner_kwargs is {'tile_len': -2}, expected {'tile_len': n} with n of at least 1",
    ),
    (
        lambda: EmbeddingOption(combiner="tile", combiner_kwargs={"tile_len": 2, "x": 1}),
        ValueError,
        "'x': 1",
    ),
    (
        lambda: EmbeddingOption(combiner_kwargs={"tile_len": 2}),
        ValueError,
        "combiner 'sum' takes none",
    ),
    (
        lambda: EmbeddingOption(fp16_enabled=True),
        ValueError,
        "fp16_enabled is True with dtype torch.float32",
    ),
    (lambda: EmbeddingOption(grad_reduce_by="rank"), ValueError, "grad_reduce_by is 'rank'"),
    (lambda: EmbeddingOption(shared_name=""), ValueError, "shared_name is ''"),
    (lambda: EmbeddingOption(children=["a", "b"]), ValueError, "coalesced is False"),
    (
        lambda: EmbeddingOption(children=["a", "a"], coalesced=True),
        ValueError,
        "expected every name once",
    ),
    (lambda: EmbeddingOption(initializer=0.0), TypeError, "initializer is 0.0"),
    (
        lambda: EmbeddingOption(filter_hook="GlobalStepFilter"),
        TypeError,
        "filter_hook is 'GlobalStepFilter'",
    ),
    (
        lambda: EmbeddingOption(admit_hook=FilterHook("GlobalStepFilter", {"filter_step": 1})),
        TypeError,
        "admit_hook is",
    ),
    (lambda: gen_slice(0, 9, 8), ValueError, "shard_num is 9, expected 1 to 8"),
    (lambda: gen_slice(2, 2), ValueError, "shard_index is 2, expected 0 to 1"),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor([1, 3])),
        ValueError,
        r"offsets\[0\] begins with 1, expected 0",
    ),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 2, 1, 3])),
        ValueError,
        r"offsets\[0\] decreases from 2 to 1",
    ),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 2])),
        ValueError,
        "ends with 2, expected 3, the number of v",
    ),
    (
        lambda: RaggedTensor(torch.arange(3), [torch.tensor([0, 1]), torch.tensor([0, 1, 3])]),
        ValueError,
        r"offsets\[0\] ends with 1, expected 2, the number of rows",
    ),
    (lambda: RaggedTensor(torch.arange(3), []), ValueError, "offsets is empty"),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor([0.0, 3.0])),
        TypeError,
        r"offsets\[0\] has dtype torch.float32",
    ),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor(3)),
        ValueError,
        r"offsets\[0\] has shape \(\)",
    ),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 3]), torch.ones(2)),
        ValueError,
        r"weight has shape \(2,\), expected one for each of the 3 values",
    ),
    (
        lambda: RaggedTensor(
            torch.arange(3), torch.tensor([0, 3]), torch.ones(3, dtype=torch.int64)
        ),
        TypeError,
        "weight has dtype torch.int64, expected floats",
    ),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 3], device="meta")),
        ValueError,
        r"offsets\[0\] is on meta, but values on cpu",
    ),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 3]), torch.ones(3, device="meta")),
        ValueError,
        "weight is on meta, but values on cpu",
    ),
    (lambda: RaggedTensor([1, 2], torch.tensor([0, 2])), TypeError, "values is a list"),
    (
        lambda: RaggedTensor(np.array([1, 2]), torch.tensor([0, 2])),
        TypeError,
        "values is a ndarray, expected a Tensor: torch.from_numpy makes one",
    ),
    (
        lambda: RaggedTensor(torch.tensor([1, 2]), np.array([0, 2])),
        TypeError,
        "a list of them: torch.from_numpy makes",
    ),
    (
        lambda: RaggedTensor(torch.tensor(1), torch.tensor([0, 1])),
        ValueError,
        "values has 0 dimensions",
    ),
    (
        lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 3]), None, (1,)),
        ValueError,
        "expected 2 sizes",
    ),
    (lambda: one(torch.ones(2), Mod(5)), TypeError, "feature 'out': Mod got values of torch.f"),
    (
        lambda: FeatureEngine([feature("a", SelectField("x"))])({"y": 1}),
        KeyError,
        r"feature 'a': the input has no field 'x', but \['y'\]",
    ),
    (
        lambda: FeatureEngine([feature("a", SelectField("x"))])({"x": [1]}),
        TypeError,
        "feature 'a': field 'x' got a list, expected a Tensor or RaggedTensor",
    ),
    (
        lambda: FeatureEngine([feature("a", SelectField("x", torch.int64))])({"x": torch.ones(1)}),
        TypeError,
        "feature 'a': field 'x' got values of torch.float32, expected one of int64",
    ),
    (
        lambda: FeatureEngine([feature("a", SelectField("x"))])([1]),
        TypeError,
        "feature 'a': the input is a list, expected a dict",
    ),
    (
        lambda: FeatureEngine([feature("a", SelectField("x"))] * 2),
        ValueError,
        "feature 'a' is given twice",
    ),
    (lambda: FeatureEngine([feature("a", Mod(5))]), ValueError, r"feature 'a' has the ops \['M"),
    (lambda: FeatureEngine([Feature("a")]), ValueError, "expected a SelectField or SelectFields"),
    (lambda: Feature("a").add_op(torch.nn.ReLU()), TypeError, "feature 'a': op is a ReLU"),
    (
        lambda: one(ragged(1, 3), SequenceTruncate(2)),
        ValueError,
        "feature 'out': SequenceTruncate got a row of 3 elements, expected at most seq_len, 2",
    ),
    (
        lambda: one(ragged(1), SequenceTruncate(2, n_dims=3)),
        ValueError,
        "SequenceTruncate got 2 dimensions, expected n_dims, 3",
    ),
    (
        lambda: one(torch.ones(2).long(), IDMultiHash([5]), Mod(5)),
        TypeError,
        "feature 'out': Mod got a dict, expected a Tensor",
    ),
    (lambda: one(torch.ones(2).long(), Hash("farm")), TypeError, "Hash got a Tensor, expected"),
    (
        lambda: one(
            RaggedTensor(torch.ones(2).byte(), torch.tensor([0, 2]), torch.ones(2)),
            Hash("farm"),
        ),
        ValueError,
        "feature 'out': Hash got 2 weights, expected one for each of 1 strings",
    ),
    (lambda: one(ragged(1), FeatureCross()), TypeError, "FeatureCross got RaggedTensor, exp"),
    (
        lambda: FeatureEngine(
            [feature("a", SelectFields([SelectField("x"), SelectField("y")]), FeatureCross())]
        )({"x": ragged(1), "y": ragged(1, 1)}),
        ValueError,
        "feature 'a': FeatureCross got 1 and 2 rows, expected as many",
    ),
    (
        lambda: FeatureEngine(
            [
                feature("a_b_0", SelectField("x")),
                feature("a", SelectField("x"), IDMultiHash([5], prefix="b")),
            ]
        )({"x": torch.ones(1).long()}),
        ValueError,
        "feature 'a': two features give a result 'a_b_0'",
    ),
    (lambda: Mod(0), ValueError, "mod_value is 0"),
    (lambda: Bucketize([2, 1]), ValueError, "boundary is"),
    (lambda: IDMultiHash([]), ValueError, "num_buckets is"),
    (lambda: IDMultiHash([1] * 5), ValueError, "num_buckets is"),
    (lambda: SequenceTruncate(0), ValueError, "seq_len is 0"),
    (lambda: SequenceTruncate(truncate_side="top"), ValueError, "truncate_side is 'top'"),
    (lambda: SequenceTruncate(n_dims=4), ValueError, "n_dims is 4"),
    (lambda: Hash("md5"), ValueError, "hash_type is 'md5'"),
    (lambda: Mod(1.5), (TypeError, ValueError), "Mod: mod_value is 1.5, expected int"),
    (
        lambda: Mod(2**63),
        (TypeError, ValueError),
        "Mod: mod_value is 9223372036854775808, expected an int64",
    ),
    (
        lambda: Bucketize("ab"),
        (TypeError, ValueError),
        "Bucketize: boundary is 'ab', expected numbers",
    ),
    (lambda: Bucketize([1, "b"]), (TypeError, ValueError), r"Bucketize: boundary\[1\] is 'b'"),
    (
        lambda: IDMultiHash(torch.ones(())),
        (TypeError, ValueError),
        "IDMultiHash: num_buckets is a tensor",
    ),
    (
        lambda: IDMultiHash([3], 4),
        (TypeError, ValueError),
        "IDMultiHash: prefix is 4, expected str",
    ),
    (
        lambda: SequenceTruncate("2"),
        (TypeError, ValueError),
        "SequenceTruncate: seq_len is '2', expected int",
    ),
    (lambda: SequenceTruncate(2, dtype=3), (TypeError, ValueError), "SequenceTruncate: dtype is 3"),
    (lambda: SelectField(b"a"), (TypeError, ValueError), "SelectField: name is b'a', expected str"),
    (lambda: SelectField("a", dim=1.5), (TypeError, ValueError), "SelectField: dim is 1.5"),
    (lambda: SelectFields(["a"]), (TypeError, ValueError), r"SelectFields: input_list\[0\] is 'a'"),
    (lambda: Feature(3), (TypeError, ValueError), "Feature: name is 3, expected str"),
    (
        lambda: FeatureEngine(["a"]),
        (TypeError, ValueError),
        r"FeatureEngine: feature_list\[0\] is 'a'",
    ),
    (lambda: FusedModOP(Mod(3)), (TypeError, ValueError), "FusedModOP: ops is Mod"),
    (lambda: EmbeddingEngine({}), ValueError, "emb_options is empty"),
    (
        lambda: EmbeddingEngine({"a": option(), "b": option(embedding_dim=8)}),
        ValueError,
        "'a' and 'b' share 'item', but are not those of one table: dim is 4 and 8: make them "
        "equal, or give 'b' another shared_name",
    ),
    (
        lambda: EmbeddingEngine({"a": option(children=["x", "y"], coalesced=True)}),
        ValueError,
        r"has children \['x', 'y'\], expected none",
    ),
    (
        lambda: EmbeddingEngine(
            {"a": option(admit_hook=AdmitHook("Frequency", {"threshold": 2})), "b": option()}
        ),
        ValueError,
        "but have the admission rules",
    ),
    (
        lambda: EmbeddingEngine({"a": option(), "b": option(max_partition_num=8)}),
        ValueError,
        "max_partition_num are",
    ),
    (
        lambda: EmbeddingEngine({"a": option(), "b": option()})({"a": torch.tensor([[1]])}),
        KeyError,
        r"lacks \['b'\]",
    ),
    (lambda: EmbeddingEngine({"a": option()})({"a": [1]}), TypeError, "feature 'a' is a list"),
    (
        lambda: EmbeddingOption(storage="/rows"),
        TypeError,
        "EmbeddingOption: storage is '/rows', expected SSDStore, ",
    ),
    (
        lambda: EmbeddingOption(storage=td.SSDStore("rows"), device="cuda:0"),
        ValueError,
        r"EmbeddingOption: storage is SSDStore\(.*device is '",
    ),
    (
        lambda: HashTable([4], storage=td.SSDStore("rows"), device="cuda:0"),
        ValueError,
        r"HashTable: storage is SSDStore\(.*device is 'cuda",
    ),
]
