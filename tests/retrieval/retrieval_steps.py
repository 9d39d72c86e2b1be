"""What ranks do in tests of losses over tables that they share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from seeding import seeded
from small_embeddings import embedding
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.recis import EmbeddingEngine, EmbeddingOption

DIM = 4


def refusal(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def changes_of_ids(loss_of: Any, look_up: Any, step: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a step of SGD with a learning rate of 1 changes, and the gradient of a plain tensor."""
    before = look_up().detach().clone()
    query = torch.randn(len(ids), DIM, generator=seeded(len(ids)))
    plain = before.clone().requires_grad_()
    td.in_batch_softmax_loss(query, plain, ids).backward()
    assert plain.grad is not None
    loss_of(query).backward()
    step()
    return before - look_up().detach(), plain.grad


def shared_items(rank: int) -> dict[str, Any]:
    """In-batch negatives of a table with ``process_group=``, and what it refuses."""
    policy = td.Policy(score="frequency")
    items = td.DynamicEmbedding(
        DIM,
        name="items",
        optimizer=td.SGD(lr=1.0),
        policy=policy,
        process_group=dist.group.WORLD,
    )
    ids = torch.arange(5 + rank) + 100 * rank  # each id on one rank: its gradients do not meet
    items(ids)  # inserts
    loss = td.SampledSoftmaxLoss(items, correction=None)
    changed, gradient = changes_of_ids(
        lambda query: loss(query, ids), lambda: items(ids), items.optimizer.step, ids
    )
    everyone = torch.cat([torch.arange(5), torch.arange(6) + 100])
    query = torch.randn(2 + rank, DIM, generator=seeded(rank))  # other numbers on other ranks
    seen = everyone[: (2 + rank) * (1 + rank)].view(2 + rank, 1 + rank)  # of other lengths
    found = td.top_k(query, items, 3 + rank, exclude=seen)
    whole = td.top_k(query, td.freeze(items), 3 + rank, exclude=seen)
    return {
        "changed": changed,
        "gradient": gradient / dist.get_world_size(),
        "correction": refusal(lambda: td.SampledSoftmaxLoss(items)),
        "negatives": refusal(
            lambda: td.SampledSoftmaxLoss(items, negatives=td.UniformNegatives(5), correction=None)
        ),
        "full": refusal(lambda: td.FullSoftmaxLoss(items)),
        "top_k": (tuple(found), tuple(whole)),
        "metrics": refusal(
            lambda: td.top_k(query, items, 1, metric="dot" if rank == 0 else "cosine")
        ),
        "vectors": refusal(lambda: td.export_vectors(items, "items", "unused")),
    }


def results_of_ranks(
    rank: int, items: Any, table: str, everyone: Tensor, look_up: Any
) -> tuple[Any, Any]:
    """Results of a search of all ranks, and those of a full sort of all rows."""
    query = torch.randn(2 + rank, DIM, generator=seeded(rank))
    seen = everyone[: (2 + rank) * (1 + rank)].view(2 + rank, 1 + rank)  # of other lengths
    found = td.top_k(query, items, 3 + rank, table=table, exclude=seen)
    with torch.no_grad():
        scores = query @ look_up(everyone).detach().t()
    scores.masked_fill_((seen[:, :, None] == everyone).any(1), -torch.inf)
    expected = scores.topk(3 + rank)
    return tuple(found), (everyone[expected.indices], expected.values)


def engine_items(rank: int) -> dict[str, Any]:
    """Items of an engine of RecIS: rows for in-batch negatives, and a search."""
    option = EmbeddingOption(DIM, shared_name="item", initializer=td.Normal())
    engine = EmbeddingEngine({"item": option})
    (table,) = engine.tables.values()
    optimizer = table.set_optimizer(td.SGD(lr=1.0))
    ids = torch.arange(5 + rank) + 100 * rank  # each id on one rank: its gradients do not meet

    def look_up(ids: Tensor) -> Tensor:
        rows: Tensor = engine({"item": ids[:, None]})["item"]
        return rows

    look_up(ids)  # inserts
    changed, gradient = changes_of_ids(
        lambda query: td.in_batch_softmax_loss(query, look_up(ids), ids),
        lambda: look_up(ids),
        optimizer.step,
        ids,
    )
    everyone = torch.cat([torch.arange(5), torch.arange(6) + 100])
    return {
        "changed": changed,
        "gradient": gradient / dist.get_world_size(),
        "top_k": results_of_ranks(rank, table, "item", everyone, look_up),
        "loss": refusal(lambda: td.SampledSoftmaxLoss(table, correction=None)),
    }


def oneembedding_items(rank: int) -> tuple[Any, Any]:
    """A search of one of the tables of an embedding of OneEmbedding."""
    module = embedding()
    module.set_optimizer(td.SGD(lr=1.0))
    ids = torch.arange(5 + rank) + 100 * rank

    def look_up(ids: Tensor) -> Tensor:
        rows: Tensor = module(ids, torch.ones_like(ids))
        return rows

    look_up(ids)  # inserts
    everyone = torch.cat([torch.arange(5), torch.arange(6) + 100])
    return results_of_ranks(rank, module, module.group.names[1], everyone, look_up)
