"""Read files in the Criteo format: lines of text in, batches of arrays out.

A line has 40 fields between tabs: a label (0 or 1), 13 integers, and 26 categories, which are ids
in hexadecimal digits. An empty integer or category is a missing value. A vocabulary and
preprocessing are not needed. A reader knows its position after every batch. Another reader that
starts there yields the batches that the first one would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from tutorials.dlrm.job.files import (
    CATEGORY_COUNT,
    INTEGER_COUNT,
    DataError,
    check_line,
    check_paths,
    lines_of,
    open_file,
)

MISSING_INTEGER = int(np.iinfo(np.int64).min)
"""Stands for a missing integer; no field may spell it out."""
MISSING_ID = int.from_bytes(b"MISSING!", "big")
"""The id of a missing category; above 2**32, so no category of up to eight digits has it."""
FEATURE_NAMES = [f"category_{i}" for i in range(1, CATEGORY_COUNT + 1)]

Int64Array = npt.NDArray[np.int64]
OnBadLine = Literal["error", "skip"]

_INTEGER_NAMES = [f"integer_{i}" for i in range(1, INTEGER_COUNT + 1)]
_ALPHABET = b"0123456789abcdefABCDEF-\t\n"
_READ = csv.ReadOptions(
    column_names=["label", *_INTEGER_NAMES, *FEATURE_NAMES],
    use_threads=False,
    block_size=1 << 30,  # one block, so that a column is one array
)
_PARSE = csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False)
_CONVERT = csv.ConvertOptions(
    column_types=dict.fromkeys(_INTEGER_NAMES, pa.int64())
    | dict.fromkeys(["label", *FEATURE_NAMES], pa.string()),
    null_values=[""],
    strings_can_be_null=True,
)


class Position(NamedTuple):
    """The place of a reader, between two lines."""

    file: int = 0  # index into the paths
    offset: int = 0  # bytes of the file before it, decompressed
    file_line: int = 0  # lines of the file before it
    line: int = 0  # lines of all files before it
    skipped: int = 0  # bad lines and empty files among them


class Batch(NamedTuple):
    """Consecutive samples, or a rank's part of them."""

    labels: npt.NDArray[np.float32]  # (B,)
    integers: Int64Array  # (B, 13), MISSING_INTEGER where missing
    ids: Int64Array  # (26, B), MISSING_ID where missing
    whole: int  # samples of the batch on all ranks


class CriteoReader:
    """Iterate over batches in the order of the lines.

    Args:
        paths: Files; those with names that end in ``.gz`` are decompressed.
        batch_size: Samples in a batch; the last one may be smaller.
        start: Where to begin, such as the :attr:`position` of another reader.
        stop_line: Lines of all files after which to stop; None: after the last one.
        on_bad_line: ``"error"`` raises :class:`DataError` at a line that is not in the format and
            at an empty file; ``"skip"`` leaves them out and counts them.
        part: Number of a rank, which gets the samples ``part``, ``part + parts``... of a batch.
        parts: Number of ranks. Unless bad lines are skipped, a rank parses only its own lines.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        batch_size: int,
        *,
        start: Position | None = None,
        stop_line: int | None = None,
        on_bad_line: OnBadLine = "error",
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self.paths = check_paths(paths)
        self.batch_size, self.stop_line, self.on_bad_line = batch_size, stop_line, on_bad_line
        self.part, self.parts = part, parts
        self.position = start or Position()
        self.first_skipped: str | None = None
        """File, line and reason of the first bad line."""

    def __iter__(self) -> Iterator[Batch]:
        self._at = self.position
        with ThreadPoolExecutor(1) as thread:  # reads a batch while the one before is trained on
            batches = self._batches()
            following = thread.submit(next, batches)
            while (read := following.result())[0] is not None:
                following = thread.submit(next, batches)
                batch, self.position = read
                yield batch
            self.position = read[1]

    def _batches(self) -> Iterator[tuple[Batch | None, Position]]:
        """Yield batches with the positions behind them; at last None with that behind all lines."""
        pieces: list[Batch] = []  # of the next batch, which may have lines of several files
        have = 0
        for index in range(self._at.file, len(self.paths)):
            if not self._wanted(have):
                break
            if index > self._at.file:
                self._at = self._at._replace(file=index, offset=0, file_line=0)
            with open_file(self.paths[index]) as file:
                file.seek(self._at.offset)
                lines = lines_of(file)
                while (wanted := self._wanted(have)) and (some := list(islice(lines, wanted))):
                    pieces.append(self._parse(some, have, file.tell()))
                    have += pieces[-1].whole
                    if have == self.batch_size:
                        yield _concatenate(pieces), self._at
                        pieces, have = [], 0
                if wanted and self._at.offset == 0:
                    self._refuse(None, "the file is empty")
        if have:
            yield _concatenate(pieces), self._at
        yield None, self._at

    def _wanted(self, have: int) -> int:
        """Return how many lines to read for a batch that has some samples."""
        wanted = self.batch_size - have
        if self.stop_line is None:
            return wanted
        return min(wanted, self.stop_line - self._at.line)

    def _parse(self, lines: list[bytes], have: int, offset: int) -> Batch:
        """Parse lines up to an offset of the file; the batch has some samples before them."""
        mine = slice((self.part - have) % self.parts, None, self.parts)
        skips = self.on_bad_line == "skip"  # then the samples of a part depend on the other lines
        numbers = range(len(lines)) if skips else range(len(lines))[mine]
        whole = len(lines)
        batch = parse_lines([lines[number] for number in numbers])
        if batch is None:
            good = []
            for number in numbers:
                if (reason := check_line(lines[number])) is None:
                    good.append(lines[number])
                else:
                    self._refuse(self._at.file_line + number + 1, reason)
            batch = parse_lines(good)
            assert batch is not None, "check_line() passes a line that parse_lines() does not"
            whole = len(good)
        if skips:
            ids = np.ascontiguousarray(batch.ids[:, mine])
            batch = Batch(batch.labels[mine], batch.integers[mine], ids, whole)
        file, _, file_line, line, skipped = self._at
        self._at = Position(file, offset, file_line + len(lines), line + len(lines), skipped)
        return batch._replace(whole=whole)

    def _refuse(self, line: int | None, reason: str) -> None:
        path = self.paths[self._at.file]
        message = f"{path}: {reason}" if line is None else f"{path}:{line}: {reason}"
        if self.on_bad_line == "error":
            raise DataError(f"{message} (--on-bad-line skip leaves bad lines out)")
        self.first_skipped = self.first_skipped or message
        self._at = self._at._replace(skipped=self._at.skipped + 1)


def parse_lines(lines: list[bytes]) -> Batch | None:
    """Parse lines to arrays; return None if one of them is not in the format."""
    count = len(lines)
    if not count:
        none = np.empty((CATEGORY_COUNT, 0), np.int64)
        return Batch(np.empty(0, np.float32), none[:INTEGER_COUNT].T, none, 0)
    text = b"".join(lines)
    if text.translate(None, _ALPHABET):
        return None  # pyarrow would take spaces and other spellings of integers
    try:
        table = csv.read_csv(pa.BufferReader(text), _READ, _PARSE, _CONVERT)
        label, integers = table.column(0), _join(table.columns[1:14])
        # Sixteen hexadecimal digits are the eight bytes of an id.
        ids = pc.fill_null(_join(table.columns[14:]), f"{MISSING_ID:x}")
        digits = pc.ascii_lpad(ids, 16, "0").buffers()[2]
        id_bytes = bytes.fromhex(str(digits, "ascii"))
    except (pa.ArrowInvalid, ValueError):
        return None
    if digits.size != 2 * len(id_bytes) or len(id_bytes) != 8 * CATEGORY_COUNT * count:
        return None  # a category of more than sixteen digits, or lines that run into each other
    if not pc.all(pc.is_in(label, pa.array(["0", "1"]))).as_py():
        return None
    values = pc.fill_null(integers, MISSING_INTEGER).to_numpy().reshape(INTEGER_COUNT, count)
    if np.count_nonzero(values == MISSING_INTEGER) != integers.null_count:
        return None
    return Batch(
        label.cast(pa.float32()).to_numpy().copy(),  # torch wants a writable array
        np.ascontiguousarray(values.T),
        np.frombuffer(id_bytes, ">i8").astype(np.int64).reshape(CATEGORY_COUNT, count),
        count,
    )


def _join(columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    """Put columns one behind the other."""
    return pa.chunked_array(
        [chunk for column in columns for chunk in column.chunks]
    ).combine_chunks()


def _concatenate(pieces: list[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    labels, integers, ids, whole = zip(*pieces, strict=True)
    return Batch(
        np.concatenate(labels), np.concatenate(integers), np.concatenate(ids, axis=1), sum(whole)
    )
