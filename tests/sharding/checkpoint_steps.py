"""What the ranks of test_sharded_checkpoints do."""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from checkpoint_models import Kind, Shard, clock_at, sharded_model, shards_of, train
from sharded_models import kernels
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.checkpoint import LoadReport
from torch_dynemb.compat.dynamicemb.incremental_dump import incremental_dump


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
    return [kernel.tables.group.state.tensors() for kernel in kernels(model)]


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


def save_increments(
    rank: int,
    kinds: Sequence[Kind],
    side: int,
    optimizer: str,
    folder: str,
    steps: Sequence[range],
    begins_from: str | None = None,
) -> None:
    """Saves ``0``, an increment after each further training, and ``whole`` at the end.

    With a checkpoint to begin from, that is loaded, and the increments go on from it.
    """
    model = sharded_model(kinds, side, optimizer, seed=0 if begins_from is None else 1)
    td.checkpoint.record_changes(model)
    if begins_from is None:
        train(model, rank, names_of(kinds), steps[0])
        td.checkpoint.save(f"{folder}/0", model)
    else:
        td.checkpoint.load(begins_from, model)
    before = begins_from or f"{folder}/0"
    for number, more in enumerate(steps[1:], start=1):
        train(model, rank, names_of(kinds), more)
        td.checkpoint.save(f"{folder}/{number}", model, since=before)
        before = f"{folder}/{number}"
    td.checkpoint.save(f"{folder}/whole", model)


def dump_and_save(
    rank: int, kinds: Sequence[Kind], path: str, threshold: int
) -> tuple[dict[str, dict[str, tuple[Tensor, Tensor]]], dict[str, dict[str, int]]]:
    """What DynamicEmb's incremental dump gives of a model, which is saved, too."""
    model = sharded_model(kinds, 0, "sgd")
    train(model, rank, names_of(kinds), range(3))
    td.checkpoint.save(path, model)
    dumped = incremental_dump(model, threshold)
    assert dumped is not None
    return dumped


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


@contextmanager
def failing(rank: int, target: str, error: Exception) -> Iterator[None]:
    """On rank 1, a function of the checkpoint package raises when it is called a second time."""
    module, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(module)
    real, calls = getattr(owner, name), itertools.count()

    def failing_call(*arguments: Any, **more: Any) -> Any:
        if next(calls) >= 1:
            raise error
        return real(*arguments, **more)

    if rank != 1:
        yield
        return
    with mock.patch.object(owner, name, failing_call):
        yield


def failed_save(
    rank: int, kinds: Sequence[Kind], path: str, target: str, error: Exception
) -> tuple[str, bool]:
    """What a save raises in which rank 1 fails, and whether the model goes on as it was."""
    model = sharded_model(kinds, 0, "adam")
    train(model, rank, names_of(kinds), range(8, 9))
    before = _raw(model)
    with failing(rank, target, error):
        raised = raised_by(lambda: td.checkpoint.save(path, model))
    return raised, same(before, _raw(model))


def failed_load(
    rank: int, kinds: Sequence[Kind], path: str, target: str, error: Exception, filled: bool
) -> tuple[str, bool, list[int]]:
    """The same of a load, and how many ids there are after it."""
    model = sharded_model(kinds, 1, "adam", seed=1)
    train(model, rank, names_of(kinds), range(8, 9) if filled else range(0))
    before = _raw(model)
    with failing(rank, target, error):
        raised = raised_by(lambda: td.checkpoint.load(path, model))
    unchanged = same(before, _raw(model)) if filled else True
    sizes = [shard.ids.numel() for shard in shards_of(model)]
    td.checkpoint.load(path, model)  # and the next one does what it should
    return raised, unchanged, sizes


def given_differently(rank: int, kinds: Sequence[Kind], path: str) -> dict[str, str]:
    """What is raised where rank 1 is given something else."""
    model = sharded_model(kinds, 0, "adam")
    train(model, rank, names_of(kinds), range(1))
    plain = nn.Linear(2, 2)
    save, load = td.checkpoint.save, td.checkpoint.load
    save(path, model)
    calls: dict[str, Callable[[], object]] = {
        "path": lambda: save(f"{path} of {rank}", model),
        "asynchronous": lambda: save(path, model, asynchronous=rank == 1),
        "no path": lambda: save(path if rank == 0 else 5, model),  # type: ignore[arg-type]
        "no model": lambda: save(path, model if rank == 0 else {}),  # type: ignore[arg-type]
        "no tables": lambda: save(path, model if rank == 0 else plain),
        "path of load": lambda: load(path if rank == 0 else f"{path}-", model),
        "strict": lambda: load(path, model, strict=rank == 0),
        "no tables of load": lambda: load(path, model if rank == 0 else plain, strict=False),
        "optimizer_state": lambda: load(path, model, optimizer_state=rank == 0),
    }
    return {name: raised_by(call) for name, call in calls.items()}


def steps_that_nobody_ends(
    rank: int, kinds: Sequence[Kind], path: str
) -> list[tuple[list[Shard], list[Shard]]]:
    """A model that is saved after a backward, and one that has made a backward and loads it: what
    they hold then, and after more training."""
    found = []
    models = [sharded_model(kinds, 0, "adam", seed=seed) for seed in (0, 1)]
    for number, model in enumerate(models):
        train(model, rank, names_of(kinds), range(3 - number), ends_steps=False)
        with clock_at(2):  # read at the end of the step
            (td.checkpoint.save if number == 0 else td.checkpoint.load)(path, model)
    for model in models:
        shards = shards_of(model)
        train(model, rank, names_of(kinds), range(3, 5), ends_steps=False)
        found.append((shards, shards_of(model)))
    return found


def pending_gradients(rank: int, kinds: Sequence[Kind], path: str) -> tuple[str, list[int]]:
    """What a save raises while gradients are pending, and ids by shard after it."""
    model = sharded_model(kinds, 0, "adam")
    train(model, rank, names_of(kinds), range(1), ends_steps=False)
    raised = raised_by(lambda: td.checkpoint.save(path, model))
    model.fused_optimizer.step()
    td.checkpoint.save(path, model)
    report = td.checkpoint.load(path, model)
    return raised, [of.ids for of in report.tables.values()]
