"""Reading of the ids of columns from files, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from torch_dynemb.plan.lines import LineReader, Lines, first_lines
from torch_dynemb.plan.parquet import open_parquet
from torch_dynemb.plan.text import STANDARD_INPUT, open_text

Format = Literal["criteo", "ids", "parquet"]
FORMATS: tuple[Format, ...] = ("criteo", "ids", "parquet")


def read_lines(
    paths: Sequence[str],
    *,
    file_format: Format | None,
    columns: Sequence[str] | None,
    limit: int | None,
    values: Sequence[str] = (),
) -> tuple[list[str], Iterator[Lines]]:
    """Read files one after the other.

    Args:
        paths: files, or ``"-"`` for the standard input. Text with a name that ends in ``.gz`` is
            decompressed.
        file_format: of all files; None: detect it from the content of each file.
        columns: names of columns; None: all that hold ids.
        limit: maximum number of lines; None: all.
        values: columns that are read as numbers, not as ids, such as a label.

    Returns:
        The names of the columns, and the batches of lines.

    Raises:
        FileNotFoundError: a file does not exist, or is a folder.
        ValueError: a column does not exist, a file is empty or has another format, or its columns
            differ from those of the first file. Iterating raises ValueError for a wrong line.
        ImportError: a file is in Parquet, and pyarrow is missing.
    """
    for path in paths:
        _check_path(path)
    for name in values:
        if columns is not None and name in columns:
            raise ValueError(
                f"--columns names {name!r}, which is a label or a time: ids alone have rows"
            )
    streams = [_opened(path, file_format, columns, values) for path in paths]
    first = streams[0].columns
    for path, stream in zip(paths, streams, strict=True):
        if stream.columns != first:
            raise ValueError(
                f"{path} has the columns {', '.join(stream.columns)}, but {paths[0]} has "
                f"{', '.join(first)}: name with --columns those that all files have, or plan the "
                "files apart"
            )
    return first, _limited(streams, limit)


def _check_path(path: str) -> None:
    if path == STANDARD_INPUT:
        return
    if Path(path).is_dir():
        raise FileNotFoundError(f"{path} is a folder: name the files in it, as in {path}/*")
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: check the path of the sample")


def _opened(
    path: str, file_format: Format | None, columns: Sequence[str] | None, values: Sequence[str]
) -> LineReader:
    if file_format == "parquet" or (file_format is None and _looks_like_parquet(path)):
        if path == STANDARD_INPUT:
            raise ValueError(
                "the standard input cannot be read as Parquet, of which the end must be read "
                "first: write it to a file and name that"
            )
        return open_parquet(path, columns, values)
    return open_text(path, file_format, columns, values)


def _looks_like_parquet(path: str) -> bool:
    if path == STANDARD_INPUT:
        return False
    with Path(path).open("rb") as file:
        return file.read(4) == b"PAR1"


def _limited(streams: Sequence[LineReader], limit: int | None) -> Iterator[Lines]:
    left = limit
    for stream in streams:
        for batch in stream.batches():
            if left is not None and batch.count >= left:
                yield first_lines(batch, left)
                return
            left = None if left is None else left - batch.count
            yield batch


__all__ = ["FORMATS", "Format", "read_lines"]
