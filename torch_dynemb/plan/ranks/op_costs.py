"""Time of a rank's own work in a training step, from measured costs of its parts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Work(NamedTuple):
    """Work of each rank in a step; all float64 [ranks].

    Attributes:
        ids_sent: ids of the rank's own lines, for each shard of columns.
        ids_deduped: of these, the ids among which distinct ones are found.
        lengths: lengths that are sent or received.
        ids_received: ids that are looked up.
        row_bytes: bytes of the rows that are read for ids, and of their gradients.
        output_bytes: bytes of bags and sums that are written, sent and received.
        updated_bytes: bytes of weights and state that an optimizer changes.
    """

    ids_sent: Tensor
    ids_deduped: Tensor
    lengths: Tensor
    ids_received: Tensor
    row_bytes: Tensor
    output_bytes: Tensor
    updated_bytes: Tensor


@dataclass(frozen=True)
class OpCosts:
    """Costs of the parts of a step, forward and backward together.

    Attributes:
        step_us: microseconds of a step without ids.
        ids_sent_ns, ids_deduped_ns, ...: nanoseconds for one of :class:`Work`.
        source: processor, threads and day of the measurement.
    """

    step_us: float
    ids_sent_ns: float
    ids_deduped_ns: float
    lengths_ns: float
    ids_received_ns: float
    row_bytes_ns: float
    output_bytes_ns: float
    updated_bytes_ns: float
    source: str

    def seconds(self, work: Work) -> Tensor:
        """Return the seconds of each rank, float64 [ranks]."""
        total = torch.full_like(work.ids_sent, 1e-6 * self.step_us)
        for name, amount in work._asdict().items():
            total += 1e-9 * getattr(self, f"{name}_ns") * amount
        return total


# from `benchmarks/scale_out.py --part costs --clock processor`
MEASURED = OpCosts(
    step_us=5250.0,
    ids_sent_ns=0.0,
    ids_deduped_ns=0.0,
    lengths_ns=6.75,
    ids_received_ns=51.19,
    row_bytes_ns=0.489,
    output_bytes_ns=0.442,
    updated_bytes_ns=0.0,
    source="an AMD EPYC, a thread a rank, TorchRec over gloo, 2026-11-27",
)


def read_costs(option: str, path: Path) -> OpCosts:
    """Read costs from a JSON object with the attributes of :class:`OpCosts`.

    Args:
        option: beginning of an error's message.
        path: of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not JSON, or a cost is missing, unknown, negative or not a number.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{option} is {path}, which is not a file: check the path")
    try:
        read = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{option} is {path}, which is not JSON ({error}): write {_FORM}"
        ) from error
    names = [field.name for field in fields(OpCosts)]
    if not isinstance(read, dict) or set(read) != set(names):
        raise ValueError(f"{option} is {path}, expected {_FORM}")
    for name, cost in read.items():
        is_number = isinstance(cost, int | float) and not isinstance(cost, bool)
        if name != "source" and not (is_number and 0 <= cost < float("inf")):
            raise ValueError(f"{option}: {name} in {path} is {cost!r}, expected a number from 0 on")
    return OpCosts(**{name: read[name] for name in names})


_FORM = f"an object with {', '.join(asdict(MEASURED))}"

__all__ = ["MEASURED", "OpCosts", "Work", "read_costs"]
