"""Raw files: ids in one file and rows in another, without headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.migrate.files import Path_, RawFile, paths_of
from torch_dynemb.migrate.source import Source, SourceRows, with_columns
from torch_dynemb.table import RowBatch

Paths = Path_ | Sequence[Path_]
ID_DTYPES = (torch.int64, torch.uint64, torch.int32, torch.uint32)
FLOAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class _FileSet(NamedTuple):
    """Files of the same rows: row r of each file belongs to one id."""

    keys: Path
    values: Path
    state: dict[str, Path]
    scores: dict[str, Path]


class RawSource(Source):
    """Source of raw files, see :func:`read_raw`."""

    def __init__(
        self,
        parts: Sequence[_FileSet],
        embedding_dim: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        optimizer_steps: int | None,
    ) -> None:
        first = parts[0]
        super().__init__(
            str(first.keys) if len(parts) == 1 else f"{first.keys} and {len(parts) - 1} others",
            embedding_dim,
            state=tuple(first.state),
            scores=tuple(first.scores),
            optimizer_steps=optimizer_steps,
        )
        self._parts, self._dim = parts, embedding_dim
        self._key_dtype, self._value_dtype = key_dtype, value_dtype
        for part in parts:
            self._opened(part)  # compares their sizes

    def _opened(self, part: _FileSet) -> dict[str, RawFile]:
        keys = RawFile(part.keys, self._key_dtype)
        files = {"keys": keys, "values": RawFile(part.values, self._value_dtype, self._dim)}
        for name, path in part.state.items():
            columns = self._state_columns(path, keys.rows)
            files[f"state.{name}"] = RawFile(path, self._value_dtype, columns)
        for name, path in part.scores.items():
            files[f"score.{name}"] = RawFile(path, torch.int64)
        for file in files.values():
            if file.rows != keys.rows:
                raise ValueError(
                    f"{file.path} has {file.rows} rows, but {part.keys} has {keys.rows} keys of "
                    f"{self._key_dtype}: one of them is cut off, or of another dtype or dim"
                )
        return files

    def _state_columns(self, path: Path, rows: int) -> int | None:
        """Compute values of a row from the size of a file; None: one value."""
        size = path.stat().st_size
        return None if size == rows * self._value_dtype.itemsize else self._dim

    def batches(self, size: int) -> Iterator[SourceRows]:
        for part in self._parts:
            with ExitStack() as stack:
                files = {k: stack.enter_context(f) for k, f in self._opened(part).items()}
                for begin in range(0, files["keys"].rows, size):
                    end = min(begin + size, files["keys"].rows)
                    read = {name: file.read(begin, end) for name, file in files.items()}
                    batch = RowBatch(
                        as_ids(read["keys"]),
                        read["values"],
                        {name: with_columns(read[f"state.{name}"]) for name in part.state},
                        {name: read[f"score.{name}"] for name in part.scores},
                    )
                    yield SourceRows(batch, str(part.values), begin)


def as_ids(keys: Tensor) -> Tensor:
    """Convert keys of any width to int64; uint64 keys keep their bits."""
    return keys.view(torch.int64) if keys.dtype == torch.uint64 else keys.to(torch.int64)


def read_raw(
    keys: Paths,
    values: Paths,
    *,
    embedding_dim: int,
    key_dtype: torch.dtype = torch.int64,
    value_dtype: torch.dtype = torch.float32,
    state: Mapping[str, Paths] | None = None,
    scores: Mapping[str, Paths] | None = None,
    optimizer_steps: int | None = None,
) -> Source:
    """Read files of keys and values without headers as a source for :func:`load`.

    TensorFlow Recommenders Addons, HugeCTR and many other programs write tables in this way: one
    file has the keys, another one the rows in the same order. Values are in the byte order of
    this machine.

    Args:
        keys: the file, or a list of files.
        values: the file with their rows, [n, dim] each, or a list of as many files.
        embedding_dim: columns of a row.
        key_dtype: int64, uint64 (ids keep the 64 bits), int32 or uint32.
        value_dtype: of rows and state: float32, float64, float16 or bfloat16.
        state: files of optimizer state by the optimizer's name of the state, [n, dim] each, or [n]
            if a row has one value.
        scores: files of scores, int64 [n], by name: ``step``, ``timestamp`` (seconds),
            ``frequency``, ``custom`` or ``expiry`` (seconds).
        optimizer_steps: as in :func:`read_tensors`.

    Returns:
        The source. Only sizes of files have been read.

    Raises:
        TypeError: an argument has a wrong type.
        FileNotFoundError: a file is missing.
        ValueError: lengths do not match, or a dtype is unknown.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> folder = tempfile.TemporaryDirectory()
        >>> size = torch.tensor([3, 1, 2]).numpy().tofile(folder.name + "/keys")
        >>> size = torch.randn(3, 4).numpy().tofile(folder.name + "/values")
        >>> source = migrate.read_raw(
        ...     folder.name + "/keys", folder.name + "/values", embedding_dim=4
        ... )
        >>> items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> migrate.load(items, source)["embedding"].ids
        3
        >>> folder.cleanup()
    """
    dim = integer("read_raw: embedding_dim", embedding_dim, least=1)
    for name, dtype, known in (
        ("key_dtype", key_dtype, ID_DTYPES),
        ("value_dtype", value_dtype, FLOAT_DTYPES),
    ):
        if dtype not in known:
            raise ValueError(
                f"read_raw: {name} is {described(dtype)}, expected one of {list(map(str, known))}"
            )
    files = {"keys": paths_of("read_raw: keys", keys)}
    files["values"] = paths_of("read_raw: values", values)
    for what, given in (("state", state), ("scores", scores)):
        for name, paths in (given or {}).items():
            files[f"{what}[{name!r}]"] = paths_of(f"read_raw: {what}[{name!r}]", paths)
    for what, found in files.items():
        if len(found) != len(files["keys"]):
            raise ValueError(
                f"read_raw: {what} has {len(found)} files, but keys has {len(files['keys'])}: give "
                "as many, in the same order"
            )
    parts = [
        _FileSet(
            of_keys,
            files["values"][k],
            {name: files[f"state[{name!r}]"][k] for name in state or {}},
            {name: files[f"scores[{name!r}]"][k] for name in scores or {}},
        )
        for k, of_keys in enumerate(files["keys"])
    ]
    return RawSource(parts, dim, key_dtype, value_dtype, optimizer_steps)


__all__ = ["FLOAT_DTYPES", "ID_DTYPES", "Paths", "RawSource", "as_ids", "read_raw"]
