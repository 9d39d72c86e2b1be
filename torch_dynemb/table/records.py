"""Rows as records of a store, and back (``csrc/core/storage/record.h``).

A record, see :class:`torch_dynemb.storage.tiers.RecordStore`::

    header, 24 bytes | weights | state 1 | state 2 ... | zeros to a multiple of 8 bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torch_dynemb.files.tensor_file import rows_as_bytes
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.table.group_config import GroupConfig

HEADER_BYTES = 24
_ALIGNMENT = 8


def record_bytes(config: GroupConfig, slab: int) -> int:
    """Return the bytes of a record.

    Args:
        config: of the group.
        slab: of the rows.
    """
    *_, (_, _, end) = _fields(config, slab)
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def packed(config: GroupConfig, slab: int, weights: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Pack rows into records with headers of zeros, uint8 [n, bytes].

    Args:
        config: of the group.
        slab: of the rows.
        weights: [n, dim], of the dtype of the slab.
        state: all optimizer state by name, [n, columns].
    """
    count = weights.shape[0]
    records = weights.new_zeros(count, record_bytes(config, slab), dtype=torch.uint8)
    tensors = [weights, *(state[tensor.name] for tensor in _state(config))]
    for values, (dtype, begin, end) in zip(tensors, _fields(config, slab), strict=True):
        assert values.shape == (count, (end - begin) // dtype.itemsize)
        records[:, begin:end] = rows_as_bytes(values)
    return records


def weights_of(config: GroupConfig, slab: int, records: Tensor) -> Tensor:
    """Copy the weights of records, [n, dim].

    Args:
        config: of the group.
        slab: of the rows.
        records: uint8 [n, bytes].
    """
    return _values(records, next(_fields(config, slab)))


def state_of(config: GroupConfig, slab: int, records: Tensor) -> dict[str, Tensor]:
    """Copy the optimizer state of records by name, [n, columns].

    Args:
        config, slab, records: as for :func:`weights_of`.
    """
    _, *fields = _fields(config, slab)
    return {
        tensor.name: _values(records, field)
        for tensor, field in zip(_state(config), fields, strict=True)
    }


def _values(records: Tensor, field: tuple[torch.dtype, int, int]) -> Tensor:
    """Copy a field of records as [n, columns]."""
    dtype, begin, end = field
    # a copy, because a field of a record may be unaligned
    values = records.new_empty(records.shape[0], end - begin).copy_(records[:, begin:end])
    return values.view(dtype)


def _state(config: GroupConfig) -> tuple[StateTensor, ...]:
    return () if config.optimizer is None else tuple(config.optimizer.state)


def _fields(config: GroupConfig, slab: int) -> Iterator[tuple[torch.dtype, int, int]]:
    """Yield dtype, begin and end of the bytes of weights, then of each tensor of state."""
    of = config.slabs[slab]
    end = HEADER_BYTES + of.dim * of.dtype.itemsize
    yield of.dtype, HEADER_BYTES, end
    for tensor in _state(config):
        begin, end = end, end + tensor.row_bytes(of.dim)
        yield tensor.dtype, begin, end


__all__ = ["HEADER_BYTES", "packed", "record_bytes", "state_of", "weights_of"]
