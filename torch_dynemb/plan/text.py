"""Text with an id in every line, or with the 40 fields of Criteo's lines."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

import torch
from torch import Tensor

from torch_dynemb.plan.lines import (
    ColumnIds,
    LineReader,
    Lines,
    check_number_columns,
    chosen_columns,
)

STANDARD_INPUT = "-"
ID_COLUMN = "id"
_BLOCK_BYTES = 1 << 22
_CRITEO_FIELDS = 40  # a label, 13 integers, 26 categories


class _Kind(NamedTuple):
    """Format of the fields of a column: base, characters and type code."""

    base: int
    characters: re.Pattern[bytes]
    typecode: str
    word: str


_DECIMAL = _Kind(10, re.compile(rb"[0-9-]*"), "q", "a decimal 64-bit integer")
_HEXADECIMAL = _Kind(
    16, re.compile(rb"[0-9a-fA-F]*"), "Q", "a string of at most 16 hexadecimal digits"
)
_CRITEO = {f"C{i}": (13 + i, _HEXADECIMAL) for i in range(1, 27)} | {
    f"I{i}": (i, _DECIMAL) for i in range(1, 14)
}
LABEL_COLUMN = "label"
_NUMBERS = {LABEL_COLUMN: 0} | {f"I{i}": i for i in range(1, 14)}
_CATEGORIES = [name for name in _CRITEO if name.startswith("C")]


def open_text(
    path: str,
    file_format: Literal["criteo", "ids"] | None,
    columns: Sequence[str] | None,
    values: Sequence[str] = (),
) -> LineReader:
    """Open a text file, or the standard input.

    Formats:

    * ``"ids"``: an integer in each line, column ``id``; an empty line is a missing id.
    * ``"criteo"``: 40 fields with tabs between them, columns ``C1`` to ``C26`` (hexadecimal) and,
      on request, ``I1`` to ``I13``.

    Args:
        path: of the file, or ``"-"``.
        file_format: ``"ids"`` or ``"criteo"``; None: detect it from the first line.
        columns: names; None: ``id``, or all of Criteo's categories.
        values: columns read as numbers: ``label`` and ``I1`` to ``I13`` of Criteo's format.

    Raises:
        ValueError: the column does not exist, or the file is empty or has neither format.
    """
    file = _open(path)
    source = _quoted(path)
    try:
        with _readable(source, 0):
            start = file.readline()
    except BaseException:
        file.close()
        raise
    if not start:
        raise ValueError(f"{source} is empty: a sample has a line at least")
    fields = start.count(b"\t") + 1
    if file_format is None:
        if fields not in (1, _CRITEO_FIELDS):
            raise ValueError(
                f"{source} has {fields} fields with tabs between them in its first line, expected "
                f"1 (ids by line) or {_CRITEO_FIELDS} (Criteo's format): write the ids of a column "
                "one by line, or all of them as Parquet"
            )
        file_format = "ids" if fields == 1 else "criteo"
    if file_format == "ids":
        check_number_columns(source, values, [])
        chosen_columns(source, columns, [ID_COLUMN])
        return LineReader([ID_COLUMN], lambda: _id_batches(source, start, file))
    asked = columns is not None
    check_number_columns(source, values, list(_NUMBERS))
    names = chosen_columns(source, columns, list(_CRITEO) if asked else _CATEGORIES)
    return LineReader(names, lambda: _criteo_batches(source, start, file, names, values))


def _open(path: str) -> IO[bytes]:
    if path == STANDARD_INPUT:
        return sys.stdin.buffer
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return Path(path).open("rb")


def _quoted(path: str) -> str:
    return "the standard input" if path == STANDARD_INPUT else path


class _readable(AbstractContextManager[None, None]):  # noqa: N801  reads as a verb
    """Context that adds the file and line to errors of decompression."""

    def __init__(self, source: str, line: int) -> None:
        self._source, self._line = source, line

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error):
            raise ValueError(
                f"{self._source} cannot be decompressed after line {self._line}: {error}; fetch or "
                "compress the file again"
            ) from error


def _blocks(source: str, start: bytes, file: IO[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Iterate over blocks of lines without line ends, with the number of earlier lines."""
    done = 0
    with nullcontext() if file is sys.stdin.buffer else file:
        lines = [start, *_following(source, 1, file)]
        while lines:
            yield done, [line.rstrip(b"\r\n") for line in lines]
            done += len(lines)
            lines = _following(source, done, file)


def _following(source: str, done: int, file: IO[bytes]) -> list[bytes]:
    with _readable(source, done):
        return file.readlines(_BLOCK_BYTES)


def _id_batches(source: str, start: bytes, file: IO[bytes]) -> Iterator[Lines]:
    for done, lines in _blocks(source, start, file):
        fields = [line.strip() for line in lines]
        yield Lines(len(lines), {ID_COLUMN: _column(source, done, fields, _DECIMAL, ID_COLUMN)})


def _criteo_batches(
    source: str, start: bytes, file: IO[bytes], names: Sequence[str], values: Sequence[str]
) -> Iterator[Lines]:
    for done, lines in _blocks(source, start, file):
        split = [line.split(b"\t") for line in lines]
        for number, fields in enumerate(split, start=done + 1):
            if len(fields) != _CRITEO_FIELDS:
                raise ValueError(
                    f"{source}, line {number} has {len(fields)} fields with tabs between them, "
                    f"expected {_CRITEO_FIELDS}: mend the line or leave it out"
                )
        columns = {}
        for name in names:
            place, kind = _CRITEO[name]
            columns[name] = _column(source, done, [fields[place] for fields in split], kind, name)
        numbers = {
            name: _numbers(source, done, [fields[_NUMBERS[name]] for fields in split], name)
            for name in values
        }
        yield Lines(len(lines), columns, numbers)


def _numbers(source: str, done: int, fields: Sequence[bytes], name: str) -> Tensor:
    """Parse numbers; an empty field is NaN."""
    numbers = []
    for number, field in enumerate(fields, start=done + 1):
        try:
            numbers.append(float(field or b"nan"))
        except ValueError:
            shown = ascii(field[:40].decode("ascii", errors="backslashreplace"))
            raise ValueError(
                f"{source}, line {number}: {name} is {shown}, expected a number: mend the line or "
                "leave it out"
            ) from None
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _column(source: str, done: int, fields: Sequence[bytes], kind: _Kind, name: str) -> ColumnIds:
    present = [field for field in fields if field]
    values = _values(present, kind)
    if values is None:
        for number, field in enumerate(fields, start=done + 1):
            if _values([field] if field else [], kind) is None:
                shown = ascii(field[:40].decode("ascii", errors="backslashreplace"))
                where = " in each line, the first one included" if name == ID_COLUMN else ""
                raise ValueError(
                    f"{source}, line {number}: {name} is {shown}, expected {kind.word}{where}: ids "
                    "are integers; write strings as a column of Parquet"
                )
    ids = (
        torch.frombuffer(values, dtype=torch.int64)
        if values
        else torch.empty(0, device="cpu").long()
    )
    lines = torch.arange(len(fields), device="cpu")
    if len(present) < len(fields):
        lines = lines[torch.frombuffer(bytearray(map(bool, fields)), dtype=torch.bool)]
    return ColumnIds(ids, lines, len(fields) - len(present))


def _values(fields: Sequence[bytes], kind: _Kind) -> array[int] | None:
    """Parse the numbers of fields; None: a field is not a number."""
    if not kind.characters.fullmatch(b"".join(fields)):
        return None
    try:
        return array(kind.typecode, [int(field, kind.base) for field in fields])
    except (OverflowError, ValueError):
        return None


__all__ = ["ID_COLUMN", "STANDARD_INPUT", "open_text"]
