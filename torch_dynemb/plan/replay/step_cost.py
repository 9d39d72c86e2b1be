"""Time of a training step with evictions, from the results of this repository's benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
DEVICES = ("cpu", "cuda")
_NAMES = {"step": "LRU", "frequency": "LFU"}


class StepCost(NamedTuple):
    """Cost of the ids of a step, with 64 columns.

    Attributes:
        known_ns: of an id with a row.
        evicted_ns: of a new id for which another one is evicted.
        machine: processor, threads and day of the measurement.
    """

    known_ns: float
    evicted_ns: float
    machine: str

    def step_ms(self, known: float, evicted: float) -> float:
        """Return the milliseconds of a step.

        Args:
            known: ids with a row.
            evicted: ids that are evicted.
        """
        return (known * self.known_ns + evicted * self.evicted_ns) / 1e6


def step_cost(score: str, device: str, folder: Path = RESULTS) -> StepCost | None:
    """Return the newest measurement; None: there is none.

    Args:
        score: of the policy.
        device: a name in :data:`DEVICES`.
        folder: of the results, in a checkout of the repository.
    """
    if score not in _NAMES:
        return None
    newest: tuple[str, StepCost] | None = None
    for path in folder.glob("*.json"):
        result = json.loads(path.read_text())
        machine = result.get("machine", {})
        if machine.get("device") != device:
            continue
        for row in result["rows"]:
            case = row["case"].removeprefix(f"training step with eviction, {_NAMES[score]}, ")
            if case == row["case"] or row.get("ns_an_eviction") is None:
                continue
            cost = StepCost(
                row["peer_ms"] * 1e6 / row["batch"],
                row["ns_an_eviction"],
                f"{machine['processor']}, {case}, {machine['date'][:10]}",
            )
            key = f"{machine['date']} {row['threads']:4}"
            if newest is None or key > newest[0]:
                newest = key, cost
    return None if newest is None else newest[1]


__all__ = ["DEVICES", "RESULTS", "StepCost", "step_cost"]
