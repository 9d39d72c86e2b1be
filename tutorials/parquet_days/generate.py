"""Writes generated events as Parquet, a folder a day, as a warehouse exports them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tutorials.initial_rows import generate

FIRST = 1_767_225_600  # 2026-01-01 in seconds


def write_days(folder: Path, days: int, events: int) -> None:
    """Write days of users and items with planted factors: ``day=2026-01-01/part-0.parquet``...

    Args:
        folder: gets them; it does not exist yet.
        days: at most 31.
        events: of a day, in the order of time.
    """
    data = generate(800, 2000, days * events)
    seconds = FIRST + torch.arange(days * events) * 86_400 // events
    columns = {
        "user": [f"user-{number}" for number in data.users.tolist()],
        "item": [f"item-{number}" for number in data.items.tolist()],
        "time": pa.array(seconds.numpy()).cast(pa.timestamp("s")),
    }
    table = pa.table(columns)
    for number in range(days):
        day = folder / f"day=2026-01-{number + 1:02}"
        day.mkdir(parents=True)
        part = table.slice(number * events, events)
        pq.write_table(part, day / "part-0.parquet", row_group_size=2048)
