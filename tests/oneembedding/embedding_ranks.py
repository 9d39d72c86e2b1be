"""What ranks do in tests of embeddings over several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_embeddings import content, embedding
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import oneembedding

SAMPLES = torch.randint(0, 9, (5, 12, 3), generator=torch.Generator().manual_seed(5))

Rows = dict[tuple[int, int], Tensor]


def model(path: Path | None = None, **options: Any) -> tuple[Any, oneembedding.Optimizer]:
    module = embedding(path=path, **options)
    adam = torch.optim.Adam(module.parameters(), lr=0.1)
    return module, oneembedding.Optimizer(adam, [module])


def train(module: Any, optimizer: Any, steps: range, samples: slice, factor: float) -> list[Tensor]:
    """Outputs of steps with some of the samples; the loss is a mean over all of them."""
    outputs = []
    for step in steps:
        ids = SAMPLES[step, samples]
        numbers = torch.arange(3).expand_as(ids) if step % 2 else None
        rows = module(ids, numbers)
        (rows.sin() * ids[..., None]).sum().mul(factor).backward()
        optimizer.step()
        outputs.append(rows.detach())
    return outputs


def part(rank: int, size: int) -> slice:
    """Samples of a rank: the last one of several has none in common with others, and fewer."""
    bounds = [0, 8, 12] if size == 2 else [0, 12]
    return slice(bounds[rank], bounds[rank + 1])


def trained(rank: int, size: int, path: Path | None = None) -> tuple[list[Tensor], Rows]:
    module, optimizer = model(path)
    outputs = train(module, optimizer, range(3), part(rank, size), float(size))
    if path is not None:
        module.save_snapshot("last")
    return outputs, content(module)


def wrong_input(rank: int) -> list[str]:
    """What all ranks raise if the ids of rank 1 are wrong; training goes on."""
    (module, optimizer), (alike, other) = model(), model()
    ids = SAMPLES[0, part(rank, 2)]
    wrong = [(ids.float(),), (ids[:, :2],), (ids, ids[:1]), (ids, ids + 3)]
    found = []
    for arguments in wrong:
        for call in (module, module.prefetch):
            try:
                call(*(arguments if rank == 1 else (ids,)))
                found.append("nothing")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error.args[0]}")
    assert not content(module)
    outputs = [
        torch.stack(train(of, by, range(2), part(rank, 2), 2.0))
        for of, by in ((module, optimizer), (alike, other))
    ]
    assert torch.equal(*outputs)
    return found


def loaded(rank: int, size: int, path: Path) -> tuple[list[Tensor], Rows, Rows]:
    """Content of a snapshot, and what comes of it when training goes on."""
    module, optimizer = model(path)
    module.load_snapshot("last")
    before = content(module)
    outputs = train(module, optimizer, range(3, 5), part(rank, size), float(size))
    return outputs, before, content(module)


def other_seed(rank: int) -> None:
    embedding(seed=rank)


def other_optimizer(rank: int) -> None:
    module = embedding()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1 * (rank + 1))
    oneembedding.Optimizer(sgd, [module])


def one_path(rank: int, path: str) -> None:
    embedding(path=[path])


def capacities(rank: int) -> list[int | None]:
    return [table.policy.capacity for table in embedding().group.config.tables]


def states(rank: int) -> dict[str, Any]:
    """A state dict of this rank, which it can load itself."""
    module, optimizer = model()
    train(module, optimizer, range(2), part(rank, 2), 2.0)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    fresh, _ = model()
    fresh.load_state_dict(state)
    assert content(fresh).keys() == content(module).keys()
    return state


def load_state(rank: int, of_ranks: list[dict[str, Any]]) -> None:
    model()[0].load_state_dict(of_ranks[1 - rank])


def frozen(rank: int, ranks: Any) -> tuple[Tensor, Tensor | None, dict[str, int], dict[str, int]]:
    """What an embedding over two ranks gives, and its copy; ids of both by table."""
    module, optimizer = model()
    train(module, optimizer, range(3), part(rank, 2), 2.0)
    copy = td.freeze(module, ranks=ranks)
    ids = torch.arange(36).reshape(12, 3) % 14
    live = module.eval()(ids)
    if copy is None:
        return live, None, module.sizes(), {}
    return live, copy(ids), module.sizes(), copy.sizes()
