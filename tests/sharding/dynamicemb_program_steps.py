"""What the ranks of test_dynamicemb_program do: they register the package, then run the program."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb.compat.dynamicemb import register_as_dynamicemb


def _program() -> Any:
    register_as_dynamicemb()
    register_as_dynamicemb()  # a second call changes nothing
    return importlib.import_module("dynamicemb_program")


class SavedRun(NamedTuple):
    """Answers of a model that saved, and of one that loaded.

    Attributes:
        trained, loaded, fresh: after the save, after the load, and before it.
        trained_on, loaded_on: after one more step.
        entries: class names in the state that was loaded.
    """

    trained: Tensor
    loaded: Tensor
    fresh: Tensor
    trained_on: Tensor
    loaded_on: Tensor
    entries: set[str]


def save_and_load(rank: int, folder: str) -> SavedRun:
    """Trains, saves, and loads into a model of another seed; both train on."""
    program = _program()
    old = program.Program(seed=1)
    for number in range(4):
        old.train(number)
    asked = program.batch(3)
    trained = old.answers(asked)
    old.save(folder)
    new = program.Program(seed=2)
    fresh = new.answers(asked)
    new.load(folder)
    loaded = new.answers(asked)
    for one in (old, new):
        one.train(3)  # rows of new ids would begin by the seed
    state = torch.load(f"{folder}/rank{rank}.pt", weights_only=True)["model"]
    return SavedRun(
        trained,
        loaded,
        fresh,
        old.answers(asked),
        new.answers(asked),
        {type(value).__name__ for value in state.values()},
    )


class Increments(NamedTuple):
    """What increments of a run have.

    Attributes:
        first_score, last_score: of the tables, before the first and after the last step.
        dumped: (first batch since the threshold, ids and rows by table, next threshold).
        trained: ids of this rank by batch and feature.
        read: rows of the last batch by feature, as evaluation reads them.
    """

    first_score: Any
    last_score: Any
    dumped: list[tuple[int, dict[str, tuple[Tensor, Tensor]], Any]]
    trained: list[list[Tensor]]
    read: dict[str, Tensor]


def increments(rank: int) -> Increments:
    """Trains, and dumps after the third and the fifth step what is new."""
    program = _program()
    run = program.Program(seed=3)
    first = threshold = run.score()
    begin, dumped, trained = 0, [], []
    for number in range(5):
        trained.append(run.train(number))
        if number in (2, 4):
            rows, threshold = run.increment(threshold)
            dumped.append((begin, rows["model.sparse"], threshold))
            begin = number + 1
    return Increments(first, run.score(), dumped, trained, run.rows(program.batch(4)))


class Admitted(NamedTuple):
    """What a run with admission has.

    Attributes:
        dumped: ids with a row by table, after each step.
        ids: of the batch on this rank, by feature.
        read: rows of these ids after the first step, by feature.
    """

    dumped: list[dict[str, Tensor]]
    ids: list[Tensor]
    read: dict[str, Tensor]


def admission(rank: int) -> Admitted:
    """Trains three times with the same batch: an id gets its row when it occurs for the third."""
    program = _program()
    run = program.Program(seed=4, threshold=3)
    ids, dumped, read = program.batch(7), [], {}
    for step in range(3):
        run.train(7)
        rows, _ = run.increment(0)
        dumped.append({table: of[0] for table, of in rows["model.sparse"].items()})
        if step == 0:
            read = run.rows(ids)
    return Admitted(dumped, list(ids), read)


def prefetch_warnings(rank: int) -> list[str]:
    """Warnings about prefetching of two models."""
    program = _program()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            program.Program(seed=5, prefetch=True)
    return [str(one.message) for one in caught if "prefetch_pipeline" in str(one.message)]
