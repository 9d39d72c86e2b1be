"""Losses against negatives, searches, samples and exported vectors."""

from __future__ import annotations

from typing import Any

import torch
from refusing import Row, raising
from torch import nn

import torch_dynemb as td

SGD = td.SGD(lr=0.1)
PLAIN = td.DynamicEmbedding(4, name="plain", optimizer=SGD)
COUNTED = td.DynamicEmbedding(4, name="t", optimizer=SGD, policy=td.Policy(score="frequency"))
COUNTED(torch.arange(3))
TWO = td.DynamicEmbeddingCollection([td.TableConfig(n, 4) for n in "ab"], optimizer=SGD)
IDS, QUERY = torch.arange(2), torch.ones(2, 4)
NAN = QUERY.clone()
NAN[1, 2] = torch.nan
LOSS = td.SampledSoftmaxLoss(COUNTED)
FULL = td.FullSoftmaxLoss(COUNTED)


def loss(items: Any = COUNTED, **arguments: Any) -> object:
    return td.SampledSoftmaxLoss(items, **arguments)


def found(**arguments: Any) -> object:
    return td.top_k(**{"query": QUERY, "items": COUNTED, "k": 1, **arguments})


def sampled(**arguments: Any) -> object:
    return COUNTED.group.sample_ids(**{"table": 0, "n": 1, **arguments})


def of_rows(**arguments: Any) -> object:
    return td.in_batch_softmax_loss(**{"query": QUERY, "rows": QUERY, "ids": IDS, **arguments})


EMPTY = td.DynamicEmbedding(4, name="none", optimizer=SGD).eval()
LATE = td.DynamicEmbedding(
    4, name="late", optimizer=SGD, policy=td.Policy(admission=td.AdmitFrequent(9))
)


def drawn(items: Any) -> object:
    return td.SampledSoftmaxLoss(items, negatives=td.UniformNegatives(2))(QUERY, IDS)


ROWS: list[Row] = [
    *raising(
        RuntimeError,
        (lambda: drawn(EMPTY), "table 'none' is empty.*train it first"),
        (lambda: drawn(LATE), "table 'late' is empty.*look ids up by items until some have a row"),
        (lambda: td.FullSoftmaxLoss(EMPTY)(QUERY, IDS), "table 'none' is empty.*train it first"),
    ),
    *raising(
        TypeError,
        (lambda: loss(nn.Embedding(2, 4)), "items is .*Embedding.*expected a module with a dyn"),
        (lambda: loss(negatives=5), r"negatives is 5, expected one of \['InBatchNegatives'"),
        (lambda: loss(temperature="x"), "temperature is 'x', expected a number"),
        (lambda: loss(remove_accidental_hits=1), "remove_accidental_hits is 1, expected"),
        (lambda: LOSS([1.0], IDS), r"query is \[1.0\], expected a Tensor"),
        (lambda: LOSS(QUERY.long(), IDS), "query has dtype torch.int64, expected floats"),
        (lambda: LOSS(QUERY, IDS.float()), "input has dtype torch.float32, expected int64"),
        (lambda: LOSS(QUERY, IDS, IDS), "weights has dtype torch.int64, expected floats"),
        (lambda: td.UniformNegatives("x"), "UniformNegatives: n is 'x', expected int"),
        (lambda: td.FrequencyNegatives(1, power="x"), "power is 'x', expected a number"),
        (lambda: td.FullSoftmaxLoss(nn.Linear(2, 2)), "items is .*expected a module with a dyn"),
        (lambda: found(items=nn.Linear(2, 2)), "items is .*expected a module with a dynamic"),
        (lambda: found(k="x"), "k is 'x', expected int"),
        (lambda: found(exclude=IDS.float()), "exclude has dtype torch.float32, expected int64"),
        (lambda: found(filter=lambda ids: 5), r"filter returned 5, expected a bool tensor of"),
        (lambda: sampled(n="x"), "n is 'x', expected int"),
        (lambda: td.export_vectors(5, "t", "x"), "model is 5, expected a torch.nn.Module"),
    ),
    *raising(
        ValueError,
        (lambda: loss(PLAIN), r"'plain' keeps no counts: create.*or give correction=None"),
        (
            lambda: loss(PLAIN, negatives=td.FrequencyNegatives(2), correction=None),
            r"'plain' keeps no counts: create.*or take UniformNegatives",
        ),
        (lambda: loss(TWO), r"table is None, but items has tables \['a', 'b'\]: name one"),
        (lambda: loss(TWO, table="c"), r"table is 'c', expected one of \['a', 'b'\]"),
        (lambda: loss(temperature=0), "temperature is 0.0, expected more than 0"),
        (lambda: loss(form="x"), "form is 'x', expected one of"),
        (lambda: loss(correction="x"), "correction is 'x', expected 'logq' or None"),
        (lambda: loss(form="bpr"), "form 'bpr' compares.*give correction=None"),
        (lambda: loss(negatives=()), "negatives has 0 sources, expected one or more"),
        (
            lambda: loss(negatives=(td.UniformNegatives(1), td.UniformNegatives(2))),
            "negatives has 2 sources, expected one or more of different kinds",
        ),
        (lambda: LOSS(QUERY[:, :3], IDS), r"query has shape \(2, 3\), expected \(n, 4\)"),
        (lambda: LOSS(QUERY[:0], IDS[:0]), "query has no rows, expected one query or more"),
        (lambda: LOSS(QUERY, torch.arange(3)), r"positive_ids has shape \(3,\).*expected \(2,\)"),
        (lambda: LOSS(QUERY, IDS, torch.ones(3)), r"weights has shape \(3,\).*expected \(2,\)"),
        (lambda: LOSS(NAN, IDS), "query has NaN, first in row 1: check.*nothing has been looked"),
        (lambda: FULL(NAN, IDS), "query has NaN, first in row 1"),
        (lambda: td.FullSoftmaxLoss(COUNTED, chunk=3), "chunk is 3, expected at least 4"),
        (lambda: td.UniformNegatives(0), "n is 0, expected at least 1"),
        (lambda: td.FrequencyNegatives(1, power=0), "power is 0, expected more than 0"),
        (lambda: of_rows(rows=QUERY.long()), "rows has dtype torch.int64.*expected floats"),
        (lambda: of_rows(rows=QUERY[:1]), "rows has 1 rows, expected one for each of the 2"),
        (lambda: of_rows(form="x"), "form is 'x', expected one of"),
        (lambda: found(k=0), "k is 0, expected at least 1"),
        (lambda: found(metric="l2"), "metric is 'l2', expected 'dot' or 'cosine'"),
        (lambda: found(query=NAN), "query has NaN, first in row 1"),
        (lambda: found(exclude=(IDS,)), r"exclude is a tuple of 1, expected \(values, offsets\)"),
        (lambda: found(exclude=IDS), r"exclude has shape \(2,\).*expected 2 dimensions"),
        (lambda: found(exclude=IDS[None]), r"exclude has shape \(1, 2\), expected \(2, m\)"),
        (lambda: found(exclude=(IDS, IDS)), "exclude has offsets of 2 elements, expected 3"),
        (lambda: sampled(n=-1), "n is -1, expected at least 0"),
        (lambda: sampled(by="x"), "by is 'x', expected 'uniform' or 'frequency'"),
        (lambda: sampled(by="frequency", power=-1), "power is -1, expected more than 0"),
        (
            lambda: PLAIN.group.sample_ids(0, 1, by="frequency"),
            r"'plain' keeps no counts: create it with policy=Policy\(score='frequency'\)",
        ),
        (lambda: td.export_vectors(TWO, "x", "y"), r"table is 'x', of which the model has 0"),
        (
            lambda: td.export_vectors(TWO, "a", "y", format="x"),  # type: ignore[arg-type]
            "format is 'x', expected 'npy' or 'faiss'",
        ),
        (lambda: td.export_vectors(TWO, "a", "no file"), "table 'a' is empty, expected an id"),
    ),
    *raising(
        FileExistsError,
        (lambda: td.export_vectors(COUNTED, "t", "/tmp"), "/tmp exists: choose another path"),
    ),
    *raising(
        IndexError,
        (lambda: sampled(table=9), "9"),
    ),
]
