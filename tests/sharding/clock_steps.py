"""What the ranks of test_clocks do: they train while their clocks say something else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from jagged_batches import batches_of_ranks, keyed_jagged
from loaded_content import score_words
from sharded_models import Model, Table, kernels, sharded
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torch_dynemb as td
from torch_dynemb.ops.columns import Clock
from torch_dynemb.table.content import read_content
from torch_dynemb.torchrec import TableOptions

STEPS = 5
IDS = 60
# a clock that is hours ahead of another one, seconds behind it, or faster
STARTS = (1_700_000_000, 1_700_010_000, 1_699_999_990, 1_700_000_003)
PACES = (7, 1, 5000, 3)
SCORES = ("decayed", "timestamp", "frequency")
POLICY = td.Policy(score=SCORES, half_life=100, capacity=24, ttl=2**40)


class Shard(NamedTuple):
    """A shard at the end, and the times that it was given.

    Attributes:
        now: of the lookups of each step.
        proposed: by this rank, after each step.
    """

    table: str
    first_column: int
    ids: Tensor
    scores: Tensor
    now: list[int]
    proposed: list[int]


@contextmanager
def clock_of(rank: int) -> Iterator[None]:
    """The machine's clock goes on whenever it is read."""
    readings = itertools.count(STARTS[rank], PACES[rank])
    with mock.patch("time.time", side_effect=lambda: float(next(readings))):
        yield


def trained(
    rank: int, tables: tuple[Table, ...], kind: str, given: int | None, ends_steps: bool
) -> list[Shard]:
    """Trains by a clock of the rank's own.

    Args:
        given: what all ranks give step() in place of their clocks; it grows from step to step.
    """
    torch.manual_seed(0)
    options = {table.name: TableOptions(initializer=td.Normal(), policy=POLICY) for table in tables}
    with clock_of(rank):
        model = sharded(tables, options=options, optimizer=td.SGD(lr=0.1))
        groups = [kernel.tables.group for kernel in kernels(model)]
        now: list[list[int]] = [[] for _ in groups]
        proposed: list[list[int]] = [[] for _ in groups]
        for features in _batches(rank, tables, kind):
            output = model(features)
            for g, group in enumerate(groups):
                now[g].append(int(group.index.clock[Clock.NOW]))
            torch.stack([of.sum() for of in output.values()]).sum().backward()
            if given is not None:
                given += 10
                for kernel in kernels(model):
                    kernel.fused_optimizer.step(now=given)
            elif ends_steps:
                model.fused_optimizer.step()
            for g, group in enumerate(groups):
                assert group.clock.proposed is not None
                proposed[g].append(int(group.clock.proposed))
    return [
        _shard(kernel, t, now[k], proposed[k])
        for k, kernel in enumerate(kernels(model))
        for t in range(len(kernel.tables.shards))
    ]


def _batches(rank: int, tables: tuple[Table, ...], kind: str) -> Iterator[Any]:
    names = list(dict.fromkeys(feature for table in tables for feature in table.features))
    for step in range(STEPS):
        batches = batches_of_ranks(kind, names, dist.get_world_size(), step, IDS)
        yield keyed_jagged(batches[rank], kind)


def _shard(kernel: Any, table: int, now: list[int], proposed: list[int]) -> Shard:
    group, shard = kernel.tables.group, kernel.tables.shards[table]
    group.materialize()
    content = read_content(group.tables, table)
    return Shard(shard.name, shard.first_column, content.ids, score_words(content), now, proposed)


class _WithLoss(Model):
    """A model that a pipeline can trace."""

    def forward(self, features: Any) -> Any:
        output = self.bags(features).values()
        return output.sum(), output


def _with_loss(model: Model) -> None:
    model.__class__ = _WithLoss


def pipelined(rank: int, tables: tuple[Table, ...]) -> list[Shard]:
    """The same by TorchRec's pipeline, which sends the ids of batches that come later."""
    torch.manual_seed(0)
    options = {table.name: TableOptions(initializer=td.Normal(), policy=POLICY) for table in tables}

    with clock_of(rank):
        model = sharded(tables, options=options, optimizer=td.SGD(lr=0.1), prepare=_with_loss)
        pipeline = TrainPipelineSparseDist(
            model, model.fused_optimizer, torch.device("cpu"), execute_all_batches=True
        )
        groups = [kernel.tables.group for kernel in kernels(model)]
        now: list[list[int]] = [[] for _ in groups]
        stream = _batches(rank, tables, "plain")
        for _ in range(STEPS):
            pipeline.progress(stream)
            for g, group in enumerate(groups):
                now[g].append(int(group.index.clock[Clock.NOW]))
    return [
        _shard(kernel, t, now[k], [])
        for k, kernel in enumerate(kernels(model))
        for t in range(len(kernel.tables.shards))
    ]
