"""Training steps while an asynchronous save goes on."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from checkpoints.stall import DIM, trained_model
from common.command import is_selected
from common.report import Row, compare
from common.timing import elapsed_ms, interleave_rounds

from torch_dynemb import checkpoint

TARGET = 1.3
BATCH, BAG = 8192, 8
BATCHES = 64
SKEW = 1.05


def skewed_ids(ids: int, seed: int) -> torch.Tensor:
    """Return Zipf ids at random places of the table, int64 [BATCH, BAG]."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(BATCH * BAG, generator=generator, dtype=torch.float64)
    ranks = (1 - uniform * (1 - ids ** (1 - SKEW))) ** (1 / (1 - SKEW))
    return (ranks.long().clamp_(1, ids) * 2_654_435_761 % ids).view(BATCH, BAG)


def step_rows(
    bench: str, folder: Path, ids: int, rounds: int, only: list[str]
) -> Iterator[Row | str]:
    """Yield the median step during a save that reads rows beside training, and during others."""
    case = f"training step during an asynchronous save, Adagrad D={DIM}"
    peers = [
        peer
        for peer in ("the same writes of copied rows", "no save")
        if is_selected(only, case, peer)
    ]
    if not peers:
        return
    yield case
    _, bag = trained_model(ids)
    batches = [skewed_ids(ids, seed) for seed in range(BATCHES)]
    made = 0

    def step() -> float:
        nonlocal made

        def run() -> None:
            bag(batches[made % BATCHES]).sum().backward()
            bag.optimizer.step()

        made += 1
        return elapsed_ms(run)

    def during_a_save(number: int) -> float:
        with tempfile.TemporaryDirectory(dir=folder) as path:
            handle = checkpoint.save(Path(path) / "c", bag, asynchronous=True)
            steps = [step()]
            while not handle.done():
                steps.append(step())
            handle.wait()
        return statistics.median(steps)

    def of_copies(number: int) -> float:
        source = sys.modules["torch_dynemb.rows.source"]
        with patch.object(source, "can_copy_on_write", lambda tables: False):
            return during_a_save(number)

    candidates: dict[str, Callable[[int], float]] = {
        "ours": during_a_save,
        "the same writes of copied rows": of_copies,
        "no save": lambda number: statistics.median([step() for _ in range(30)]),
    }
    wanted = {name: run for name, run in candidates.items() if name in ("ours", *peers)}
    timings = interleave_rounds(wanted, rounds=rounds, warmup=1)
    for peer in peers:
        yield compare(
            bench,
            case,
            timings["ours"],
            peer,
            timings[peer],
            target=None if peer == "no save" else TARGET,
            threads=torch.get_num_threads(),
        )
