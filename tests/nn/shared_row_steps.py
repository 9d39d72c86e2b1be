"""What ranks do in tests of modules with ``process_group=``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import torch_dynemb as td

START = td.Normal(0.0, 0.5)


class Model(nn.Module):
    """A module of each kind: padding, weights, means, two dims, one table for two features."""

    def __init__(self, process_group: Any, **options: Any) -> None:
        super().__init__()
        options = {"optimizer": td.Adam(lr=0.1), **options, "process_group": process_group}
        one = {**options, "initializer": START}
        self.items = td.DynamicEmbedding(4, name="items", padding_idx=0, **one)
        self.tags = td.DynamicEmbeddingBag(4, name="tags", mode="mean", padding_idx=0, **one)
        self.bags = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig("user", 4, ["user", "friend"], initializer=START),
                td.TableConfig("ad", 8, ["ad"], initializer=START, padding_idx=3),
            ],
            **options,
        )
        self.rows = td.DynamicEmbeddingCollection(
            [td.TableConfig("a", 4, initializer=START), td.TableConfig("b", 4, initializer=START)],
            **options,
        )
        torch.manual_seed(3)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """A number for each sample.

        Args:
            ids: int64 (batch, 5).
            weights: float32 (batch, 5).
        """
        features = {"user": ids[:, :2], "ad": ids, "friend": ids[:, 4:]}
        pooled = self.bags(features)
        each = self.rows({"a": ids[:, 0], "b": ids[:, 1:3]})
        hidden = self.items(ids).sum(1) + self.tags(ids, per_sample_weights=weights)
        hidden = hidden + pooled[:, :4] * pooled[:, 4:8] + pooled[:, 8:12] + pooled[:, 12:]
        hidden = hidden + each["a"] + each["b"].sum(1)
        out: Tensor = self.head(torch.tanh(hidden)).squeeze(1)
        return out

    def tables(self) -> list[tuple[Any, int]]:
        """Group and number of each table."""
        modules = (self.items, self.tags, self.bags, self.rows)
        return [(m.group, t) for m in modules for t in range(len(m.group.names))]


def content(model: Model) -> list[dict[int, list[float]]]:
    """Rows by id of each table, of this rank."""
    return [
        {
            int(id): row.tolist()
            for batch in group.export(table)
            for id, row in zip(batch.ids, batch.rows, strict=True)
        }
        for group, table in model.tables()
    ]


def batch_of(step: int, samples: range) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 25, (8, 5), generator=draw)
    weights = torch.rand(8, 5, generator=draw) + 0.1
    return ids[samples.start : samples.stop], weights[samples.start : samples.stop]


def saved(rank: int, folder: str) -> dict[str, Any]:
    """Save and load in three ways; freeze."""
    torch.manual_seed(7)
    model = Model(dist.group.WORLD)
    ids, weights = batch_of(1, range(4 * rank, 4 * rank + 4))
    model(ids, weights).sum().backward()
    state = model.state_dict()
    again = Model(dist.group.WORLD)
    again.load_state_dict(state)
    others: list[Any] = [None, None]
    dist.all_gather_object(others, {k: v for k, v in state.items() if k.startswith("items.")})
    errors = []
    for target, of_rank in ((again, others[1 - rank]), (Model(None), others[0])):
        try:
            target.load_state_dict(of_rank, strict=False)
        except RuntimeError as refused:
            errors.append(str(refused))
    dcp.save(state, checkpoint_id=Path(folder) / "dcp")
    by_dcp = Model(dist.group.WORLD)
    read = by_dcp.state_dict()
    dcp.load(read, checkpoint_id=Path(folder) / "dcp")
    by_dcp.load_state_dict(read)
    td.checkpoint.save(Path(folder) / "saved", model)
    frozen = td.freeze(model)
    model.eval()
    with torch.no_grad():
        same = bool(torch.equal(frozen(*batch_of(2, range(8))), model(*batch_of(2, range(8)))))
    return {
        "loaded": content(again) == content(model) == content(by_dcp),
        "error": errors[0],
        "alone": errors[1],
        "content": content(model),
        "frozen": same,
    }


def refused(rank: int) -> dict[str, str]:
    """Errors of constructors and calls, by case."""
    world, found = dist.group.WORLD, {}

    def note(case: str, make: Any) -> None:
        try:
            make()
            found[case] = "no error"
        except (TypeError, ValueError, RuntimeError) as error:
            found[case] = f"{type(error).__name__}: {error}"

    def table(**options: Any) -> td.DynamicEmbedding:
        options = {"name": "items", "optimizer": td.SGD(lr=0.1), "process_group": world, **options}
        return td.DynamicEmbedding(4, **options)

    note("type", lambda: table(process_group="world"))
    note("custom", lambda: table(policy=td.Policy(score="custom")))
    note("differs", lambda: table(initializer=td.Normal(0.0, 1.0 + rank)))
    note("lr", lambda: table(optimizer=td.SGD(lr=0.1 * (1 + rank))))
    note("scores", lambda: table()(torch.tensor([1]), scores=torch.tensor([1])))
    model = nn.Sequential(table())
    note("averaged", lambda: torch.optim.swa_utils.AveragedModel(model))
    of_first = dist.new_group([0])
    if rank == 1:
        note("member", lambda: table(process_group=of_first))
    return found


def unnamed_and_limited(rank: int) -> dict[str, Any]:
    """An unnamed table begins alike on all ranks, capacities are divided, norms are common."""
    torch.manual_seed(rank)
    table = td.DynamicEmbedding(
        4,
        optimizer=td.SGD(lr=0.1),
        policy=td.Policy(capacity=100),
        process_group=dist.group.WORLD,
        split=True,
    )
    same = torch.arange(10)
    with torch.no_grad():
        read = table(same)
    out = table(same + 10 * rank)
    out.sum().backward()
    norm = float(td.clip_grad_norm_(table, 1e9))
    table.optimizer.step()
    twin = copy.deepcopy(table)
    return {
        "read": read,
        "ids": sorted(table.ids().tolist()),
        "capacity": table.table.policy.capacity,
        "norm": norm,
        "twin": bool(torch.equal(twin(same), table(same))),
    }
