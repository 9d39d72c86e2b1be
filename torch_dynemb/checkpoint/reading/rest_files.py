"""Loads what a checkpoint has beside tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dynemb.checkpoint.entries import MANIFEST
from torch_dynemb.checkpoint.files.checksummed_files import SummedReader, SummedReaders
from torch_dynemb.checkpoint.files.tensor_file import StoredTensor
from torch_dynemb.checkpoint.manifest.records import SavedEntry, SavedRest
from torch_dynemb.checkpoint.saving.rest import dense_state, filled, is_sharded, tensor_pieces
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.dense_state import dense_only


class DenseLoad(NamedTuple):
    """The dense part of a model as it was read, before the model has it.

    Attributes:
        state: what ``load_state_dict`` takes; shards are those of the model.
        shards: what their values become.
    """

    state: dict[str, Any]
    shards: list[tuple[Tensor, Tensor]]

    def apply(self, model: nn.Module) -> None:
        """Gives it to the model, as a whole, while signals wait.

        Raises:
            RuntimeError: the model does not take it, and has what it had.
        """
        with defer_signals():
            shards = [(target, target.clone()) for target, _ in self.shards]
            before = {
                name: value.clone()
                if isinstance(value, Tensor) and not is_sharded(value)
                else value
                for name, value in dense_state(model).items()
            }
            try:
                _give(model, self.state, self.shards)
            except BaseException:
                _give(model, before, shards)
                raise


def _give(model: nn.Module, state: dict[str, Any], shards: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for target, values in shards:
            target.copy_(values)
    with dense_only():
        model.load_state_dict(state, strict=False)


def read_dense(folder: Path, saved: SavedRest, model: nn.Module, *, strict: bool) -> DenseLoad:
    """Reads the dense part of a model.

    Args:
        folder: of the checkpoint.
        saved: what it has.
        model: that takes it.
        strict: whether the names must be the model's.

    Raises:
        ValueError: names or shapes are not the model's.
        DamagedFileError: a file is damaged.
    """
    own = dense_state(model)
    values: Mapping[str, Any] = saved.values or {}
    names = {*saved.entries, *values}
    if strict and names != own.keys():
        missing, unexpected = sorted(own.keys() - names), sorted(names - own.keys())
        raise ValueError(
            f"checkpoint.load: the model has {missing or 'nothing'} that was not saved, and "
            f"{unexpected or 'nothing'} was saved that it has not: give strict=False to load what "
            "both have"
        )
    for name in names & own.keys():
        if (name in saved.entries) != isinstance(own[name], Tensor):
            raise ValueError(
                f"checkpoint.load: entry {name!r} is a tensor either in the model or in "
                "the checkpoint, and something else in the other: load it into the model that "
                "was saved"
            )
    with _Files(folder, saved) as files:
        state: dict[str, Any] = {name: values[name] for name in values if name in own}
        shards: list[tuple[Tensor, Tensor]] = []
        for name in sorted(saved.entries.keys() & own.keys()):
            target = own[name]
            for here, offsets, sizes in tensor_pieces(target):
                loaded = files.piece(name, saved.entries[name], offsets, tuple(here.shape), sizes)
                if is_sharded(target):
                    shards.append((here, loaded))
                else:
                    state[name] = loaded
            if is_sharded(target):
                state[name] = target
        files.finish()
    return DenseLoad(state, shards)


def read_all(folder: Path, saved: SavedRest) -> dict[str, Any]:
    """The dense part of whatever model was saved, whole tensors of the CPU.

    Raises:
        DamagedFileError: a file is damaged.
    """
    return {**_tensors(folder, saved), **(saved.values or {})}


def dense_shapes(folder: Path, saved: SavedRest) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of the whole tensors of the dense part; only headers are read.

    Raises:
        DamagedFileError: a file is damaged.
    """
    with _Files(folder, saved) as files:
        files.finish()  # the blocks with the headers
        return {name: files.shape(entries) for name, entries in saved.entries.items()}


def read_state(folder: Path, saved: SavedRest) -> Any:
    """What the program had given to save.

    Raises:
        DamagedFileError: a file is damaged.
    """
    tensors = _tensors(folder, saved)
    try:
        return None if saved.values is None else filled(saved.values, tensors)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"{folder / MANIFEST}: what was given as state cannot be made again: {error!r}",
            path=folder / MANIFEST,
        ) from error


def _tensors(folder: Path, saved: SavedRest) -> dict[str, Tensor]:
    """All tensors by name."""
    with _Files(folder, saved) as files:
        tensors = {name: files.whole(name, entries) for name, entries in saved.entries.items()}
        files.finish()
    return tensors


class _Files(SummedReaders):
    """The files of the rest."""

    def __init__(self, folder: Path, saved: SavedRest) -> None:
        super().__init__()
        self._folder = folder
        try:
            for file in saved.files:
                self._readers.append(SummedReader(folder / file.path, file.sums))
        except BaseException:
            self.close()
            raise

    def _section(self, entry: SavedEntry) -> StoredTensor:
        reader = self._readers[entry.file]
        if entry.tensor not in reader.tensors:
            raise DamagedFileError(
                f"{reader.path}: the file lacks {entry.tensor!r}", path=reader.path
            )
        return reader.tensors[entry.tensor]

    def _read(self, entry: SavedEntry) -> Tensor:
        reader, section = self._readers[entry.file], self._section(entry)
        out = torch.empty(section.shape, dtype=section.dtype)
        if out.numel() > 0:
            reader.read(entry.tensor, 0, out if out.dim() > 0 else out.reshape(1))
        return out

    def shape(self, entries: Sequence[SavedEntry]) -> tuple[torch.dtype, tuple[int, ...]]:
        """What a whole tensor is like."""
        section = self._section(entries[0])
        return section.dtype, tuple(entries[0].sizes) or section.shape

    def whole(self, name: str, entries: Iterable[SavedEntry]) -> Tensor:
        """A tensor that may have been saved in pieces."""
        entries = list(entries)
        if not entries[0].offsets:
            return self._read(entries[0])
        sizes = tuple(entries[0].sizes)
        self._check_size(name, entries, sizes)
        return self.piece(name, entries, (0,) * len(sizes), sizes, sizes)

    def _check_size(self, name: str, entries: list[SavedEntry], sizes: tuple[int, ...]) -> None:
        """Raises DamagedFileError where the pieces cannot be all of a tensor: it may be huge."""
        readers = [(self._readers[entry.file], entry.tensor) for entry in entries]
        found = sum(
            math.prod(reader.tensors[tensor].shape)
            for reader, tensor in readers
            if tensor in reader.tensors
        )
        if math.prod(sizes) > found:
            raise DamagedFileError(
                f"{self._folder}: of entry {name!r}, {found} elements of {sizes} were saved",
                path=self._folder,
            )

    def piece(
        self,
        name: str,
        entries: Iterable[SavedEntry],
        offsets: tuple[int, ...],
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> Tensor:
        """A piece of a tensor, from whatever pieces it was saved in."""
        entries = list(entries)
        out: Tensor | None = None
        # pieces may cover each other, so that their sizes do not tell whether all is there
        given = torch.zeros(shape if len(entries) > 1 else 0, dtype=torch.bool)
        found = 0
        for entry in entries:
            saved = self._section(entry)
            begin = tuple(entry.offsets) or (0,) * len(sizes)
            saved_sizes = tuple(entry.sizes) or saved.shape
            if len(saved.shape) != len(saved_sizes):
                raise DamagedFileError(
                    f"{self._folder}: entry {name!r} has a piece of shape {saved.shape} of a "
                    f"tensor of sizes {saved_sizes}",
                    path=self._folder,
                )
            if saved_sizes != sizes:
                raise ValueError(
                    f"checkpoint.load: entry {name!r} was saved with shape {saved_sizes}, but the "
                    f"model's has {sizes}"
                )
            if out is None:
                out = torch.empty(shape, dtype=saved.dtype)
            low = [max(a, b) for a, b in zip(offsets, begin, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(offsets, shape, begin, saved.shape, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            values = self._read(entry)
            target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
            out[target] = values[source]
            found = values[source].numel()
            if len(entries) > 1:
                given[target] = True
        found = int(given.sum()) if len(entries) > 1 else found
        if out is None or found < out.numel():
            raise DamagedFileError(
                f"{self._folder}: of entry {name!r}, {found} elements of {shape} were saved",
                path=self._folder,
            )
        return out


__all__ = ["DenseLoad", "dense_shapes", "read_all", "read_dense", "read_state"]
