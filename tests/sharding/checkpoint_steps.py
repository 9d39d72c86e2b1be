"""What the ranks of test_sharded_checkpoints do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from checkpoint_models import Kind, Shard, sharded_model, shards_of, train
from sharded_models import kernels
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.checkpoint import LoadReport


class Found(NamedTuple):
    """What a model holds after a save or a load.

    Attributes:
        shards: of tables.
        dense: the rest of its state dict, but for shards.
        after: the shards after more training.
        report: of the load.
        raw: all tensors of its tables, after more training.
    """

    shards: list[Shard]
    dense: dict[str, Tensor]
    after: list[Shard]
    report: LoadReport | None
    raw: list[dict[str, Tensor]]


def names_of(kinds: Sequence[Kind]) -> list[str]:
    """The features of kinds."""
    return [kind.name for kind in kinds]


def _dense(model: Any) -> dict[str, Tensor]:
    return {f"over.{name}": of.clone() for name, of in model.module.over.state_dict().items()}


def _raw(model: Any) -> list[dict[str, Tensor]]:
    return [kernel.tables.group.state_tensors() for kernel in kernels(model)]


def save_model(
    rank: int,
    kinds: Sequence[Kind],
    side: int,
    optimizer: str,
    path: str,
    steps: range,
    more: range = range(0),
    ahead: Sequence[int] = (0, 0),
) -> Found:
    """Trains and saves, then goes on."""
    model = sharded_model(kinds, side, optimizer)
    train(model, rank, names_of(kinds), steps, ahead[rank % 2])
    td.checkpoint.save(path, model, state={"step": len(steps)})
    shards, dense = shards_of(model), _dense(model)
    train(model, rank, names_of(kinds), more, ahead[rank % 2])
    return Found(shards, dense, shards_of(model), None, _raw(model))


@dataclass(frozen=True)
class How:
    """How a checkpoint is loaded.

    Attributes:
        before: steps of training that the load replaces.
        back: where to save what was loaded.
        more: steps of training after it.
        ahead: of the ranks' clocks then, in seconds.
        options: of ``load``.
    """

    before: range = range(0)
    back: str | None = None
    more: range = range(0)
    ahead: tuple[int, int] = (0, 0)
    options: dict[str, Any] = field(default_factory=dict)


def load_model(
    rank: int, kinds: Sequence[Kind], side: int, optimizer: str, path: str, how: How
) -> Found:
    """Loads, saves again, and goes on."""
    model = sharded_model(kinds, side, optimizer, seed=1)
    train(model, rank, names_of(kinds), how.before)
    report = td.checkpoint.load(path, model, **how.options)
    shards, dense = shards_of(model), _dense(model)
    if how.back is not None:
        td.checkpoint.save(how.back, model)
    train(model, rank, names_of(kinds), how.more, how.ahead[rank % 2])
    return Found(shards, dense, shards_of(model), report, _raw(model))


def same(one: Sequence[dict[str, Tensor]], other: Sequence[dict[str, Tensor]]) -> bool:
    """Whether tables hold the same, bit for bit."""
    return all(
        torch.equal(value, theirs[name])
        for mine, theirs in zip(one, other, strict=True)
        for name, value in mine.items()
    )


def raised_by(call: Callable[[], object]) -> str:
    """Type and message of what it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused_load(
    rank: int,
    kinds: Sequence[Kind],
    side: int,
    optimizer: str,
    path: str,
    options: dict[str, Any] | None = None,
) -> tuple[str, bool]:
    """What a load raises, and whether it has left the model as it was."""
    model = sharded_model(kinds, side, optimizer, seed=1)
    train(model, rank, names_of(kinds), range(8, 9))
    before = _raw(model)
    raised = raised_by(lambda: td.checkpoint.load(path, model, **(options or {})))
    return raised, same(before, _raw(model))
