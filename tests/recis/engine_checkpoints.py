"""What ranks, or one process, do in tests of checkpoints of engines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from loaded_content import score_words
from lookups import option
from rank_steps import batch, features, insert_content
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.checkpoint import LoadReport
from torch_dynemb.recis import (
    DynamicEmbedding,
    EmbeddingEngine,
    FilterHook,
    HashTable,
    SparseAdam,
    filter_out_sparse_param,
)
from torch_dynemb.table.content import read_content, read_counts

SAMPLES = 12


class Child(NamedTuple):
    """What a logical table holds on a rank.

    Attributes:
        values: by id: rows, optimizer state and scores.
        counts: of ids that wait.
        steps: of its optimizer, and of its table.
    """

    values: dict[int, dict[str, Tensor]]
    counts: dict[int, int]
    steps: tuple[int, int]


def contents(model: nn.Module) -> dict[str, Child]:
    """By child."""
    result = {}
    for table in filter_out_sparse_param(model).values():
        group = table.group
        group.materialize()
        for number, child in enumerate(table.children_hashtable):
            content = read_content(group.tables, number)
            columns = {"rows": content.rows, "scores": score_words(content), **content.state}
            waiting = read_counts(group.tables, number)
            result[child] = Child(
                {
                    id: {name: of[n] for name, of in columns.items()}
                    for n, id in enumerate(content.ids.tolist())
                },
                {}
                if waiting is None
                else dict(zip(waiting.ids.tolist(), waiting.counts.tolist(), strict=True)),
                (int(group.rows.row_clock[number]), group.steps),
            )
    return result


class Trained:
    """An engine with its optimizer; on one process, or on all ranks.

    Args:
        seed: of the rows.
        filled: whether rows of 8 bits have been inserted.
        filters: removes what it has not seen for two steps.
    """

    def __init__(
        self, rank: int, size: int, *, seed: int = 5, filled: bool = True, filters: bool = False
    ) -> None:
        torch.manual_seed(seed)
        options = features()
        if filters:
            hook = FilterHook("GlobalStepFilter", {"filter_step": 2, "filter_interval": 3})
            options = {"clicked": option(combiner="mean", filter_hook=hook)}
        self.engine = EmbeddingEngine(options)
        self.names = list(options)
        self.rank, self.size = rank, size
        if filled and not filters:
            insert_content(self.engine, rank, size)
        self.optimizer = SparseAdam(filter_out_sparse_param(self.engine), lr=0.1)

    def train(self, steps: range) -> None:
        """On the same samples, however many ranks there are."""
        mine = range(SAMPLES * self.rank // self.size, SAMPLES * (self.rank + 1) // self.size)
        for step in steps:
            data = batch(mine, step)
            output = self.engine({name: data[name] for name in self.names})
            losses = [of.float().square().sum() for of in output.values()]
            (torch.stack(losses).sum() * self.size / SAMPLES).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def save_engine(
    rank: int, path: str, steps: range, more: range, filters: bool = False
) -> tuple[dict[str, Child], dict[str, Child], list[dict[str, Tensor]]]:
    """What an engine holds that is saved, and what after more training."""
    trained = Trained(rank, 2, filters=filters)
    trained.train(steps)
    td.checkpoint.save(path, trained.engine)
    saved = contents(trained.engine)
    trained.train(more)
    return saved, contents(trained.engine), raw(trained.engine)


def save_engine_increments(rank: int, folder: str) -> None:
    """Saves ``0``, two increments of it, and ``whole``."""
    trained = Trained(rank, 2)
    td.checkpoint.record_changes(trained.engine)
    trained.train(range(2))
    td.checkpoint.save(f"{folder}/0", trained.engine)
    for number in (1, 2):
        trained.train(range(1 + number, 2 + number))
        since = f"{folder}/{number - 1}"
        td.checkpoint.save(f"{folder}/{number}", trained.engine, since=since)
    td.checkpoint.save(f"{folder}/whole", trained.engine)


def load_engine(
    rank: int, path: str, more: range, filters: bool = False
) -> tuple[dict[str, Child], dict[str, Child], LoadReport, list[dict[str, Tensor]]]:
    """What an engine holds that has learnt something else and then loaded; and after training."""
    trained = Trained(rank, 2, seed=8, filled=False, filters=filters)
    report = td.checkpoint.load(path, trained.engine)
    loaded = contents(trained.engine)
    trained.train(more)
    return loaded, contents(trained.engine), report, raw(trained.engine)


def raw(model: nn.Module) -> list[dict[str, Tensor]]:
    """All tensors of the tables."""
    return [table.group.state.tensors() for table in filter_out_sparse_param(model).values()]


def with_options(**changes: Any) -> HashTable:
    """A table of whole or partial ids."""
    return HashTable([4], initializer=td.Normal(), device=torch.get_default_device(), **changes)


def one_group_each(rank: int, path: str) -> list[Any]:
    """Engines of a rank alone beside a default group: what a save of both together raises, and
    what each loads of its own."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    torch.manual_seed(5)
    modules = [DynamicEmbedding(option(pg=groups[rank])) for _ in range(2)]
    modules[0](torch.arange(4 + rank)[:, None])
    try:
        td.checkpoint.save(path, modules[0])
        raised = "nothing"
    except ValueError as error:
        raised = str(error)
    own = f"{path} of {rank}"
    td.checkpoint.save(own, modules[0], process_group=groups[rank])
    report = td.checkpoint.load(own, modules[1], process_group=groups[rank])
    return [raised, report.tables["item"].ids, modules[1].hashtable.ids().tolist()]
