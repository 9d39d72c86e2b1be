"""Key types: which dtypes ids may have, and the int64 ids that tables know them by."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer

KEY_TYPES = (torch.int64, torch.int32, torch.uint64, torch.uint32)


def key_type_of(owner: str, key_type: object) -> torch.dtype:
    """``key_type``, which must be one of ``KEY_TYPES``.

    Raises:
        TypeError: it is another.
    """
    if not isinstance(key_type, torch.dtype) or key_type not in KEY_TYPES:
        raise TypeError(f"{owner} is {described(key_type)}, expected one of {list(KEY_TYPES)}")
    return key_type


def ids_of(owner: str, keys: object, key_type: torch.dtype) -> Tensor:
    """The ids of keys: those of 64 bits keep their bits, others their value.

    Args:
        owner: prefix of error messages.
        keys: of any shape.
        key_type: that they must have.

    Returns:
        int64, contiguous, of the same shape.

    Raises:
        TypeError: they are not a tensor, or of another dtype.
    """
    if not isinstance(keys, Tensor) or keys.layout != torch.strided or keys.dtype != key_type:
        raise TypeError(f"{owner} is {described(keys)}, expected a dense tensor of {key_type}")
    keys = keys.contiguous()
    return keys.view(torch.int64) if key_type == torch.uint64 else keys.to(torch.int64)


def keys_of(owner: str, ids: Tensor, key_type: torch.dtype) -> Tensor:
    """The keys of ids, the other way round.

    Args:
        owner: prefix of error messages.
        ids: int64 of any shape.
        key_type: of the keys.

    Returns:
        A tensor of ``key_type`` of the same shape.

    Raises:
        ValueError: an id is no key of this type.
    """
    if key_type.itemsize == 8:
        return ids.contiguous().view(key_type)
    bounds = torch.iinfo(key_type)
    outside = ids[(ids < bounds.min) | (ids > bounds.max)]
    if outside.numel() > 0:
        raise ValueError(
            f"{owner} is {key_type}, but there are ids outside of it, such as {int(outside[0])}: "
            "give the key type with which they were written"
        )
    return ids.to(key_type)


def id_of(owner: str, key: object, key_type: torch.dtype) -> int:
    """The id of one key.

    Raises:
        TypeError: it is not an int.
        ValueError: it is no key of this type.
    """
    bounds = torch.iinfo(key_type)
    value = integer(owner, key, least=bounds.min, most=bounds.max)
    return value - (1 << 64) if value >= 1 << 63 else value


__all__ = ["KEY_TYPES", "id_of", "ids_of", "key_type_of", "keys_of"]
