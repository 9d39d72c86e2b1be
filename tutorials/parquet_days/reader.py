"""Reads a folder of Parquet files in batches, and knows where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from torch.utils.data import IterableDataset, get_worker_info

import torch_dynemb as td

BATCH = 256  # events, at most


class Day(IterableDataset[dict[str, Any]]):
    """Batches of a folder, with a position for ``StatefulDataLoader``; workers share row groups.

    Args:
        folder: the files of a day, in the order of their names; columns user, item and time.
    """

    def __init__(self, folder: Path) -> None:
        self.files = ds.dataset(folder, format="parquet")
        self.group = self.row = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        groups = [of for file in self.files.get_fragments() for of in file.split_by_row_group()]
        groups = groups[worker.id :: worker.num_workers] if worker else groups
        # it stays at its end: after a resume, torchdata asks workers again that had ended
        while self.group < len(groups):
            events = groups[self.group].to_table(columns=["user", "item", "time"])
            for begin in range(self.row, len(events), BATCH):
                part = events.slice(begin, BATCH)
                self.row = begin + len(part)
                seconds = part["time"].cast(pa.timestamp("s"), safe=False)
                yield {
                    "users": td.hash_strings(part["user"]),
                    "items": td.hash_strings(part["item"]),
                    "names": part["item"].to_pylist(),
                    "now": pc.max(seconds).value,
                }
            self.group, self.row = self.group + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"group": self.group, "row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.group, self.row = state["group"], state["row"]
