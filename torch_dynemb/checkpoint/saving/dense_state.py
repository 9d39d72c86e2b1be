"""Dense state of a model, and what a program gives as ``state=``.

Tensors of the first rank are saved, except ShardedTensors and DTensors: each rank saves its own
shards of these. Other values must be JSON values: nothing is pickled.
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
from torch_dynemb.checkpoint.file_names import dense_file
from torch_dynemb.checkpoint.manifest.records import SavedEntry
from torch_dynemb.checkpoint.saving.table_files import Folder, Section
from torch_dynemb.distributed.dtensors import is_dtensor
from torch_dynemb.files.tensor_file import TensorShape
from torch_dynemb.nn.wrappers import plain_names
from torch_dynemb.parts.saved_tables import SavedFile
from torch_dynemb.table.dense_state import dense_only

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TENSOR, _LIST, _DICT, _TUPLE = "tensor", "list", "dict", "tuple"


class Piece(NamedTuple):
    """A tensor, or a rank's part of one.

    Attributes:
        name: name of the whole tensor.
        values: values of the piece.
        offsets, sizes: place of the piece, and sizes of the whole tensor; empty for a whole tensor.
    """

    name: str
    values: Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class DenseSource(NamedTuple):
    """Dense tensors and values that a rank saves.

    Attributes:
        kind: kind of its file.
        pieces: its tensors.
        values: other values as JSON, on the first rank.
    """

    kind: str
    pieces: list[Piece]
    values: Any


def dense_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model without its tables, by names without wrappers."""
    with dense_only():
        state = model.state_dict()
    return {plain: state[name] for plain, name in plain_names(model, state).items()}


def load_dense_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load entries of the dense state; others stay.

    Args:
        model: the model.
        state: values by names as :func:`dense_state` gives.
    """
    with dense_only():
        names = plain_names(model, model.state_dict())
        own = {names[name]: value for name, value in state.items()}
        model.load_state_dict(own, strict=False)


def dense_source(kind: str, model: nn.Module, rank: int) -> DenseSource:
    """Collect the dense state of a model.

    Args:
        kind: kind of its file.
        model: the model.
        rank: rank of this process.

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
    return DenseSource(kind, pieces, values if rank == 0 else None)


def state_source(kind: str, state: Any, rank: int) -> DenseSource:
    """Collect what a program gives as ``state=``. Only that of the first rank is saved.

    Args:
        kind: kind of its file.
        state: nested dicts with text or int keys, lists and tuples of tensors and JSON values.
        rank: rank of this process.

    Raises:
        TypeError: it contains something else.
    """
    tensors: dict[str, Tensor] = {}
    values = _skeleton("state", state, tensors)
    pieces = [piece for name, tensor in tensors.items() for piece in _pieces_of(name, tensor, rank)]
    return DenseSource(kind, pieces, values if rank == 0 else None)


def _pieces_of(name: str, value: Tensor, rank: int) -> list[Piece]:
    """List what this rank saves of an entry."""
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
    """Return whether another rank saves it: the first of the ranks with the same shard."""
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


def write_dense(folder: Folder, source: DenseSource) -> tuple[SavedFile | None, dict[str, Any]]:
    """Write the pieces of this rank.

    Returns:
        Its file, or None without tensors, and the entries of the manifest by name, with file number
        0.
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


# -- values other than tensors --------------------------------------------------------------------


def plain(owner: str, value: Any) -> Any:
    """Check that a value is a JSON value. Return it.

    Raises:
        TypeError: JSON cannot represent it, or changes it.
    """
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"{owner} is {described(value)}, expected a tensor or a JSON value: nothing is pickled"
    )


def _skeleton(path: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the nesting of a value, with names in place of its tensors."""
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
    """Rebuild the value of a skeleton."""
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
    """Iterate over the values of an entry on this rank: tensor, offsets in the whole, whole
    sizes.
    """
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            begin, sizes = shard.metadata.shard_offsets, value.metadata().size
            yield shard.tensor.detach(), tuple(begin), tuple(sizes)
    elif is_dtensor(value):
        # imported here, because it takes long and only DTensors need it
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local: Any = value.to_local()
        if _holds_shards(local):
            # a rank without shards has an offset nevertheless
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
    """Return whether the local tensor of a DTensor is TorchRec's LocalShardsWrapper.

    It has several shards and their places, which placements of the DTensor do not give.
    """
    return hasattr(local, "local_shards")


def is_sharded(value: Any) -> bool:
    """Return whether ranks have different parts of it."""
    return isinstance(value, ShardedTensor) or is_dtensor(value)


__all__ = [
    "DenseSource",
    "Piece",
    "dense_source",
    "dense_state",
    "filled",
    "is_sharded",
    "load_dense_state",
    "plain",
    "state_source",
    "tensor_pieces",
    "write_dense",
]
