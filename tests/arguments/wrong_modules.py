"""Modules and collections: constructors, ``from_embedding``, features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from refusing import Row
from torch import Tensor, nn

import torch_dynemb as td

SGD = td.SGD(lr=0.1)
ONE_TABLE = [td.TableConfig("t", 4)]
KINDS: list[Callable[..., nn.Module]] = [
    lambda **arguments: td.DynamicEmbedding(4, **arguments),
    lambda **arguments: td.DynamicEmbeddingBag(4, mode="sum", **arguments),
    lambda **arguments: td.DynamicEmbeddingBagCollection(ONE_TABLE, **arguments),
    lambda **arguments: td.DynamicEmbeddingCollection(ONE_TABLE, **arguments),
]
TABLES: list[Callable[..., object]] = [
    lambda **arguments: bags([td.TableConfig(**{"name": "t", **arguments})]),
    lambda **arguments: td.DynamicEmbedding(optimizer=SGD, **arguments),
    lambda **arguments: td.DynamicEmbeddingBag(optimizer=SGD, **arguments),
]
IDS, WEIGHT = torch.arange(4), torch.rand(3, 4)
FEATURES = {name: torch.arange(4).reshape(2, 2) for name in ("user", "query")}


def bags(tables: list[td.TableConfig], **arguments: Any) -> nn.Module:
    return td.DynamicEmbeddingBagCollection(tables, optimizer=SGD, **arguments)


def looked_up(query: Any) -> Tensor:
    return bags([td.TableConfig(name, 4) for name in FEATURES])({**FEATURES, "query": query})


# of all modules and collections
ROWS: list[Row] = [
    (partial(kind, **arguments), error, words)
    for kind in KINDS
    for arguments, error, words in (
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer is <class .*expected a config"),
        ({"optimizer": "sgd"}, TypeError, "optimizer is 'sgd', expected a config"),
        ({"optimizer": SGD, "output_dtype": torch.int8}, TypeError, r"output_dtype is torch\.int8"),
        ({"optimizer": SGD, "device": "meta"}, RuntimeError, "device is meta"),
        ({"optimizer": SGD, "device": "cuda"}, RuntimeError, "device is cuda"),
        ({"optimizer": SGD, "max_rows": 1 << 40}, ValueError, "max_rows is 1099511627776"),
    )
]

# of a table
ROWS += [
    (partial(kind, **{"embedding_dim": 4, **arguments}), error, words)
    for kind in TABLES
    for arguments, error, words in (
        ({"embedding_dim": -3}, ValueError, "embedding_dim is -3"),
        ({"embedding_dim": 2.0}, TypeError, r"embedding_dim is 2\.0, expected int"),
        ({"embedding_dim": 2**31}, ValueError, "is 2147483648, expected at most 16777216"),
        (
            {"initializer": torch.nn.init.normal_},
            TypeError,
            "is <function normal_.*expected one of",
        ),
        ({"initializer": td.ByColumn(((2, td.Constant(0.0)),))}, ValueError, "have 2 columns"),
        ({"eval_default": "mean"}, ValueError, "eval_default is 'mean', expected 'initial'"),
        ({"padding_idx": 1 << 63}, ValueError, "padding_idx is 9223372036854775808, expected an"),
        *(
            ({"dtype": dtype}, TypeError, f"dtype is {dtype}, expected one of .*cannot be trained")
            for dtype in (torch.int8, torch.uint8, torch.int32, torch.float64)
        ),
    )
]

ROWS += [
    (lambda: bags(ONE_TABLE, mode="concat"), ValueError, "mode is 'concat'"),
    (lambda: bags(ONE_TABLE * 2), ValueError, "2 tables are named 't'"),
    (
        lambda: bags([td.TableConfig("a", 4, ["x"]), td.TableConfig("b", 4, ["y", "x"])]),
        ValueError,
        "feature 'x' belongs to two tables, 'a' and 'b'",
    ),
    (
        lambda: td.DynamicEmbeddingCollection(
            [td.TableConfig("a", 4), td.TableConfig("b", 8)], optimizer=SGD
        ),
        ValueError,
        r"embedding_dim \{'a': 4, 'b': 8\}, expected one dim",
    ),
]

# from_embedding
ROWS += [
    (partial(kind.from_embedding, *arguments, optimizer=SGD), error, words)
    for kind in (td.DynamicEmbedding, td.DynamicEmbeddingBag)
    for arguments, error, words in (
        ([torch.rand(3)], ValueError, r"weight has shape \(3,\), expected \(n, dim\)"),
        ([WEIGHT, torch.arange(2)], ValueError, r"ids has shape \(2,\), expected \(3,\)"),
        ([WEIGHT, torch.tensor([1, 2, 1])], ValueError, "ids has repeated ids"),
    )
]

# features of a collection
ROWS += [
    *(
        (partial(looked_up, query), error, words)
        for query, error, words in (
            (IDS, ValueError, r"'query' has shape \(4,\)"),
            (torch.rand(2, 2), TypeError, "'query': input has dtype torch.float32"),
            ([1, 2], TypeError, "'query': input is a list"),
            (torch.arange(6).reshape(3, 2), ValueError, "'query' has 3 bags, but 'user' has 2"),
            ((IDS, torch.tensor([0, 2, 4]), torch.rand(4)), ValueError, "is a tuple of 3"),
            ((IDS, torch.tensor([0.0, 2, 4])), TypeError, r"offsets has dtype torch\.float32"),
            ((IDS, IDS[:0]), ValueError, "offsets is empty"),
        )
    ),
]
