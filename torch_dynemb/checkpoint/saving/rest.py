"""What a checkpoint has beside tables: the dense part of the model, and what the program gives.

Tensors are those of the first rank, except ShardedTensors and DTensors, of which every rank saves
its own shards. Other values must be such as JSON has: nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from torch_dynemb.argument_checks import described
from torch_dynemb.checkpoint.entries import dense_file
from torch_dynemb.checkpoint.files.tensor_file import TensorShape
from torch_dynemb.checkpoint.manifest.records import SavedEntry, SavedFile
from torch_dynemb.checkpoint.saving.table_files import Folder, Section
from torch_dynemb.distributed.dtensors import is_dtensor
from torch_dynemb.table.dense_state import dense_only

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TENSOR, _LIST, _DICT, _TUPLE = "tensor", "list", "dict", "tuple"


class Piece(NamedTuple):
    """A tensor, or the part of one that a rank has.

    Attributes:
        name: of the whole tensor.
        values: of the piece.
        offsets, sizes: where it lies; empty: it is the whole tensor.
    """

    name: str
    values: Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class RestSource(NamedTuple):
    """What a rank saves of the rest.

    Attributes:
        kind: of its file.
        pieces: its tensors.
        values: what else there is, as JSON: on the first rank.
    """

    kind: str
    pieces: list[Piece]
    values: Any


def dense_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model without its tables."""
    with dense_only():
        return dict(model.state_dict())


def dense_source(kind: str, model: nn.Module, rank: int) -> RestSource:
    """The dense part of a model.

    Args:
        kind: of its file.
        model: the model.
        rank: of this process.

    Raises:
        TypeError: an entry of the state dict cannot be saved.
    """
    pieces: list[Piece] = []
    values: dict[str, Any] = {}
    for name, value in dense_state(model).items():
        if isinstance(value, Tensor):
            pieces += _pieces_of(name, value, rank)
        else:
            values[name] = plain(f"checkpoint: entry {name!r} of the model's state dict", value)
    return RestSource(kind, pieces, values if rank == 0 else None)


def state_source(kind: str, state: Any, rank: int) -> RestSource:
    """What a program gives to save with the model: of the first rank.

    Args:
        kind: of its file.
        state: nested dicts with keys of text or numbers, lists and tuples of tensors and JSON
            values.
        rank: of this process.

    Raises:
        TypeError: something else is in it.
    """
    tensors: dict[str, Tensor] = {}
    values = _skeleton("state", state, tensors)
    pieces = [piece for name, tensor in tensors.items() for piece in _pieces_of(name, tensor, rank)]
    return RestSource(kind, pieces, values if rank == 0 else None)


def _pieces_of(name: str, value: Tensor, rank: int) -> list[Piece]:
    """What this rank saves of an entry."""
    if isinstance(value, ShardedTensor):
        return [
            Piece(
                name,
                shard.tensor.detach(),
                tuple(shard.metadata.shard_offsets),
                tuple(value.metadata().size),
            )
            for shard in value.local_shards()
        ]
    if is_dtensor(value):
        if not _holds_shards(value.to_local()) and _is_replica(value):
            return []
        return [
            Piece(name, tensor, offsets, sizes)
            for tensor, offsets, sizes in tensor_pieces(value)
            if tensor.numel() > 0
        ]
    if value.is_meta or value.layout != torch.strided:
        what = "on the meta device" if value.is_meta else f"of layout {value.layout}"
        raise TypeError(f"checkpoint: {name!r} is {what}, expected a dense tensor with values")
    return [Piece(name, value.detach(), (), ())] if rank == 0 else []


def _is_replica(value: DTensor) -> bool:
    """Whether another rank, the first of those that have the same, saves it."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return True
    for placement, place in zip(value.placements, coordinate, strict=True):
        if placement.is_partial():
            raise TypeError(
                f"checkpoint: a DTensor has placements {value.placements}, expected shards or "
                "replicas: redistribute it"
            )
        if placement.is_replicate() and place > 0:
            return True
    return False


def write_rest(folder: Folder, source: RestSource) -> tuple[SavedFile | None, dict[str, Any]]:
    """Writes what this rank has.

    Returns:
        Its file, None where there are no tensors, and the entries of the manifest by name: their
        number of the file is 0.
    """
    if not source.pieces:
        return None, {}
    sections = []
    entries: dict[str, list[SavedEntry]] = {}
    for number, piece in enumerate(source.pieces):
        tensor = f"{piece.name}#{number}" if piece.offsets else piece.name
        values = piece.values
        shape = TensorShape(tensor, values.dtype, tuple(values.shape))
        sections.append(Section(shape, lambda _, values=values: iter([values.cpu().contiguous()])))  # type: ignore[misc]
        entry = SavedEntry(0, tensor, list(piece.offsets), list(piece.sizes))
        entries.setdefault(piece.name, []).append(entry)
    file = folder.write(dense_file(source.kind, folder.rank, folder.ranks), sections, 0)
    return file, entries


# -- values that are no tensors ------------------------------------------------------------------


def plain(owner: str, value: Any) -> Any:
    """A value as JSON has it.

    Raises:
        TypeError: JSON has no such values, or gives others back.
    """
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"{owner} is {described(value)}, expected a tensor, or what JSON has: nothing is pickled"
    )


def _skeleton(path: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """The nesting of a value, with names where its tensors are."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        items = []
        for key, of in value.items():
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(
                    f"checkpoint: {path} has the key {key!r}, expected keys of type str or int"
                )
            items.append([key, _skeleton(f"{path}.{key}", of, tensors)])
        return {_DICT: items}
    if isinstance(value, list | tuple):
        kind = _LIST if isinstance(value, list) else _TUPLE
        return {kind: [_skeleton(f"{path}.{i}", of, tensors) for i, of in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(
        f"checkpoint: {path} is {described(value)}, expected a tensor, a number, a text, None, or "
        "dicts, lists and tuples of them: nothing is pickled"
    )


def filled(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that a skeleton is of."""
    ((kind, value),) = skeleton.items()
    if kind == _TENSOR:
        return tensors[value]
    if kind == _DICT:
        return {key: filled(of, tensors) for key, of in value}
    if kind in (_LIST, _TUPLE):
        items = [filled(of, tensors) for of in value]
        return items if kind == _LIST else tuple(items)
    return float(value) if kind == "float" else value


def tensor_pieces(value: Any) -> Iterator[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]:
    """Where the values of an entry lie on this rank: tensor, offsets in the whole, whole sizes."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            begin, sizes = shard.metadata.shard_offsets, value.metadata().size
            yield shard.tensor.detach(), tuple(begin), tuple(sizes)
    elif is_dtensor(value):
        # not at the top: it takes long, and who has no DTensors need not wait for it
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local: Any = value.to_local()
        if _holds_shards(local):
            # without any, there is an offset nevertheless
            for tensor, begin in zip(local.local_shards(), local.local_offsets(), strict=False):
                yield tensor.detach(), tuple(begin), tuple(value.shape)
            return
        _, offsets = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        yield local.detach(), tuple(offsets), tuple(value.shape)
    else:
        yield value, (0,) * value.dim(), tuple(value.shape)


def _holds_shards(local: Any) -> bool:
    """Whether the local tensor of a DTensor is TorchRec's LocalShardsWrapper.

    It has several shards, and knows where they lie; placements of the DTensor do not say it.
    """
    return hasattr(local, "local_shards")


def is_sharded(value: Any) -> bool:
    """Whether ranks have different parts of it."""
    return isinstance(value, ShardedTensor) or is_dtensor(value)


__all__ = [
    "Piece",
    "RestSource",
    "dense_source",
    "dense_state",
    "filled",
    "is_sharded",
    "plain",
    "state_source",
    "tensor_pieces",
    "write_rest",
]
