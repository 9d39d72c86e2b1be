"""Stream batches from files in the Criteo format, plain or gzipped, one or many.

Nothing is read twice or kept: a reader knows its position after every batch, and another reader
that starts there yields the same batches as the first one would have.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tutorials.dlrm.parsing import (
    CATEGORY_COUNT,
    INTEGER_COUNT,
    Int64Array,
    ParsedBlock,
    parse_block,
)

OnBadLine = Literal["error", "skip"]

_BLOCK_BYTES = 1 << 22
_LONGEST_LINE = 1 << 16  # bytes; a real line has a few hundred


class DataError(ValueError):
    """The data cannot be read; the message names the file and, where there is one, the line."""


class Position(NamedTuple):
    """Where a reader stands, between two lines."""

    file: int = 0  # index into the paths
    offset: int = 0  # bytes of the file behind us, decompressed
    file_line: int = 0  # lines of the file behind us
    line: int = 0  # lines of all files behind us
    skipped: int = 0  # of those, lines (and empty files) left out because they were bad


class Batch(NamedTuple):
    """Consecutive samples, or a part of them."""

    labels: npt.NDArray[np.float32]  # (B,)
    integers: Int64Array  # (B, 13), parsing.MISSING_INTEGER where missing
    ids: Int64Array  # (26, B), parsing.MISSING_ID where missing
    whole: int  # samples of the batch on all ranks: B, unless the reader reads a part


class _Rows(NamedTuple):
    """The reader's position after each of N consecutive samples, and its part of the samples."""

    batch: Batch
    positions: Int64Array  # (N, 5), columns as in Position


class CriteoReader:
    """Iterate over samples in file order.

    Args:
        paths: Files in the order in which to read them; a name that ends in ``.gz`` is
            decompressed.
        batch_size: Samples in a batch; the last one may be smaller.
        start: Where to begin, such as another reader's :attr:`position`.
        stop_line: Number of lines, over all files and counted from the first one, after which to
            stop; None for all.
        on_bad_line: ``"error"`` raises at a line that is not in the format and at an empty file;
            ``"skip"`` leaves them out and counts them.
        part: Which of the parts to read: in every batch the samples ``part``, ``part + parts``...
            There may be none of them in the last batch.
        parts: Of each batch. Unless bad lines are left out, only lines of the part are parsed, and
            another part's bad line is not found.

    Raises:
        FileNotFoundError: A path does not exist or is not a file.
        ValueError: There are no paths, or an argument is out of range.

    Iterating raises :class:`DataError` for bad data, and, whatever ``on_bad_line`` says, for a
    compressed file that is damaged.
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
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if on_bad_line not in ("error", "skip"):
            raise ValueError(f"on_bad_line must be 'error' or 'skip', got {on_bad_line!r}")
        if not 0 <= part < parts:
            raise ValueError(f"part must be from 0 to below parts={parts}, got {part}")
        self.paths = check_paths(paths)
        self.batch_size = batch_size
        self.stop_line = stop_line
        self.on_bad_line = on_bad_line
        self.part = part
        self.parts = parts
        self.position = start or Position()
        self.first_skipped: str | None = None
        """File, line and reason of the first line this reader skipped."""

    def __iter__(self) -> Iterator[Batch]:
        rows = _no_rows()
        self._samples = 0  # parsed or passed over so far
        for block in self._blocks(self.position):
            rows = _concatenate(rows, block)
            count = len(rows.positions)
            for begin in range(0, count - self.batch_size + 1, self.batch_size):
                yield self._advance(rows, begin, begin + self.batch_size)
            rows = self._slice(rows, count - count % self.batch_size, count)
        if len(rows.positions):
            yield self._advance(rows, 0, len(rows.positions))
        self.position = self._end

    def _advance(self, rows: _Rows, begin: int, end: int) -> Batch:
        self.position = Position(*rows.positions[end - 1].tolist())
        return self._slice(rows, begin, end).batch

    def _slice(self, rows: _Rows, begin: int, end: int) -> _Rows:
        """Samples of which the first one begins a batch."""
        mine = slice(self._count_mine(begin), self._count_mine(end))
        batch = Batch(
            rows.batch.labels[mine],
            rows.batch.integers[mine],
            np.ascontiguousarray(rows.batch.ids[:, mine]),
            end - begin,
        )
        return _Rows(batch, rows.positions[begin:end])

    def _count_mine(self, samples: int) -> int:
        """How many of so many samples, from the beginning of a batch on, are of the part."""
        batches, rest = divmod(samples, self.batch_size)
        in_batch = len(range(self.part, self.batch_size, self.parts))
        return batches * in_batch + len(range(self.part, rest, self.parts))

    def _is_mine(self, samples: int) -> npt.NDArray[np.bool_]:
        """Which of the next samples are of the part."""
        numbers = self._samples + np.arange(samples)
        mine: npt.NDArray[np.bool_] = numbers % self.batch_size % self.parts == self.part
        return mine

    def _blocks(self, position: Position) -> Iterator[_Rows]:
        """Yield the samples after a position; leave the position behind the last line."""
        self._end = position
        for index in range(position.file, len(self.paths)):
            if self._done():
                return
            if index > position.file:
                self._end = self._end._replace(file=index, offset=0, file_line=0)
            yield from self._file_blocks(self.paths[index])

    def _done(self) -> bool:
        return self.stop_line is not None and self._end.line >= self.stop_line

    def _file_blocks(self, path: Path) -> Iterator[_Rows]:
        try:
            with open_file(path) as file:
                if self._end.offset:
                    file.seek(self._end.offset)
                rest = b""  # of a line whose newline has not been read
                left_out = 0  # bytes of that line which are too many to be kept
                while not self._done():
                    read = file.read(_BLOCK_BYTES)
                    if not read:
                        if rest:  # the last line has no newline
                            yield self._parse(path, rest + b"\n", left_out)
                        elif self._end.offset == 0:
                            self._refuse(path, None, "the file is empty")
                        return
                    data = rest + read
                    cut = data.rfind(b"\n") + 1
                    rest = data[cut:]
                    if cut:
                        yield self._parse(path, data[:cut], left_out)
                        left_out = 0
                    if len(rest) > _LONGEST_LINE:
                        if self.on_bad_line == "error":
                            line = self._end.file_line + 1
                            self._refuse(path, line, f"no newline within {_LONGEST_LINE} bytes")
                        left_out += len(rest) - _LONGEST_LINE
                        rest = rest[:_LONGEST_LINE]
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path}: cannot be decompressed after line {self._end.file_line}: {error}; "
                "fetch or compress the file again"
            ) from error

    def _parse(self, path: Path, data: bytes, left_out: int) -> _Rows:
        """Parse lines; ``left_out`` bytes of the first one, a bad one, are not in ``data``."""
        end = self._end
        begin = end.offset + left_out
        block = self._parse_part(data)
        count = block.line_count
        if self.stop_line is not None:
            count = min(count, self.stop_line - end.line)
        for error in block.errors:
            if error.line < count:
                self._refuse(path, end.file_line + error.line + 1, error.reason)
        kept = int(np.searchsorted(block.lines, count))
        lines = block.lines[:kept]
        positions = np.empty((kept, len(Position._fields)), dtype=np.int64)
        positions[:, 0] = end.file
        positions[:, 1] = begin + block.ends[:kept]
        positions[:, 2] = end.file_line + 1 + lines
        positions[:, 3] = end.line + 1 + lines
        positions[:, 4] = end.skipped + lines - np.arange(kept)
        length = len(data) if count == block.line_count else _line_end(data, count)
        # A skipped line was counted by _refuse.
        self._end = self._end._replace(
            offset=begin + length, file_line=end.file_line + count, line=end.line + count
        )
        mine = int(self._is_mine(kept).sum())
        self._samples += kept
        batch = Batch(block.labels[:mine], block.integers[:mine], block.ids[:, :mine], kept)
        return _Rows(batch, positions)

    def _parse_part(self, data: bytes) -> ParsedBlock:
        """Parse lines; the columns are of the part's samples, lines and ends of all."""
        if self.parts == 1:
            return parse_block(data)
        if self.on_bad_line == "skip":  # which sample is whose depends on what can be parsed
            block = parse_block(data)
            mine = self._is_mine(len(block.lines))
            return block._replace(
                labels=block.labels[mine], integers=block.integers[mine], ids=block.ids[:, mine]
            )
        text = np.frombuffer(data, dtype=np.uint8)
        ends = np.flatnonzero(text == 10) + 1
        mine = self._is_mine(len(ends))
        chosen = np.flatnonzero(mine)
        whole = {"lines": np.arange(len(ends)), "ends": ends, "line_count": len(ends)}
        if not len(chosen):
            batch = _no_rows().batch
            return ParsedBlock(batch.labels, batch.integers, batch.ids, errors=[], **whole)
        block = parse_block(text[np.repeat(mine, np.diff(ends, prepend=0))].tobytes())
        errors = [error._replace(line=int(chosen[error.line])) for error in block.errors]
        return block._replace(errors=errors, **whole)

    def _refuse(self, path: Path, line: int | None, reason: str) -> None:
        message = f"{path}:{line}: {reason}" if line is not None else f"{path}: {reason}"
        if self.on_bad_line == "error":
            raise DataError(f"{message} (--on-bad-line skip leaves bad lines out)")
        if self.first_skipped is None:
            self.first_skipped = message
        self._end = self._end._replace(skipped=self._end.skipped + 1)


def check_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths, all of which are files.

    Raises:
        FileNotFoundError: A path does not exist or is not a file.
        ValueError: There are none.
    """
    if not paths:
        raise ValueError("no data files were given; name at least one file in the Criteo format")
    for path in map(Path, paths):
        if path.is_dir():
            raise FileNotFoundError(f"{path} is a folder; name the files in it, as in {path}/*")
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; check the path of the data file")
    return [Path(path) for path in paths]


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes, decompressed if its name ends in ``.gz``."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def count_lines(paths: Sequence[str | Path]) -> int:
    """Count the lines of all files, well-formed or not.

    Args:
        paths: Files, plain or gzipped.

    Returns:
        The number of newlines, plus one for each file whose last line has none.

    Raises:
        FileNotFoundError: A path does not exist or is not a file.
        DataError: A compressed file is damaged.
    """
    lines = 0
    for path in check_paths(paths):
        last = b"\n"
        try:
            with open_file(path) as file:
                while block := file.read(_BLOCK_BYTES):
                    lines += block.count(b"\n")
                    last = block[-1:]
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path}: cannot be decompressed: {error}; fetch or compress the file again"
            ) from error
        lines += last != b"\n"
    return lines


def _line_end(data: bytes, count: int) -> int:
    """Return the offset just past the ``count``-th line."""
    newlines = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10)
    return int(newlines[count - 1]) + 1 if count else 0


def _no_rows() -> _Rows:
    batch = Batch(
        np.empty(0, np.float32),
        np.empty((0, INTEGER_COUNT), np.int64),
        np.empty((CATEGORY_COUNT, 0), np.int64),
        0,
    )
    return _Rows(batch, np.empty((0, len(Position._fields)), np.int64))


def _concatenate(a: _Rows, b: _Rows) -> _Rows:
    if not len(a.positions):
        return b
    batch = Batch(
        np.concatenate([a.batch.labels, b.batch.labels]),
        np.concatenate([a.batch.integers, b.batch.integers]),
        np.concatenate([a.batch.ids, b.batch.ids], axis=1),
        a.batch.whole + b.batch.whole,
    )
    return _Rows(batch, np.concatenate([a.positions, b.positions]))
