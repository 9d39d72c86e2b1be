"""Trains on stored rows while the disk fails, or what is done to it is written down.

A program that tests start with a file shim, once for all of them. It writes what has happened as
JSON to the standard output.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from file_shim import Fault
from stored_training import StoredModel, on_a_gpu

import torch_dynemb as td

STEPS = 16
BEFORE = 4  # steps until the first snapshot
# With counts: a step that is made again must not count its ids twice.
POLICY = td.Policy(score="frequency", capacity=400)

# Snapshots of the run that is written down: after how many steps, and their names.
LOGGED = ((3, "last"), (6, "last"), (9, "other"))

Happened = dict[str, object]


def model_at(path: Path | None) -> StoredModel:
    return StoredModel(path, policy=POLICY)


def error_of(work: Callable[[], object]) -> str:
    """What it raises; empty: nothing."""
    try:
        work()
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_snapshot(path: Path) -> tuple[StoredModel, list[str]]:
    """A model with a snapshot, and its losses."""
    model = model_at(path)
    losses = model.train_steps(BEFORE)
    model.save("a")
    return model, losses


def until_it_fails(model: StoredModel, losses: list[str]) -> str:
    """Trains; what it fails with."""
    return error_of(lambda: [losses.append(model.step()) for _ in range(STEPS - model.steps)])


def full(path: Path, switch: Path) -> Happened:
    """Fill the disk for a while; the step that failed is made again."""
    model, losses = with_snapshot(path)
    switch.touch()
    error = until_it_fails(model, losses)
    again = error_of(model.step)
    snapshot = error_of(lambda: model.save("b"))
    names = td.checkpoint.snapshots(model)
    switch.unlink()
    until_it_fails(model, losses)
    model.save("b")
    return {
        "error": error,
        "again": again,
        "snapshot": snapshot,
        "names": names,
        "losses": losses,
        "values": _digest(model),
    }


def dead(path: Path, switch: Path) -> Happened:
    """A row cannot be read or written; a new model goes on from the snapshot."""
    model, losses = with_snapshot(path)
    switch.touch()
    error = until_it_fails(model, losses) or error_of(lambda: model.save("b"))
    switch.unlink()
    again, snapshot = error_of(model.step), error_of(lambda: model.save("b"))
    del model
    model = model_at(path)
    names = td.checkpoint.snapshots(model)
    losses = losses[: model.load()]
    until_it_fails(model, losses)
    return {
        "error": error,
        "again": again,
        "snapshot": snapshot,
        "names": names,
        "losses": losses,
        "values": _digest(model),
    }


def unsaved(path: Path, switch: Path) -> Happened:
    """A snapshot cannot be written; training goes on, and the next one can."""
    model, losses = with_snapshot(path)
    losses += model.train_steps(2)
    switch.touch()
    error = error_of(lambda: model.save("a"))
    switch.unlink()
    names = td.checkpoint.snapshots(model)
    reached = model.load()
    losses = losses[:reached] + model.train_steps(STEPS - reached)
    model.save("a")
    again = error_of(lambda: model.load("a"))
    return {
        "error": error,
        "again": again,
        "names": names,
        "losses": losses,
        "values": _digest(model),
    }


def _digest(model: StoredModel) -> str:
    return model.values().view(torch.int32).sum().item().__str__()


# By name: what is done, which call fails below which part of the store, and how.
CASES: dict[str, tuple[Callable[[Path, Path], Happened], str, str, int]] = {
    "full": (full, "fallocate", "rows", errno.ENOSPC),
    "pread": (dead, "pread", "rows/", errno.EIO),
    "pwrite": (dead, "pwrite", "rows/", errno.EIO),
    "fdatasync": (dead, "fdatasync", "rows/", errno.EIO),
    "index full": (unsaved, "pwrite", "index/", errno.ENOSPC),
    "index": (unsaved, "fsync", "index/", errno.EIO),
    "name": (unsaved, "rename", "snapshots/", errno.EIO),
}


# These also on a GPU, with a cache there.
ON_A_GPU = ("full", "pread", "pwrite")


def faults(root: Path) -> list[Fault]:
    """Those of all cases; each has a folder of its own."""
    return [
        Fault(call, root / at / part, error, switch=root / f"{at}.switch")
        for name, (_, call, part, error) in CASES.items()
        for at in (name, *([f"{name} gpu"] if name in ON_A_GPU else []))
    ]


def logged(root: Path) -> Path:
    """The folder below which everything is written down."""
    return root / "logged"


def make_snapshots(folder: Path) -> None:
    """Make those of ``LOGGED``; a file marks each that is done."""
    model = StoredModel(folder / "rows")
    for steps, name in LOGGED:
        model.train_steps(steps - model.steps)
        model.save(name)
        (folder / f"saved-{steps}").touch()


def main(root: Path) -> dict[str, Happened]:
    torch.set_num_threads(1)
    make_snapshots(logged(root))
    happened = {
        name: work(root / name, root / f"{name}.switch") for name, (work, *_) in CASES.items()
    }
    with on_a_gpu():
        for name in ON_A_GPU:
            work, at = CASES[name][0], f"{name} gpu"
            happened[at] = work(root / at, root / f"{at}.switch")
    undisturbed = model_at(None)
    happened["undisturbed"] = {
        "losses": undisturbed.train_steps(STEPS),
        "values": _digest(undisturbed),
    }
    return happened


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
