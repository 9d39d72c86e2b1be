"""Files of lines in the Criteo format, and the reason why a line is bad."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INTEGER_COUNT = 13
CATEGORY_COUNT = 26
FIELD_COUNT = 1 + INTEGER_COUNT + CATEGORY_COUNT
LONGEST_LINE = 1 << 16
"""Bytes; a real line has a few hundred."""


class DataError(ValueError):
    """The data cannot be read; the message names the file and, where there is one, the line."""


def check_line(line: bytes) -> str | None:
    """Return why a line is not in the format; None: it is."""
    if len(line) >= LONGEST_LINE:
        return f"no newline within {LONGEST_LINE} bytes"
    fields = line.removesuffix(b"\n").split(b"\t")
    if len(fields) != FIELD_COUNT:
        few_or_many = "few" if len(fields) < FIELD_COUNT else "many"
        return f"too {few_or_many} fields: expected {FIELD_COUNT}, found {len(fields)}"
    for number, field in enumerate(fields):
        if number == 0:
            good, expected = field in (b"0", b"1"), "(label) must be 0 or 1"
        elif number <= INTEGER_COUNT:
            digits = re.fullmatch(rb"-?0*([0-9]{1,19})", field)
            good = not field or (digits is not None and int(digits[1]) < 1 << 63)
            expected = f"(integer {number}) must be a decimal 64-bit integer or empty"
        else:
            good = re.fullmatch(rb"[0-9a-fA-F]{0,16}", field) is not None
            name = f"category {number - INTEGER_COUNT}"
            expected = f"({name}) must be a string of at most 16 hexadecimal digits or empty"
        if not good:
            shown = field if len(field) <= 40 else field[:40] + b"..."
            text = ascii(shown.decode("ascii", errors="backslashreplace"))
            return f"field {number + 1} {expected}, got {text}"
    return None


def check_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths; raise FileNotFoundError unless all of them are files."""
    if not paths:
        raise ValueError("no data files were given; name at least one file in the Criteo format")
    for path in map(Path, paths):
        if path.is_dir():
            raise FileNotFoundError(f"{path} is a folder; name the files in it, as in {path}/*")
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; check the path of the data file")
    return [Path(path) for path in paths]


def count_lines(paths: Sequence[str | Path]) -> int:
    """Count the lines of all files, good or bad; the last line of a file needs no newline."""
    lines = 0
    for path in check_paths(paths):
        last = b"\n"
        with open_file(path) as file:
            while block := file.read(1 << 22):
                lines += block.count(b"\n")
                last = block[-1:]
        lines += last != b"\n"
    return lines


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Open a file of bytes, decompressed if it is a ``.gz``; raise DataError if it is damaged."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be decompressed: {error}; fetch or compress the file again"
        ) from error


def lines_of(file: Any) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long to be a sample, only the beginning."""
    while line := file.readline(LONGEST_LINE):
        end = line
        while end and not end.endswith(b"\n"):
            end = file.readline(LONGEST_LINE)
        yield line
