"""``torch_dynemb.migrate``."""

from __future__ import annotations

from typing import Any

import torch
from refusing import Row, raising

import torch_dynemb as td
from torch_dynemb import migrate

IDS, VALUES = torch.arange(5), torch.rand(5, 4)


def load(model: Any = None, source: Any = None, **options: Any) -> None:
    table = td.DynamicEmbedding(4, optimizer=td.Adagrad(lr=0.1)) if model is None else model
    migrate.load(table, migrate.read_tensors(IDS, VALUES) if source is None else source, **options)


ROWS: list[Row] = [
    *raising(
        TypeError,
        (lambda: load(source=3), "source is 3, expected a Source or a dict"),
        (lambda: load(source={"embedding": 3}), "source has 'embedding': 3"),
        (lambda: load(model=3), "model is 3, expected a torch.nn.Module"),
        (lambda: load(replace=1), "replace is 1, expected True or False"),
        (
            lambda: migrate.read_tensors(IDS.int(), VALUES),
            "ids has dtype torch.int32, expected int64",
        ),
        (lambda: migrate.read_tensors(IDS, [1.0]), r"rows is \[1.0\], expected a Tensor"),
    ),
    *raising(
        ValueError,
        (lambda: load(non_finite="drop"), "non_finite is 'drop', expected 'error' or 'keep'"),
        (lambda: load(batch_size=0), "batch_size is 0, expected at least 1"),
        (
            lambda: migrate.read_tensors(IDS[:2], VALUES),
            r"rows has shape \(5, 4\), expected \(2, dim\)",
        ),
        (
            lambda: migrate.read_tensors(IDS, VALUES, state={"sum": VALUES[:3]}),
            r"state\['sum'\] has shape \(3, 4\)",
        ),
    ),
]
