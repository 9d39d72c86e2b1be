"""Key types: dtypes of ids, and their conversion to the int64 ids of tables."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer

KEY_TYPES = (torch.int64, torch.int32, torch.uint64, torch.uint32)


def key_type_of(owner: str, key_type: object) -> torch.dtype:
    """Check that ``key_type`` is one of ``KEY_TYPES`` and return it.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(key_type, torch.dtype) or key_type not in KEY_TYPES:
        raise TypeError(f"{owner} is {described(key_type)}, expected one of {list(KEY_TYPES)}")
    return key_type


def ids_of(owner: str, keys: object, key_type: torch.dtype) -> Tensor:
    """Convert keys to ids: 64-bit keys keep their bits, others their value.

    Args:
        owner: prefix of error messages.
        keys: of any shape.
        key_type: dtype that keys must have.

    Returns:
        int64, contiguous, of the same shape.

    Raises:
        TypeError: keys are not a tensor, or have another dtype.
    """
    if not isinstance(keys, Tensor) or keys.layout != torch.strided or keys.dtype != key_type:
        raise TypeError(f"{owner} is {described(keys)}, expected a dense tensor of {key_type}")
    keys = keys.contiguous()
    return keys.view(torch.int64) if key_type == torch.uint64 else keys.to(torch.int64)


def keys_of(owner: str, ids: Tensor, key_type: torch.dtype) -> Tensor:
    """Convert ids back to keys.

    Args:
        owner: prefix of error messages.
        ids: int64 of any shape.
        key_type: of the keys.

    Returns:
        A tensor of ``key_type`` of the same shape.

    Raises:
        ValueError: an id is out of range for this key type.
    """
    if key_type.itemsize == 8:
        return ids.contiguous().view(key_type)
    bounds = torch.iinfo(key_type)
    outside = ids[(ids < bounds.min) | (ids > bounds.max)]
    if outside.numel() > 0:
        raise ValueError(
            f"{owner} is {key_type}, but some ids are out of its range, such as {int(outside[0])}: "
            "give the key type of the snapshot's embedding"
        )
    return ids.to(key_type)


def id_of(owner: str, key: object, key_type: torch.dtype) -> int:
    """Convert one key to its id.

    Raises:
        TypeError: it is not an int.
        ValueError: it is out of range for this key type.
    """
    bounds = torch.iinfo(key_type)
    value = integer(owner, key, least=bounds.min, most=bounds.max)
    return value - (1 << 64) if value >= 1 << 63 else value


__all__ = ["KEY_TYPES", "id_of", "ids_of", "key_type_of", "keys_of"]
