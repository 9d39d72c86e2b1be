"""Loading of the dense state and of ``state=`` from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dynemb.checkpoint.file_names import MANIFEST
from torch_dynemb.checkpoint.manifest.records import SavedDense, SavedEntry
from torch_dynemb.checkpoint.saving.dense_state import (
    dense_state,
    filled,
    is_sharded,
    load_dense_state,
    tensor_pieces,
)
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.checksummed_files import ChecksummedReader, ChecksummedReaders
from torch_dynemb.files.locations import Location
from torch_dynemb.files.tensor_file import StoredTensor
from torch_dynemb.process.interrupts import defer_signals


class DenseLoad(NamedTuple):
    """Dense state that was read, before the model takes it.

    Attributes:
        state: argument of ``load_state_dict``; shards are those of the model.
        shards: shards of the model, and their new values.
    """

    state: dict[str, Any]
    shards: list[tuple[Tensor, Tensor]]

    def with_later(self, model: nn.Module, later: Mapping[str, Tensor]) -> DenseLoad:
        """Return it with later values of some tensors.

        Args:
            model: model that will take it.
            later: whole tensors by name.

        Raises:
            ValueError: the model lacks a tensor, or has another shape for it.
        """
        own = dense_state(model)
        for name, values in later.items():
            mine = own.get(name)
            if not isinstance(mine, Tensor) or is_sharded(mine) or mine.shape != values.shape:
                has = tuple(mine.shape) if isinstance(mine, Tensor) else None
                raise ValueError(
                    f"delta_log.resume: dense tensor {name!r} has shape {tuple(values.shape)} in "
                    f"the log and {has} in the model: resume with the model that was published"
                )
        return self._replace(state={**self.state, **later})

    def apply(self, model: nn.Module) -> None:
        """Load it into the model, while signals are deferred.

        Raises:
            RuntimeError: the model rejects it, and is unchanged.
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
    load_dense_state(model, state)


def read_dense(folder: Location, saved: SavedDense, model: nn.Module, *, strict: bool) -> DenseLoad:
    """Read the dense state for a model.

    Args:
        folder: folder of the checkpoint.
        saved: the saved dense state.
        model: model that will take it.
        strict: whether the names must be those of the model.

    Raises:
        ValueError: names or shapes differ from the model's.
        DamagedFileError: a file is damaged.
    """
    own = dense_state(model)
    values: Mapping[str, Any] = saved.values or {}
    names = {*saved.entries, *values}
    if strict and names != own.keys():
        missing, unexpected = sorted(own.keys() - names), sorted(names - own.keys())
        raise ValueError(
            f"checkpoint.load: the checkpoint lacks {missing or 'nothing'}, and has "
            f"{unexpected or 'nothing'} that the model lacks: give strict=False to load what "
            "both have"
        )
    for name in names & own.keys():
        if (name in saved.entries) != isinstance(own[name], Tensor):
            raise ValueError(
                f"checkpoint.load: entry {name!r} is a tensor in only one of the model "
                "and the checkpoint: load it into the model that "
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


def read_all(folder: Location, saved: SavedDense) -> dict[str, Any]:
    """Read the dense state of any model, as whole CPU tensors.

    Raises:
        DamagedFileError: a file is damaged.
    """
    return {**_tensors(folder, saved), **(saved.values or {})}


def dense_shapes(
    folder: Location, saved: SavedDense
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtypes and shapes of the whole dense tensors. Only headers are read.

    Raises:
        DamagedFileError: a file is damaged.
    """
    with _Files(folder, saved) as files:
        files.finish()  # the blocks with the headers
        return {name: files.shape(entries) for name, entries in saved.entries.items()}


def read_state(folder: Location, saved: SavedDense) -> Any:
    """Read the ``state`` that the program gave to ``save``.

    Raises:
        DamagedFileError: a file is damaged.
    """
    tensors = _tensors(folder, saved)
    try:
        return None if saved.values is None else filled(saved.values, tensors)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"{folder / MANIFEST}: the state given to save cannot be rebuilt: {error!r}",
            path=folder / MANIFEST,
        ) from error


def _tensors(folder: Location, saved: SavedDense) -> dict[str, Tensor]:
    """Read all tensors by name."""
    with _Files(folder, saved) as files:
        tensors = {name: files.whole(name, entries) for name, entries in saved.entries.items()}
        files.finish()
    return tensors


class _Files(ChecksummedReaders):
    """Files of the dense state."""

    def __init__(self, folder: Location, saved: SavedDense) -> None:
        super().__init__()
        self._folder = folder
        try:
            for file in saved.files:
                self._readers.append(ChecksummedReader(folder / file.path, file.sums))
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
        out = torch.empty(section.shape, dtype=section.dtype, device="cpu")
        if out.numel() > 0:
            reader.read(entry.tensor, 0, out if out.dim() > 0 else out.reshape(1))
        return out

    def shape(self, entries: Sequence[SavedEntry]) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a whole tensor."""
        section = self._section(entries[0])
        return section.dtype, tuple(entries[0].sizes) or section.shape

    def whole(self, name: str, entries: Iterable[SavedEntry]) -> Tensor:
        """Read a tensor that may have been saved in pieces."""
        entries = list(entries)
        if not entries[0].offsets:
            return self._read(entries[0])
        sizes = tuple(entries[0].sizes)
        self._check_size(name, entries, sizes)
        return self.piece(name, entries, (0,) * len(sizes), sizes, sizes)

    def _check_size(self, name: str, entries: list[SavedEntry], sizes: tuple[int, ...]) -> None:
        """Raise DamagedFileError if the saved pieces are too few for a tensor of a huge claimed
        size.
        """
        readers = [(self._readers[entry.file], entry.tensor) for entry in entries]
        found = sum(
            math.prod(reader.tensors[tensor].shape)
            for reader, tensor in readers
            if tensor in reader.tensors
        )
        if math.prod(sizes) > found:
            raise DamagedFileError(
                f"{self._folder}: entry {name!r} has {found} saved elements, too few for {sizes}",
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
        """Read a piece of a tensor from saved pieces of any shape."""
        entries = list(entries)
        out: Tensor | None = None
        # pieces may overlap, so the sum of their sizes does not prove that all elements are there
        given = torch.zeros(shape if len(entries) > 1 else 0, dtype=torch.bool, device="cpu")
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
                out = torch.empty(shape, dtype=saved.dtype, device="cpu")
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
                f"{self._folder}: entry {name!r} has {found} saved elements, too few for {shape}",
                path=self._folder,
            )
        return out


__all__ = ["DenseLoad", "dense_shapes", "read_all", "read_dense", "read_state"]
