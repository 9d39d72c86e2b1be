"""Whatever a power failure leaves of a run, the snapshot before is there or the new one, whole."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from crash_states import OPEN, Change, crash_states, read_log
from faulty_training import LOGGED, logged
from stored_training import StoredModel

from torch_dynemb import checkpoint

pytestmark = pytest.mark.cpu_only("stores on disks are the CPU's")

AFTER = 2  # steps that are made after a load


class Run(NamedTuple):
    """What a process has done to its files, and what it should come to.

    Attributes:
        changes: of files.
        told: after how many changes each snapshot was there, by its steps.
        values: after so many steps, and after ``AFTER`` more: by number of steps.
    """

    changes: list[Change]
    told: dict[int, int]
    values: dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def run(shimmed_run: Any) -> Run:
    changes = read_log(shimmed_run.root / "changes.log", logged(shimmed_run.root))
    model, values = StoredModel(None), {}
    for step in range(1, LOGGED[-1][0] + AFTER + 1):
        model.step()
        values[step] = model.values()
    opened = {change.path: at for at, change in enumerate(changes, 1) if change.kind == OPEN}
    return Run(changes, {steps: opened[f"saved-{steps}"] for steps, _ in LOGGED}, values)


def check(run: Run, folder: Path, prefixes: Collection[int] | None, drawn: int) -> int:
    """Returns how many states there were."""
    count = 0
    for state in crash_states(run.changes, prefixes=prefixes, drawn=drawn):
        if "rows" not in state.files:
            continue
        count += 1
        tree = folder / f"{count}"
        tree.mkdir()
        state.write(tree)
        said = [steps for steps, at in run.told.items() if at <= state.prefix]
        least = max(said, default=0)
        allowed = [least, *[steps for steps in run.told if steps > least][:1]]
        model = StoredModel(tree / "rows")
        names = checkpoint.snapshots(model)
        steps = model.load() if names else 0
        assert steps in allowed, f"{state}: {names}"
        if steps > 0:
            assert torch.equal(model.values(), run.values[steps]), str(state)
            model.train_steps(AFTER)
            assert torch.equal(model.values(), run.values[steps + AFTER]), str(state)
            model.save("again")
        del model
        shutil.rmtree(tree)
    return count


@pytest.mark.long
def test_some_states_after_a_power_failure(run: Run, tmp_path: Path) -> None:
    told = list(run.told.values())
    # when a snapshot is named, which is shortly before it is reported, and some others
    names = [
        n for n, change in enumerate(run.changes, 1) if (change.other or "").startswith("rows/sn")
    ]
    assert len(names) == len(LOGGED)
    chosen = {*names, names[1] - 1, names[1] + 1, told[1], len(run.changes)}
    assert check(run, tmp_path, chosen, 1) >= len(chosen)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_states_after_a_power_failure(run: Run, tmp_path: Path) -> None:
    assert check(run, tmp_path, None, 3) > len(run.changes)
