"""The lines of a stream in temporary files, so that they can be read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_dynemb.plan.lines import ColumnIds, Lines

_CHUNK_LINES = 1 << 16


@dataclass(frozen=True)
class Roles:
    """Columns of numbers, by what they are for.

    Attributes:
        label: name of the label; None: there is none.
        time: name of the time in seconds; None: there is none.
    """

    label: str | None
    time: str | None

    @property
    def names(self) -> list[str]:
        """Names of the columns that there are."""
        return [name for name in (self.label, self.time) if name is not None]


class Recording:
    """Lines on disk, in chunks of whole steps.

    Lines are checked as they come: labels are 0 or 1, and times never decrease.

    Args:
        folder: empty; gets the files, about 12 bytes for each id.
        columns: names of the columns of ids.
        roles: columns of numbers.
        batch_size: lines of a step.
    """

    def __init__(self, folder: Path, columns: Sequence[str], roles: Roles, batch_size: int) -> None:
        self._folder = folder
        self._columns = list(columns)
        self._roles = roles
        self._chunk_lines = -(-_CHUNK_LINES // batch_size) * batch_size
        self._waiting: list[Lines] = []
        self._waiting_lines = 0
        self._chunks = 0
        self._last_time = 0.0
        self.lines = 0
        """Number of lines so far."""
        self.labels: set[float] = set()
        """Labels so far."""

    def add(self, batch: Lines) -> None:
        """Append lines.

        Raises:
            ValueError: a label or a time is wrong.
            OSError: the disk is full.
        """
        if self._roles.label is not None:
            self._check_labels(self._roles.label, batch)
        if self._roles.time is not None:
            self._check_times(self._roles.time, batch)
        self.lines += batch.count
        self._waiting.append(batch)
        self._waiting_lines += batch.count
        if self._waiting_lines >= self._chunk_lines:
            self._write(self._waiting_lines // self._chunk_lines)

    def close(self) -> None:
        """Write the lines that are left."""
        if self._waiting_lines > 0:
            self._write(-(-self._waiting_lines // self._chunk_lines))

    def chunks(self) -> Iterator[Lines]:
        """Iterate over the lines; every chunk but the last one has whole steps."""
        for number in range(self._chunks):
            count, ids, values = torch.load(self._folder / str(number), weights_only=True)
            columns = {
                name: ColumnIds(values_of, lines.long(), 0)
                for name, (values_of, lines) in zip(self._columns, ids, strict=True)
            }
            yield Lines(count, columns, values)

    def _check_labels(self, name: str, batch: Lines) -> None:
        labels = batch.values[name]
        wrong = ((labels != 0) & (labels != 1)).nonzero()
        if len(wrong) > 0:
            at = int(wrong[0])
            raise ValueError(
                f"--label: {name} is {float(labels[at]):g} in line {self.lines + at + 1} of the "
                "sample, expected 0 or 1: mend the line or leave it out"
            )
        self.labels |= set(labels.unique().tolist())

    def _check_times(self, name: str, batch: Lines) -> None:
        times = batch.values[name]
        before = torch.cat(
            [torch.tensor([self._last_time], dtype=torch.float64, device="cpu"), times[:-1]]
        )
        wrong = (~(times >= before)).nonzero()  # also NaN
        if len(wrong) > 0:
            at = int(wrong[0])
            raise ValueError(
                f"--time: {name} is {float(times[at]):.17g} in line {self.lines + at + 1} of the "
                f"sample, after {float(before[at]):.17g}: expected seconds from 0 on in ascending "
                f"order; sort the lines by {name}"
            )
        if batch.count > 0:
            self._last_time = float(times[-1])

    def _write(self, chunks: int) -> None:
        whole = _joined(self._waiting, self._columns)
        size = self._chunk_lines
        for begin in range(0, chunks * size, size):
            self._write_chunk(lines_between(whole, begin, min(begin + size, whole.count)))
        left = lines_between(whole, min(chunks * size, whole.count), whole.count)
        self._waiting, self._waiting_lines = [left], left.count

    def _write_chunk(self, chunk: Lines) -> None:
        ids = [(column.ids.clone(), column.lines.int()) for column in chunk.columns.values()]
        values = {name: column.clone() for name, column in chunk.values.items()}
        torch.save((chunk.count, ids, values), self._folder / str(self._chunks))
        self._chunks += 1


def _joined(batches: Sequence[Lines], columns: Sequence[str]) -> Lines:
    begins = [0]
    for batch in batches:
        begins.append(begins[-1] + batch.count)
    joined = {}
    for name in columns:
        parts = [batch.columns[name] for batch in batches]
        lines = [part.lines + begin for part, begin in zip(parts, begins, strict=False)]
        joined[name] = ColumnIds(torch.cat([part.ids for part in parts]), torch.cat(lines), 0)
    values = {
        name: torch.cat([batch.values[name] for batch in batches]) for name in batches[0].values
    }
    return Lines(begins[-1], joined, values)


def lines_between(batch: Lines, begin: int, end: int) -> Lines:
    """Return lines ``begin`` to ``end`` of a batch, as views."""
    columns = {}
    edges = torch.tensor([begin, end], device="cpu")
    for name, column in batch.columns.items():
        ids_between = slice(*torch.searchsorted(column.lines, edges).tolist())
        columns[name] = ColumnIds(column.ids[ids_between], column.lines[ids_between] - begin, 0)
    values: dict[str, Tensor] = {name: column[begin:end] for name, column in batch.values.items()}
    return Lines(end - begin, columns, values)


__all__ = ["Recording", "Roles", "lines_between"]
