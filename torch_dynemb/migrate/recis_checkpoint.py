"""Checkpoints of RecIS, read a piece at a time.

A folder has files ``model-%06d-of-%06d.safetensors``. A table consists of tensors
``TABLE.SLOT/part_R_N`` of every rank R of N. Its slots are ``id`` (int64 [n]), ``embedding``
[n, dim], and one for each tensor of optimizer state and of filters. ``tensorkey.json`` maps these
names to ``TABLE@SLOT^BEGIN@END@SIZE``: the ids that hash to slots BEGIN to END of SIZE. See
``csrc/serialize`` and ``csrc/embedding`` of github.com/alibaba/RecIS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_dynemb.argument_checks import text
from torch_dynemb.files.bounded_json import json_of, parsed
from torch_dynemb.files.locations import checked_path
from torch_dynemb.files.tensor_file import DTYPES, header_bytes
from torch_dynemb.migrate.files import Path_, RawFile
from torch_dynemb.migrate.source import Source, SourceRows
from torch_dynemb.table import RowBatch

_KEYS = "tensorkey.json"
_BLOCK = re.compile(r"(?P<table>.+)@(?P<slot>[^@^]+)\^(?P<begin>\d+)@(?P<end>\d+)@(?P<size>\d+)")
_ADAM = re.compile(r"sparse_adam(?:w|w_tf)?_(exp_avg|exp_avg_sq)")
_ADAGRAD = re.compile(r"sparse_(?:adagrad|row_wise_adagrad|row_wise_adagrad_sum)_state_sum")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class _Block(NamedTuple):
    """A tensor of a file.

    Attributes:
        path: of the file.
        dtype, shape: of the tensor.
        begin: its first byte.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    def opened(self, columns: int | None) -> RawFile:
        """Open the tensor for reading.

        Raises:
            ValueError: the file is cut off.
        """
        return RawFile(self.path, self.dtype, columns, begin=self.begin, rows=self.shape[0])

    @property
    def columns(self) -> int:
        """Values of a row."""
        result = 1
        for size in self.shape[1:]:
            result *= size
        return result


_Slice = tuple[int, int, int]  # begin, end, size


class RecisSource(Source):
    """Table of a checkpoint of RecIS, see :func:`read_recis`."""

    def __init__(self, folder: Path, table: str, step_slot: str, left_out: Sequence[str]) -> None:
        self._headers = _headers(folder)
        self._parts = self._blocks_of(folder, table)
        name = f"{folder}: table {table!r}"
        slots = next(iter(self._parts.values())).keys()
        self._step_slot = step_slot if step_slot in slots else None
        state: dict[str, str] = {}
        for slot in sorted(slots - {"id", "embedding", step_slot, *left_out}):
            known = _state_name(slot)
            if known is None:
                raise ValueError(
                    f"read_recis: {name} has a slot {slot!r}, which is not known here: give "
                    f"left_out=[{slot!r}] to load the table without it"
                )
            if known in state:
                raise ValueError(
                    f"read_recis: {name} has slots {state[known]!r} and {slot!r}, which are state "
                    "of two optimizers: name those of one of them in left_out"
                )
            state[known] = slot
        self._state = state
        widths = {of["embedding"].columns for of in self._parts.values()}
        if len(widths) > 1:
            raise ValueError(f"read_recis: {name} has rows of {sorted(widths)} columns: damaged")
        super().__init__(
            name,
            widths.pop(),
            state=tuple(state),
            scores=() if self._step_slot is None else ("step",),
            optimizer_steps=self._steps(table),
        )

    def _blocks_of(self, folder: Path, table: str) -> dict[_Slice, dict[str, _Block]]:
        """Return the tensors of a table by slice and slot.

        Raises:
            FileNotFoundError: the table does not exist.
            ValueError: tensors are missing.
        """
        tables: set[str] = set()
        parts: dict[_Slice, dict[str, _Block]] = {}
        for key, name in _keys(folder).items():
            match = _BLOCK.fullmatch(str(name))
            if match is None:
                continue
            tables.add(match["table"])
            if match["table"] != table:
                continue
            where = int(match["begin"]), int(match["end"]), int(match["size"])
            if key not in self._headers:
                raise ValueError(
                    f"{folder / _KEYS} names {key!r}, but no file model-*.safetensors has it: "
                    "files are missing"
                )
            parts.setdefault(where, {})[match["slot"]] = self._headers[key]
        if not parts:
            raise FileNotFoundError(
                f"read_recis: {folder} has no table {table!r}, only {sorted(tables)}"
            )
        self._check_whole(folder, table, parts)
        return dict(sorted(parts.items()))

    def _check_whole(
        self, folder: Path, table: str, parts: Mapping[_Slice, Mapping[str, _Block]]
    ) -> None:
        end, slots = 0, next(iter(parts.values())).keys()
        for (begin, last, size), blocks in sorted(parts.items()):
            missing = {"id", "embedding", *slots} - blocks.keys()
            if missing or blocks.keys() != slots:
                raise ValueError(
                    f"{folder}: slots {begin} to {last} of table {table!r} have {sorted(blocks)}, "
                    f"expected id, embedding and {sorted(slots)}: files are missing"
                )
            rows = blocks["id"].shape[0]
            wrong = [slot for slot, of in blocks.items() if of.shape[:1] != (rows,)]
            if wrong or blocks["id"].shape != (rows,) or blocks["id"].dtype != torch.int64:
                of = blocks[(wrong or ["id"])[0]]
                raise ValueError(
                    f"{of.path}: slot {(wrong or ['id'])[0]!r} of table {table!r} is {of.dtype} "
                    f"{list(of.shape)}, but there are {rows} ids: the file is damaged"
                )
            for slot, of in blocks.items():
                if slot == "embedding" and (of.dtype not in _FLOATS or len(of.shape) < 2):
                    raise ValueError(
                        f"{of.path}: rows of table {table!r} are {of.dtype} {list(of.shape)}, "
                        "expected floats [n, dim]: other rows have no scale and cannot be read"
                    )
            if begin != end:
                raise ValueError(
                    f"{folder}: table {table!r} has no ids of slots {end} to {begin}: the files of "
                    "a rank are missing"
                )
            end = last if last != size else 0
        if end != 0:
            raise ValueError(
                f"{folder}: table {table!r} has no ids of slots from {end} on: the files of a rank "
                "are missing"
            )

    def _steps(self, table: str) -> int | None:
        """Read the number of the optimizer's updates."""
        slots = set(self._state.values())
        names = set()
        for slot in slots:
            prefix = slot
            for ending in ("exp_avg_sq", "exp_avg", "state_sum"):
                prefix = prefix.removesuffix(ending)
            names |= {f"{prefix}step", f"{prefix}{table}_step"}
        for key, block in self._headers.items():
            if key.partition("^")[0].strip() not in names or block.shape not in ((), (1,)):
                continue
            with RawFile(block.path, block.dtype, begin=block.begin, rows=1) as file:
                return int(file.read(0, 1))
        return None

    def batches(self, size: int) -> Iterator[SourceRows]:
        for blocks in self._parts.values():
            wanted = {"id": blocks["id"].opened(None)}
            wanted["embedding"] = blocks["embedding"].opened(self.embedding_dim)
            for slot in (*self._state.values(), *([self._step_slot] if self._step_slot else [])):
                wanted[slot] = blocks[slot].opened(blocks[slot].columns)
            with ExitStack() as stack:
                files = {slot: stack.enter_context(of) for slot, of in wanted.items()}
                for begin in range(0, files["id"].rows, size):
                    end = min(begin + size, files["id"].rows)
                    read = {slot: of.read(begin, end) for slot, of in files.items()}
                    scores = {}
                    if self._step_slot is not None:
                        scores["step"] = read[self._step_slot][:, 0].to(torch.int64)
                    batch = RowBatch(
                        read["id"],
                        read["embedding"],
                        {name: read[slot] for name, slot in self._state.items()},
                        scores,
                    )
                    yield SourceRows(batch, str(blocks["embedding"].path), begin)


def _state_name(slot: str) -> str | None:
    """Return this library's name of a slot of optimizer state."""
    if found := _ADAM.fullmatch(slot):
        return found[1]
    return "sum" if _ADAGRAD.fullmatch(slot) else None


def _keys(folder: Path) -> Mapping[str, Any]:
    path = folder / _KEYS
    if not path.is_file():
        raise FileNotFoundError(
            f"read_recis: {folder} is not a checkpoint of RecIS: it has no {_KEYS}"
        )
    try:
        keys = json_of(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(keys, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return keys


def _headers(folder: Path) -> dict[str, _Block]:
    """List the tensors of all files, by their names in the files.

    Raises:
        ValueError: a header is damaged, or a file is shorter than its header says.
    """
    result = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            try:
                length = header_bytes(file.read(8))
                if 8 + length > size:
                    raise ValueError(f"its header would have {length} bytes, the file has {size}")
                entries = parsed(file.read(length))
                for name, entry in entries.items():
                    if name == "__metadata__" or entry["dtype"] not in DTYPES:
                        continue  # a dense tensor: tables do not use this dtype
                    begin, end = (8 + length + int(of) for of in entry["data_offsets"])
                    block = _Block(
                        path, DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), begin
                    )
                    rows = block.shape[0] if block.shape else 1
                    bytes_ = rows * block.columns * block.dtype.itemsize
                    if min(block.shape, default=0) < 0 or begin < 0 or end - begin != bytes_:
                        raise ValueError(f"{name!r} has bytes {begin} to {end}")
                    if end > size:
                        raise ValueError(f"{name!r} ends at byte {end}, but the file has {size}")
                    result[name] = block
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is damaged or cut off: {error}") from error
    return result


def read_recis(
    folder: Path_,
    table: str,
    *,
    step_slot: str = "step_filter",
    left_out: Sequence[str] = (),
) -> Source:
    """Read a table from a checkpoint of RecIS, as a source for :func:`load`.

    * Optimizer state of SparseAdam, SparseAdamW, SparseAdamWTF, SparseAdagrad and
      SparseRowWiseAdagrad is read, with the number of steps.
    * The steps of a GlobalStepFilter become scores by step.
    * The files of all ranks are read.
    * Ids of coalesced tables have their lower 52 bits only: RecIS drops the others.
    * The dense part of a model is not read.

    Args:
        folder: of the checkpoint, with ``tensorkey.json``.
        table: name of the logical table: a child of ``EmbeddingOption.children``, or the
            ``shared_name``.
        step_slot: name of the GlobalStepFilter; its steps are read if it exists.
        left_out: names of slots to skip, such as those of other filters.

    Returns:
        The source. Only headers have been read.

    Raises:
        TypeError: an argument has a wrong type.
        FileNotFoundError: the checkpoint or the table is missing.
        ValueError: files are missing, damaged or cut off, or a slot is unknown.

    Example:
        ``migrate.load(model, {"users": migrate.read_recis("ckpt/1000", "user_id")})``
    """
    path = checked_path("read_recis", folder)
    if isinstance(left_out, str):
        raise TypeError(f"read_recis: left_out is {left_out!r}, expected a list of names of slots")
    return RecisSource(
        path,
        text("read_recis: table", table),
        text("read_recis: step_slot", step_slot),
        [text("read_recis: a name of left_out", name) for name in left_out],
    )


__all__ = ["RecisSource", "read_recis"]
