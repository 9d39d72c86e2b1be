"""``torch_dynemb.recis``: options, engines, ragged tensors, feature ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from refusing import Row, raising

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
    *raising(
        ValueError,
        (lambda: EmbeddingOption(combiner="max"), "combiner is 'max', expected one of"),
        (
            lambda: EmbeddingOption(combiner="tile"),
            "combiner_kwargs is None, expected {'tile_len': n}",
        ),
        (
            lambda: EmbeddingOption(combiner="tile", combiner_kwargs={"tile_len": -2}),
            r"combiner_kwargs is {'tile_len': -2}, expected {'tile_len': n} with n of at least 1",
        ),
        (
            lambda: EmbeddingOption(combiner="tile", combiner_kwargs={"tile_len": 2, "x": 1}),
            "'x': 1",
        ),
        (lambda: EmbeddingOption(combiner_kwargs={"tile_len": 2}), "combiner 'sum' takes none"),
        (
            lambda: EmbeddingOption(fp16_enabled=True),
            "fp16_enabled is True with dtype torch.float32",
        ),
        (lambda: EmbeddingOption(grad_reduce_by="rank"), "grad_reduce_by is 'rank'"),
        (lambda: gen_slice(0, 9, 8), "shard_num is 9, expected 1 to 8"),
        (lambda: gen_slice(2, 2), "shard_index is 2, expected 0 to 1"),
        (
            lambda: RaggedTensor(torch.arange(3), torch.tensor([1, 3])),
            r"offsets\[0\] begins with 1, expected 0",
        ),
        (
            lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 2, 1, 3])),
            r"offsets\[0\] decreases from 2 to 1",
        ),
        (
            lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 2])),
            "ends with 2, expected 3, the number of v",
        ),
        (
            lambda: RaggedTensor(torch.arange(3), [torch.tensor([0, 1]), torch.tensor([0, 1, 3])]),
            r"offsets\[0\] ends with 1, expected 2, the number of rows",
        ),
        (lambda: RaggedTensor(torch.arange(3), torch.tensor(3)), r"offsets\[0\] has shape \(\)"),
        (
            lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 3], device="meta")),
            r"offsets\[0\] is on meta, but values on cpu",
        ),
        (
            lambda: RaggedTensor(
                torch.arange(3), torch.tensor([0, 3]), torch.ones(3, device="meta")
            ),
            "weight is on meta, but values on cpu",
        ),
        (lambda: RaggedTensor(torch.tensor(1), torch.tensor([0, 1])), "values has 0 dimensions"),
        (
            lambda: RaggedTensor(torch.arange(3), torch.tensor([0, 3]), None, (1,)),
            "expected 2 sizes",
        ),
        (lambda: FeatureEngine([feature("a", SelectField("x"))] * 2), "feature 'a' is given twice"),
        (lambda: FeatureEngine([feature("a", Mod(5))]), r"feature 'a' has the ops \['M"),
        (lambda: FeatureEngine([Feature("a")]), "expected a SelectField or SelectFields"),
        (
            lambda: one(ragged(1, 3), SequenceTruncate(2)),
            "feature 'out': SequenceTruncate got a row of 3 elements, expected at most seq_len, 2",
        ),
        (
            lambda: one(ragged(1), SequenceTruncate(2, n_dims=3)),
            "SequenceTruncate got 2 dimensions, expected n_dims, 3",
        ),
        (
            lambda: one(
                RaggedTensor(torch.ones(2).byte(), torch.tensor([0, 2]), torch.ones(2)),
                Hash("farm"),
            ),
            "feature 'out': Hash got 2 weights, expected one for each of 1 strings",
        ),
        (
            lambda: FeatureEngine(
                [feature("a", SelectFields([SelectField("x"), SelectField("y")]), FeatureCross())]
            )({"x": ragged(1), "y": ragged(1, 1)}),
            "feature 'a': FeatureCross got 1 and 2 rows, expected as many",
        ),
        (
            lambda: FeatureEngine(
                [
                    feature("a_b_0", SelectField("x")),
                    feature("a", SelectField("x"), IDMultiHash([5], prefix="b")),
                ]
            )({"x": torch.ones(1).long()}),
            "feature 'a': two features give a result 'a_b_0'",
        ),
        (lambda: Mod(0), "mod_value is 0"),
        (lambda: Bucketize([2, 1]), "boundary is"),
        (lambda: IDMultiHash([]), "num_buckets is"),
        (lambda: IDMultiHash([1] * 5), "num_buckets is"),
        (lambda: SequenceTruncate(0), "seq_len is 0"),
        (lambda: SequenceTruncate(truncate_side="top"), "truncate_side is 'top'"),
        (lambda: SequenceTruncate(n_dims=4), "n_dims is 4"),
        (lambda: Hash("md5"), "hash_type is 'md5'"),
        (lambda: Mod(2**63), "Mod: mod_value is 9223372036854775808, expected an int64"),
        (
            lambda: EmbeddingEngine({"a": option(), "b": option(embedding_dim=8)}),
            "'a' and 'b' share 'item', but do not describe one table: dim is 4 and 8: make them "
            "equal, or give 'b' another shared_name",
        ),
        (
            lambda: EmbeddingEngine({"a": option(children=["x", "y"], coalesced=True)}),
            r"has children \['x', 'y'\], expected none",
        ),
        (
            lambda: EmbeddingEngine(
                {"a": option(admit_hook=AdmitHook("Frequency", {"threshold": 2})), "b": option()}
            ),
            "but have the admission rules",
        ),
        (
            lambda: EmbeddingEngine({"a": option(), "b": option(max_partition_num=8)}),
            "max_partition_num are",
        ),
        (
            lambda: EmbeddingOption(storage=td.SSDStore("rows"), device="cuda:0"),
            r"EmbeddingOption: storage is SSDStore\(.*device is '",
        ),
        (
            lambda: HashTable([4], storage=td.SSDStore("rows"), device="cuda:0"),
            r"HashTable: storage is SSDStore\(.*device is 'cuda",
        ),
    ),
    *raising(
        TypeError,
        (lambda: EmbeddingOption(embedding_dim=4.0), "embedding_dim is 4.0, expected int"),
        (lambda: EmbeddingOption(max_rows="9"), "max_rows is '9', expected int"),
        (lambda: EmbeddingOption(initializer=0.0), "initializer is 0.0"),
        (
            lambda: EmbeddingOption(filter_hook="GlobalStepFilter"),
            "filter_hook is 'GlobalStepFilter'",
        ),
        (
            lambda: EmbeddingOption(admit_hook=FilterHook("GlobalStepFilter", {"filter_step": 1})),
            "admit_hook is",
        ),
        (
            lambda: RaggedTensor(torch.tensor([1, 2]), np.array([0, 2])),
            "a list of them: torch.from_numpy converts",
        ),
        (lambda: one(torch.ones(2), Mod(5)), "feature 'out': Mod got values of torch.f"),
        (
            lambda: FeatureEngine([feature("a", SelectField("x"))])({"x": [1]}),
            "feature 'a': field 'x' got a list, expected a Tensor or RaggedTensor",
        ),
        (
            lambda: FeatureEngine([feature("a", SelectField("x", torch.int64))])(
                {"x": torch.ones(1)}
            ),
            "feature 'a': field 'x' got values of torch.float32, expected one of int64",
        ),
        (
            lambda: FeatureEngine([feature("a", SelectField("x"))])([1]),
            "feature 'a': the input is a list, expected a dict",
        ),
        (lambda: Feature("a").add_op(torch.nn.ReLU()), "feature 'a': op is a ReLU"),
        (
            lambda: one(torch.ones(2).long(), IDMultiHash([5]), Mod(5)),
            "feature 'out': Mod got a dict, expected a Tensor",
        ),
        (lambda: one(torch.ones(2).long(), Hash("farm")), "Hash got a Tensor, expected"),
        (lambda: one(ragged(1), FeatureCross()), "FeatureCross got RaggedTensor, exp"),
        (lambda: Mod(1.5), "Mod: mod_value is 1.5, expected int"),
        (lambda: Bucketize("ab"), "Bucketize: boundary is 'ab', expected numbers"),
        (lambda: Bucketize([1, "b"]), r"Bucketize: boundary\[1\] is 'b'"),
        (lambda: IDMultiHash(torch.ones(())), "IDMultiHash: num_buckets is a tensor"),
        (lambda: IDMultiHash([3], 4), "IDMultiHash: prefix is 4, expected str"),
        (lambda: SequenceTruncate("2"), "SequenceTruncate: seq_len is '2', expected int"),
        (lambda: SequenceTruncate(2, dtype=3), "SequenceTruncate: dtype is 3"),
        (lambda: SelectField(b"a"), "SelectField: name is b'a', expected str"),
        (lambda: SelectField("a", dim=1.5), "SelectField: dim is 1.5"),
        (lambda: SelectFields(["a"]), r"SelectFields: input_list\[0\] is 'a'"),
        (lambda: Feature(3), "Feature: name is 3, expected str"),
        (lambda: FeatureEngine(["a"]), r"FeatureEngine: feature_list\[0\] is 'a'"),
        (lambda: FusedModOP(Mod(3)), "FusedModOP: ops is Mod"),
        (
            lambda: EmbeddingOption(storage="/rows"),
            "EmbeddingOption: storage is '/rows', expected HostStore, ",
        ),
    ),
    *raising(
        KeyError,
        (
            lambda: FeatureEngine([feature("a", SelectField("x"))])({"y": 1}),
            r"feature 'a': the input has fields \['y'\], expected field 'x'",
        ),
        (
            lambda: EmbeddingEngine({"a": option(), "b": option()})({"a": torch.tensor([[1]])}),
            r"lacks \['b'\]",
        ),
    ),
]
