"""The state of a program in a batch: what it gives as ``state=``, to resume with."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from torch_dynemb.changes.batch import STATE as KIND
from torch_dynemb.changes.batch import Pieces, as_tensor
from torch_dynemb.changes.payloads import check_size, of_tensors, tensors_of
from torch_dynemb.checkpoint.file_names import STATE
from torch_dynemb.checkpoint.saving.dense_state import filled, state_source
from torch_dynemb.files.bounded_json import parsed
from torch_dynemb.files.tensor_file import raw

_VALUES = "values"  # names of tensors begin with "state"


def of_state(state: Any, rank: int) -> Pieces:
    """Make a record of copies of a program's state. Only that of the first rank has content.

    Args:
        state: as in :func:`torch_dynemb.checkpoint.save`.
        rank: rank of this process.

    Raises:
        TypeError: it contains something else, or a tensor that ranks share.
    """
    source = state_source(STATE, state, rank)
    shared = sorted({piece.name for piece in source.pieces if piece.sizes})
    if shared:
        raise TypeError(
            f"DeltaLog: {shared} are ShardedTensors or DTensors, but a commit has the state of the "
            "first rank: give whole tensors"
        )
    tensors = {
        piece.name: piece.values.to("cpu", copy=True).contiguous() for piece in source.pieces
    }
    text = json.dumps(source.values, separators=(",", ":"), allow_nan=False).encode()
    check_size(len(text))
    return Pieces.of(KIND, 0, of_tensors({**tensors, _VALUES: as_tensor(text)}))


def state_of(payload: Tensor) -> Any:
    """Decode the record of the first rank.

    Args:
        payload: uint8 [n].

    Raises:
        ValueError: it is not such a record.
    """
    tensors = {name: values.clone() for name, values in tensors_of(payload).items()}
    try:
        text = tensors[_VALUES]
        return filled(parsed(bytes(raw(text))), tensors)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"the state of the program cannot be rebuilt: {error!r}") from error


__all__ = ["of_state", "state_of"]
