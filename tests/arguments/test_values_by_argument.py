"""Wrong values of every public call: the error names call, argument, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import torch_dynemb as td
from torch_dynemb import recis

pytestmark = pytest.mark.cpu_only("arguments that are refused before a device sees them")

SGD = td.SGD(lr=0.1)
IDS = torch.arange(3)
EDGES = torch.tensor([0, 2, 3])

# what Python and torch say
OTHERS_OWN = (
    r"not supported between|object is not|has no attribute|unhashable|interpreted as|"
    r"must be (real|str)|could not convert|not iterable|unsupported operand|not callable|"
    r"torch_call_dispatcher|dynemb::|Could not run|\(\): argument"
)

REMEDY = r"[Ee]xpected|, but |\blacks\b|: (create|give|register)"

# -- wrong values ----------------------------------------------------------------------------------

# no tensor of ids
NO_IDS: list[Any] = [
    *(None, [1, 2, 3], np.arange(3), "x", 1.5, True),
    *(torch.rand(3), torch.tensor([True]), IDS.to_sparse(), IDS.to("meta")),
]
NO_FLOATS: list[Any] = [
    *(None, [[1.0] * 4] * 3, np.zeros((3, 4), np.float32), "x", 1.5),
    *(torch.rand(3, 4).to_sparse(), torch.rand(3, 4, device="meta"), torch.ones(3, 4) > 0),
]
NO_TABLE: list[Any] = [
    None,
    "x",
    "no such table",
    -1,
    3,
    1.5,
    True,
    [0],
    torch.tensor([0, 1]),
    1 << 70,
]
NO_COUNT: list[Any] = [None, "5", 1.5, True, [5], -1, torch.rand(2)]
NO_OPTIONAL_COUNT = NO_COUNT[1:]
NO_NUMBER: list[Any] = [None, "x", True, [0.1], (1, 2), torch.rand(2), {}]
NO_OPTIONAL_NUMBER = NO_NUMBER[1:]
NO_NAME: list[Any] = [None, 5, 1.5, ["a"], b"a"]
NO_OPTIONAL_NAME = NO_NAME[1:]
NO_FLAG: list[Any] = [None, 1, "yes", 0.0]
NO_LIST: list[Any] = [None, 5, "abc", 1.5]
NO_OBJECT: list[Any] = [5, "x", 1.5, [1]]
NO_MODULE: list[Any] = [None, *NO_OBJECT]
NO_DEVICE: list[Any] = ["x", 1.5, [1]]
NO_DTYPE: list[Any] = ["float32", torch.int64, 5, None]

# -- calls -----------------------------------------------------------------------------------------


td.register_admission("misuse")(lambda new: new.known)


def group() -> td.TableGroup:
    policy = td.Policy(score=("step", "custom"), ttl=5, admission=td.AdmitFrequent(1))
    tables = [td.TableConfig(name, 4, policy=policy) for name in "tuv"]
    made = td.TableGroup(tables, optimizer=SGD)
    made.scores.set_batch(0, 1)
    made.insert(0, IDS)
    return made


def bags() -> td.DynamicEmbeddingBagCollection:
    return td.DynamicEmbeddingBagCollection([td.TableConfig("t", 4)], optimizer=SGD)


def hash_table() -> recis.HashTable:
    return recis.HashTable([4])


def config(kind: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    return lambda **given: kind(**{**arguments, **given})


def method(make: Callable[[], Any], name: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        result = getattr(make(), name)(**arguments)
        return list(result) if name == "export" else result

    return call


def forward(make: Callable[[], Any]) -> Callable[..., Any]:
    return lambda **arguments: make()(**arguments)


@dataclass
class Call:
    """A call with right arguments, and wrong ones by name.

    Attributes:
        call: takes the arguments by name.
        right: arguments with which it works.
        wrong: values by argument.
        owner: what the message says of the call; default: its name.
        names: what the message says of an argument, if not its name.
    """

    call: Callable[..., Any]
    right: dict[str, Any]
    wrong: dict[str, list[Any]]
    owner: str | None = None
    names: dict[str, str] = field(default_factory=dict)


SCORED = {"table": 0, "ids": IDS, "score": None}
CALLS: dict[str, Call] = {
    "TableGroup": Call(
        config(td.TableGroup),
        {"tables": [td.TableConfig("t", 4)], "optimizer": SGD},
        {
            "tables": [None, 5, "abc", [], ["t"], [None], td.TableConfig("t", 4)],
            "optimizer": ["sgd", 5, torch.optim.SGD],
            "max_rows": [*NO_OPTIONAL_COUNT, 0],
            "memory_budget": ["x", 1.5, True, [5], -1],
            "seed": ["x", 1.5, True, [5]],
            "device": NO_DEVICE,
            "split": NO_FLAG,
        },
    ),
    "insert": Call(
        method(group, "insert"),
        {"table": 0, "ids": IDS},
        {"table": NO_TABLE, "ids": NO_IDS, "scores": [5, [1], torch.rand(3)]},
        names={"scores": "scores"},
    ),
    "contains": Call(
        method(group, "contains"), {"table": 0, "ids": IDS}, {"table": NO_TABLE, "ids": NO_IDS}
    ),
    "read": Call(
        method(group, "read"), {"table": 0, "ids": IDS}, {"table": NO_TABLE, "ids": NO_IDS}
    ),
    "erase": Call(
        method(group, "erase"), {"table": 0, "ids": IDS}, {"table": NO_TABLE, "ids": NO_IDS}
    ),
    "insert_or_assign": Call(
        method(group, "insert_or_assign"),
        {"table": 0, "ids": IDS, "rows": torch.rand(3, 4)},
        {"table": NO_TABLE, "ids": NO_IDS, "rows": [*NO_FLOATS, torch.rand(3), torch.rand(4, 3)]},
    ),
    "scores.get": Call(
        method(lambda: group().scores, "get"),
        SCORED,
        {"table": NO_TABLE, "ids": NO_IDS, "score": [5, "x", 1.5, ["step"]]},
    ),
    "scores.set": Call(
        method(lambda: group().scores, "set"),
        {**SCORED, "scores": IDS},
        {
            "table": NO_TABLE,
            "ids": NO_IDS,
            "scores": [*NO_IDS, -IDS, IDS[:2]],
            "score": [5, "x", 1.5],
        },
    ),
    "scores.set_batch": Call(
        method(lambda: group().scores, "set_batch"),
        {"table": 0, "score": 5},
        {"table": NO_TABLE, "score": [None, "x", 1.5, True, [1], 1 << 63]},
    ),
    "clock.set_now": Call(
        method(lambda: group().clock, "set_now"), {"seconds": 5}, {"seconds": NO_OPTIONAL_COUNT}
    ),
    "scores.deciding": Call(
        method(lambda: group().scores, "deciding"),
        {"table": 0},
        {"table": NO_TABLE},
    ),
    "size": Call(method(group, "size"), {"table": 0}, {"table": NO_TABLE}),
    "reserve": Call(
        method(group, "reserve"), {"table": 0, "ids": 5}, {"table": NO_TABLE, "ids": NO_COUNT}
    ),
    "fill": Call(
        method(group, "fill"),
        {"table": 0, "value": 1.0},
        {"table": NO_TABLE, "value": [None, "x", [1.0], True, torch.rand(2)]},
    ),
    "remove_in_slices": Call(
        method(group, "remove_in_slices"),
        {"table": 0, "batch_size": 4, "score_below": 1},
        {"table": NO_TABLE, "batch_size": [*NO_COUNT, 3]},
    ),
    "insert_new": Call(
        config(td.insert_new, model=bags(), rows_of=lambda ids: torch.rand(len(ids), 4)),
        {"table": "t", "ids": IDS},
        {"model": NO_MODULE, "table": NO_NAME, "ids": NO_IDS, "rows_of": NO_OBJECT},
    ),
    "clear": Call(method(group, "clear"), {"table": 0}, {"table": NO_TABLE}),
    "reset_counts": Call(method(group, "reset_counts"), {"table": 0}, {"table": NO_TABLE}),
    "export": Call(
        method(group, "export"),
        {"table": 0, "batch_size": 8, "since": 0, "score": None},
        {
            "table": NO_TABLE,
            "batch_size": [*NO_COUNT, 1],
            "since": ["x", 1.5, True, [1]],
            "score": [5, "x"],
        },
    ),
    **{
        f"remove {condition}": Call(
            method(group, "remove"),
            {"table": 0, condition: value},
            {"table": NO_TABLE, "batch_size": [*NO_COUNT, 1], condition: wrong},
            owner="remove",
        )
        for condition, value, wrong in (
            ("not_seen_for", 1, ["x", 1.5, True, [1], 0]),
            ("expired", True, ["x", 1, [1]]),
            ("score_below", 1, ["x", 1.5, True, [1]]),
            ("norm_below", 1.0, ["x", True, [1.0], 0.0, -1.0]),
            ("predicate", lambda ids, scores: ids > 5, ["x", 5, lambda ids, scores: 5]),
        )
    },
    "evicted.record": Call(
        method(lambda: group().evicted, "record"),
        {"records": 5},
        {"records": [*NO_COUNT, 0], "rows": NO_FLAG},
    ),
    "evicted.call": Call(
        method(lambda: group().evicted, "call"), {"callback": print}, {"callback": [None, "x", 5]}
    ),
    "usage.log_to": Call(
        method(lambda: group().usage, "log_to"),
        {"writer": type("W", (), {"add_scalar": lambda *_: None})()},
        {"writer": NO_MODULE, "step": ["x", 1.5, True]},
    ),
    "group.add_table": Call(
        method(group, "add_table"),
        {"table": td.TableConfig("n", 4)},
        {"table": NO_MODULE},
        owner="add_table",
    ),
    "group.set_optimizer": Call(
        method(group, "set_optimizer"),
        {"config": SGD},
        {"config": NO_MODULE},
        owner="set_optimizer",
    ),
    "module.set_optimizer": Call(
        method(bags, "set_optimizer"), {"config": SGD}, {"config": NO_MODULE}, owner="set_optimizer"
    ),
    "optimizer.step": Call(
        method(lambda: bags().optimizer, "step"),
        {},
        {"closure": NO_OBJECT, "now": ["x", 1.5, True, -1]},
    ),
    "param group": Call(
        lambda lr: bags().optimizer.param_groups[0].update(lr=lr),
        {"lr": 0.1},
        {"lr": [None, "x", (1, 2), torch.rand(2), {}]},
    ),
    # -- configs
    "TableConfig": Call(
        config(td.TableConfig),
        {"name": "t", "embedding_dim": 4},
        {
            "name": [*NO_NAME, ""],
            "embedding_dim": [*NO_COUNT, 0, 1 << 31],
            "feature_names": [None, 5, "abc", [5], [None]],
            "initializer": NO_OBJECT,
            "padding_idx": ["x", 1.5, True, [1], 1 << 63],
            "eval_default": [None, 5, "x", torch.rand(3), IDS, torch.rand(4).to_sparse()],
            "policy": NO_MODULE,
            "feature_policies": [None, 5, "x", [1], {"other": td.FeaturePolicy()}, {"t": 5}],
            "dtype": NO_DTYPE,
            "shard": [5, "x", ("t", 4, 0)],
        },
    ),
    "Policy": Call(
        config(td.Policy),
        {},
        {
            "score": [5, 1.5, "x", ["step", "x"], ()],
            "capacity": [*NO_OPTIONAL_COUNT, 0],
            "on_full": [5, "x", []],
            "protected_steps": [*NO_OPTIONAL_COUNT, 0],
            "admission": NO_OBJECT,
            "refused": [5, "x", IDS, torch.rand(4).to_sparse()],
            "ttl": [*NO_OPTIONAL_COUNT, 0, "7", "0s"],
            "keep_at_least": [*NO_OPTIONAL_COUNT, 0, 5],
            "check": [None, 5, "x"],
        },
    ),
    "FeaturePolicy": Call(
        config(td.FeaturePolicy),
        {},
        {
            "threshold": [*NO_OPTIONAL_COUNT, 0],
            "ttl": [*NO_OPTIONAL_COUNT, 0, "7", "0s"],
            "updates_scores": NO_FLAG,
        },
    ),
    "AdmitFrequent": Call(
        config(td.AdmitFrequent), {"threshold": 2}, {"threshold": [*NO_COUNT, 0, 1 << 31]}
    ),
    "AdmitFrequentSketch": Call(
        config(td.AdmitFrequentSketch),
        {"threshold": 2, "memory": "1MB"},
        {
            "threshold": [*NO_COUNT, 0],
            "memory": [None, "x", 1.5, True, 3],
            "halve_every": [*NO_OPTIONAL_COUNT, 0],
        },
    ),
    "AdmitByChance": Call(
        config(td.AdmitByChance), {"probability": 0.5}, {"probability": [*NO_NUMBER, 0.0, 1.5]}
    ),
    "AdmitBy": Call(config(td.AdmitBy), {"name": "misuse"}, {"name": [*NO_NAME, "x"]}),
    "register_admission": Call(
        config(lambda name, hook: td.register_admission(name)(hook)),
        {"name": "misuse, too", "hook": print},
        {"name": NO_NAME, "hook": NO_MODULE},
    ),
    "Constant": Call(config(td.Constant), {}, {"value": NO_NUMBER}),
    "Uniform": Call(config(td.Uniform), {}, {"low": NO_NUMBER, "high": NO_NUMBER}),
    "Normal": Call(config(td.Normal), {}, {"mean": NO_NUMBER, "std": [*NO_NUMBER, -1.0]}),
    "TruncatedNormal": Call(
        config(td.TruncatedNormal),
        {},
        dict.fromkeys(("mean", "std", "low", "high"), NO_NUMBER),
    ),
    "XavierUniform": Call(
        config(td.XavierUniform), {}, {"gain": NO_NUMBER, "fan_out": NO_OPTIONAL_NUMBER}
    ),
    "XavierNormal": Call(
        config(td.XavierNormal), {}, {"gain": NO_NUMBER, "fan_out": NO_OPTIONAL_NUMBER}
    ),
    "KaimingUniform": Call(config(td.KaimingUniform), {}, {"slope": NO_NUMBER}),
    "KaimingNormal": Call(config(td.KaimingNormal), {}, {"slope": NO_NUMBER}),
    "ByColumn": Call(
        config(td.ByColumn),
        {"parts": ((4, td.Constant(0.0)),)},
        {"parts": [None, 5, "ab", [5], [(1.5, td.Constant(0.0))], [(4, "x")], [(4,)]]},
        names={"parts": "part"},
    ),
    # -- modules
    **{
        kind.__name__: Call(
            config(kind),
            {"embedding_dim": 4, "optimizer": SGD},
            {
                "embedding_dim": [*NO_COUNT, 0],
                "name": [*NO_OPTIONAL_NAME, ""],
                "padding_idx": ["x", 1.5, True],
                "initializer": NO_OBJECT,
                "optimizer": NO_MODULE,
                "trainable": NO_FLAG,
                "eval_default": [None, 5, "x", torch.rand(3)],
                "dtype": NO_DTYPE,
                "output_dtype": NO_DTYPE,
                "split": NO_FLAG,
                "device": NO_DEVICE,
                "policy": NO_OBJECT,
                "max_rows": NO_OPTIONAL_COUNT,
                "memory_budget": ["x", 1.5, True],
                **({"mode": [None, 5, "max"]} if kind is td.DynamicEmbeddingBag else {}),
            },
            owner="",  # TableConfig's arguments are named by it
        )
        for kind in (td.DynamicEmbedding, td.DynamicEmbeddingBag)
    },
    **{
        kind.__name__: Call(
            config(kind),
            {"tables": [td.TableConfig("t", 4)], "optimizer": SGD},
            {
                "tables": [None, 5, "abc", [], ["t"], [None]],
                "optimizer": NO_MODULE,
                "trainable": NO_FLAG,
                "output_dtype": NO_DTYPE,
                "split": NO_FLAG,
                "device": NO_DEVICE,
                "max_rows": NO_OPTIONAL_COUNT,
                "memory_budget": ["x", 1.5, True],
                **({} if kind is td.DynamicEmbeddingCollection else {"mode": [None, 5, "max"]}),
            },
            owner="",
        )
        for kind in (td.DynamicEmbeddingBagCollection, td.DynamicEmbeddingCollection)
    },
    "DynamicEmbedding.forward": Call(
        forward(lambda: td.DynamicEmbedding(4, optimizer=SGD, policy=td.Policy(score="custom"))),
        {"input": IDS, "scores": IDS},
        {"input": NO_IDS, "scores": [v for v in NO_IDS if v is not None]},
        owner="DynamicEmbedding",
        names={"input": "input|device"},
    ),
    "DynamicEmbeddingBag.forward": Call(
        forward(lambda: td.DynamicEmbeddingBag(4, mode="sum", optimizer=SGD)),
        {"input": IDS, "offsets": torch.tensor([0, 2]), "per_sample_weights": torch.rand(3)},
        {
            "input": NO_IDS,
            "offsets": NO_IDS,
            "per_sample_weights": [
                *([1.0], np.zeros(3, np.float32), "x", 1.5, True, IDS, torch.rand(2)),
                *(torch.rand(3).to_sparse(), torch.rand(3, device="meta")),
            ],
        },
        owner="DynamicEmbeddingBag",
        names={"input": "input|device", "offsets": "offsets|device"},
    ),
    "bags.forward": Call(
        forward(bags),
        {"features": {"t": IDS[None]}},
        {
            "features": [
                *NO_MODULE,
                *({"t": value} for value in NO_IDS),
                *({"t": (value, EDGES)} for value in NO_IDS),
                *({"t": (IDS, value)} for value in NO_IDS),
                {},
                IDS[None].to_sparse(),
            ]
        },
        owner="DynamicEmbeddingBagCollection",
        names={"features": "feature"},
    ),
    "sequences.forward": Call(
        forward(lambda: td.DynamicEmbeddingCollection([td.TableConfig("t", 4)], optimizer=SGD)),
        {"features": {"t": IDS}},
        {"features": [*NO_MODULE, *({"t": value} for value in NO_IDS), {}]},
        owner="DynamicEmbeddingCollection",
        names={"features": "feature"},
    ),
    "__contains__": Call(
        method(lambda: td.DynamicEmbedding(4, optimizer=SGD), "__contains__"),
        {"id": 5},
        {"id": [None, "x", 1.5, True, [1], torch.rand(1), 1 << 63]},
    ),
    "collection.add_table": Call(
        method(bags, "add_table"),
        {"table": td.TableConfig("n", 4)},
        {"table": NO_MODULE},
        owner="add_table",
    ),
    "from_embedding": Call(
        config(td.DynamicEmbedding.from_embedding),
        {"weight": torch.rand(3, 4), "optimizer": SGD},
        {
            "weight": [None, [[1.0]], np.zeros((3, 4)), "x", IDS, torch.rand(3, 4).to_sparse()],
            "ids": [v for v in NO_IDS if v is not None],
        },
        names={"ids": "ids|device"},
    ),
    "KeyedJagged": Call(
        config(td.KeyedJagged),
        {"keys": ["t"], "values": IDS, "offsets": EDGES},
        {"keys": NO_LIST},
    ),
    "freeze": Call(
        config(td.freeze),
        {"model": torch.nn.Linear(1, 1)},
        {"model": NO_MODULE, "keep": [5, "x", 1.5, [1], {"t": None}]},
    ),
    "Top": Call(
        config(td.Top),
        {"count": 2, "by": "step"},
        {"count": [*NO_COUNT, 0], "by": [*NO_NAME, "lfu", "none"]},
    ),
    "AtLeast": Call(
        config(td.AtLeast),
        {"score": 2, "by": "step"},
        {
            "score": NO_NUMBER,
            "by": [*NO_NAME, "expiry"],
            "leave_below": [*NO_OPTIONAL_NUMBER, 2.5],
        },
    ),
    "clip_grad_norm_": Call(
        config(td.clip_grad_norm_),
        {"modules": torch.nn.Linear(1, 1), "max_norm": 1.0},
        {"modules": [None, 5, "x", [5]], "max_norm": NO_NUMBER, "norm_type": NO_NUMBER},
    ),
    # -- recis
    "HashTable": Call(
        config(recis.HashTable),
        {"embedding_shape": [4]},
        {
            "embedding_shape": [*NO_LIST, [], [4, 4], ["4"], [1.5], [0]],
            "block_size": NO_COUNT,
            "dtype": NO_DTYPE,
            "device": NO_DEVICE,
            "children": [5, "abc", 1.5, [5]],
            "slice": NO_OBJECT,
            "initializer": NO_OBJECT,
            "name": [*NO_NAME, ""],
            "grad_reduce_by": [None, 5, "x"],
            "filter_hook": NO_OBJECT,
            "admissions": NO_OBJECT,
            "seed": ["x", 1.5, True],
            "max_rows": [*NO_OPTIONAL_COUNT, 0],
        },
        owner="",
        names={"children": "children|name", "embedding_shape": "embedding_shape"},
    ),
    "HashTable.forward": Call(
        forward(hash_table),
        {"ids": IDS},
        {"ids": NO_IDS, "admit_hook": NO_OBJECT, "child": [5, "x", 1.5]},
        owner="HashTable",
        names={"ids": "input|device"},
    ),
    "HashTable.insert": Call(
        method(hash_table, "insert"),
        {"ids": IDS, "embeddings": torch.rand(3, 4)},
        {"ids": NO_IDS, "embeddings": [*NO_FLOATS, torch.rand(3)], "child": [5, "x"]},
        owner="HashTable",
        names={"ids": "ids|input|device"},
    ),
    "HashTable.accept_grad": Call(
        method(hash_table, "accept_grad"),
        {"ids": IDS, "grad": torch.rand(3, 4)},
        {"ids": NO_IDS, "grad": [*NO_FLOATS, torch.rand(3)], "child": [5, "x"]},
        owner="HashTable",
        names={"ids": "ids|input|device"},
    ),
    **{
        f"HashTable.{name}": Call(
            method(hash_table, name), {}, {"child": [5, "x", 1.5]}, owner="HashTable"
        )
        for name in ("ids", "ids_map", "embeddings", "slot_group", "clear", "grad")
    },
    "EmbeddingOption": Call(
        config(recis.EmbeddingOption),
        {},
        {
            "embedding_dim": [*NO_COUNT, 0],
            "block_size": [*NO_COUNT, 0],
            "dtype": NO_DTYPE,
            "device": [None, *NO_DEVICE],
            "trainable": NO_FLAG,
            "max_partition_num": [*NO_COUNT, 0],
            "shared_name": [*NO_NAME, ""],
            "children": [*NO_LIST, [5], ["a", "b"], ["a", "a"]],
            "coalesced": NO_FLAG,
            "initializer": NO_OBJECT,
            "use_weight": NO_FLAG,
            "combiner": [None, 5, "x"],
            "combiner_kwargs": [5, "x", [1], {"tile_len": 5}],
            "grad_reduce_by": [None, 5, "x"],
            "filter_hook": NO_OBJECT,
            "admit_hook": NO_OBJECT,
            "fp16_enabled": NO_FLAG,
            "max_rows": [*NO_OPTIONAL_COUNT, 0],
        },
    ),
    "recis.DynamicEmbedding": Call(
        config(recis.DynamicEmbedding),
        {"emb_opt": recis.EmbeddingOption(embedding_dim=4)},
        {"emb_opt": NO_MODULE},
        owner="DynamicEmbedding",
    ),
    "recis.DynamicEmbedding.forward": Call(
        forward(lambda: recis.DynamicEmbedding(recis.EmbeddingOption(embedding_dim=4))),
        {"input_ids": IDS[None]},
        {"input_ids": NO_IDS, "input_weights": [5, "x", [1.0], IDS, torch.rand(2)]},
        owner="DynamicEmbedding",
        names={"input_weights": "weights"},
    ),
    "EmbeddingEngine": Call(
        config(recis.EmbeddingEngine),
        {"emb_options": {"a": recis.EmbeddingOption(embedding_dim=4)}},
        {"emb_options": [*NO_MODULE, {}, {"a": 5}, {"a": None}]},
    ),
    "EmbeddingEngine.forward": Call(
        forward(lambda: recis.EmbeddingEngine({"a": recis.EmbeddingOption(embedding_dim=4)})),
        {"input_features": {"a": IDS[None]}},
        {"input_features": [*NO_MODULE, {}, *({"a": value} for value in NO_IDS)]},
        owner="EmbeddingEngine",
        names={"input_features": "feature|input_features"},
    ),
    "RaggedTensor": Call(
        config(recis.RaggedTensor),
        {"values": IDS, "offsets": EDGES},
        {
            "values": [None, [1], np.arange(3), "x", IDS.to_sparse()],
            "offsets": [None, [], [1], np.arange(3), "x", 5, torch.rand(3), EDGES.to_sparse()],
            "weight": [5, "x", [1.0], IDS, torch.rand(2), torch.rand(3).to_sparse()],
        },
    ),
    "FilterHook": Call(
        config(recis.FilterHook),
        {"name": "GlobalStepFilter", "params": {"filter_step": 1}},
        {"name": [*NO_NAME, "x"], "params": [None, 5, "x", {"x": 1}]},
    ),
    "AdmitHook": Call(
        config(recis.AdmitHook),
        {"name": "ReadOnly", "params": {}},
        {"name": [*NO_NAME, "x"], "params": [None, 5, "x", {"x": 1}]},
    ),
    "filter_out_sparse_param": Call(
        config(recis.filter_out_sparse_param), {"model": hash_table()}, {"model": NO_MODULE}
    ),
    "SparseAdam": Call(
        config(lambda **given: recis.SparseAdam(**{"param_dict": {"t": hash_table()}, **given})),
        {},
        {
            "param_dict": [*NO_MODULE, {}, {"t": 5}],
            "lr": NO_NUMBER,
            "betas": [None, 5, "ab", [0.1], ["a", "b"]],
            "eps": NO_NUMBER,
            "weight_decay": NO_NUMBER,
        },
        owner="Adam",
    ),
    "gen_slice": Call(
        config(recis.gen_slice),
        {},
        dict.fromkeys(("shard_index", "shard_num", "slice_size"), NO_COUNT),
    ),
}

NUMBERS = ("lr", "weight_decay", "eps", "momentum", "trust_coefficient", "l1", "l2", "beta")
NUMBERS += ("initial_accumulator_value", "group_l1", "dampening", "lr_decay", "alpha", "rho")
NUMBERS += ("ema_beta", "ar_alpha", "min_shrinkage")
OPTIMIZERS = (
    *(td.SGD, td.MomentumSGD, td.LARSSGD, td.Adagrad, td.RowWiseAdagrad, td.Ftrl, td.GroupFtrl),
    *(td.Adam, td.AdamW, td.AdamWTF, td.AMSGrad, td.SmartDecayAdam, td.PartialRowWiseAdam),
    *(td.LAMB, td.PartialRowWiseLAMB, td.RMSprop, td.Adadelta, td.RowWiseRMSprop),
)
for optimizer in OPTIMIZERS:
    fields = optimizer.__dataclass_fields__
    CALLS[optimizer.__name__] = Call(
        config(optimizer),
        {"lr": 0.1},
        {
            **{name: NO_NUMBER for name in NUMBERS if name in fields},
            **dict.fromkeys(("clip_value", "clip_norm"), NO_OPTIONAL_NUMBER),
            **{
                name: NO_FLAG
                for name in (
                    "decoupled_weight_decay",
                    "stochastic_rounding",
                    "maximize",
                    "nesterov",
                )
                if name in fields
            },
            **({"row_steps": NO_FLAG} if optimizer is td.Adam else {}),
            "non_finite": [None, 5, "x"],
            **({"betas": [None, 5, "ab", [0.1], ["a", "b"]]} if "betas" in fields else {}),
            **({"state_dtype": NO_DTYPE} if "state_dtype" in fields else {}),
        },
    )

CASES = [(name, argument) for name, call in CALLS.items() for argument in call.wrong]


def names_value(message: str, value: Any) -> bool:
    """Whether a message says what was given; of tensors and lists it may say shape or dtype."""
    if not isinstance(value, (str, bytes, int, float, type(None))):
        return True
    said = (repr(value), f"is {value}", f"is a {type(value).__name__}")
    return any(text in message for text in said) or (value == "" and "is empty" in message)


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments(name: str) -> None:
    call = CALLS[name]
    call.call(**call.right)


@pytest.mark.parametrize(("name", "argument"), CASES, ids=[f"{n}-{a}" for n, a in CASES])
def test_wrong_arguments(name: str, argument: str) -> None:
    call = CALLS[name]
    for value in call.wrong[argument]:
        try:
            call.call(**{**call.right, argument: value})
        except (TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
            message = str(error)
        else:
            raise AssertionError(f"accepted {argument}={value!r}")
        owner = name if call.owner is None else call.owner
        assert owner in message, (value, message)
        assert re.search(rf"\b({call.names.get(argument, argument)})", message), (value, message)
        assert re.search(OTHERS_OWN, message) is None, (value, message)
        assert names_value(message, value), (value, message)
        assert re.search(REMEDY, message), (value, message)
