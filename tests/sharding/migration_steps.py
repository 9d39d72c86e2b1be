"""What the ranks of test_migrated_shards do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from checkpoint_models import Kind, Shard, sharded_model, shards_of, train
from checkpoint_steps import names_of
from torch import Tensor

from torch_dynemb import migrate
from torch_dynemb.compat.dynamicemb import DynamicEmbDump, DynamicEmbLoad


class Loaded(NamedTuple):
    """What a rank holds after a load.

    Attributes:
        shards: of tables.
        report: by table: ids, and what begins anew.
        error: of the load.
        after: the shards after more training.
    """

    shards: list[Shard]
    report: dict[str, tuple[int, tuple[str, ...]]]
    error: str
    after: list[Shard]


def load_tensors(
    rank: int,
    kinds: Sequence[Kind],
    optimizer: str,
    given: dict[str, tuple[Tensor, Tensor, Tensor]],
) -> Loaded:
    """Loads ids, rows and the state of Adagrad into sharded tables, and goes on training."""
    model = sharded_model(kinds, 0, optimizer)
    train(model, rank, names_of(kinds), range(1))
    sources = {
        name: migrate.read_tensors(ids, rows, state={"sum": sums}, optimizer_steps=5)
        for name, (ids, rows, sums) in given.items()
    }
    error, report = "", {}
    try:
        told = migrate.load(model, sources, replace=True, batch_size=7)
        report = {name: (of.ids, of.fresh) for name, of in told.items()}
    except ValueError as raised:
        error = str(raised)
    shards = shards_of(model)
    train(model, rank, names_of(kinds), range(1, 3))
    return Loaded(shards, report, error, shards_of(model))


def load_dump(rank: int, kinds: Sequence[Kind], optimizer: str, path: str) -> Loaded:
    """Loads what DynamicEmb has dumped."""
    model = sharded_model(kinds, 0, optimizer)
    error = ""
    try:
        DynamicEmbLoad(path, model, optim=True, counter=True)
    except ValueError as raised:
        error = str(raised)
    return Loaded(shards_of(model), {}, error, [])


def dump(rank: int, kinds: Sequence[Kind], optimizer: str, path: str) -> list[Shard]:
    """Trains and dumps."""
    model = sharded_model(kinds, 0, optimizer)
    train(model, rank, names_of(kinds), range(3))
    DynamicEmbDump(path, model, optim=True, counter=True)
    return shards_of(model)


def refused_dump(rank: int, kinds: Sequence[Kind], optimizer: str, path: str) -> None:
    """Dumps what no dump can have."""
    model = sharded_model(kinds, 0, optimizer)
    with torch.no_grad():
        DynamicEmbDump(path, model, optim=True)
