"""Rows of a GPU as records (``csrc/core/storage/record.h``), and back, by ops of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.files.tensor_file import rows_as_bytes
from torch_dynemb.ops.tiers import RECORD_HEADER


def packed_rows(tensors: Sequence[Tensor], numbers: Tensor) -> Tensor:
    """Copy rows into records with headers of zeros, uint8 [n, bytes].

    Args:
        tensors: weights, then optimizer state: [rows] or [rows, columns] each.
        numbers: int64 [n], of the rows.
    """
    fields = [rows_as_bytes(tensor[numbers]) for tensor in tensors]
    row_bytes = sum(field.shape[1] for field in fields)
    records = numbers.new_zeros(len(numbers), ops.record_bytes(row_bytes), dtype=torch.uint8)
    records[:, RECORD_HEADER : RECORD_HEADER + row_bytes] = torch.cat(fields, 1)
    return records


def unpack_rows(tensors: Sequence[Tensor], numbers: Tensor, records: Tensor) -> None:
    """Copy records into rows; their headers are not read.

    Args:
        tensors: as for :func:`packed_rows`.
        numbers: int64 [n], of the rows, distinct.
        records: uint8 [n, bytes].
    """
    begin = RECORD_HEADER
    for tensor in tensors:
        end = begin + tensor[:1].numel() * tensor.element_size()
        # a copy, because a field of a record may be unaligned
        values = records.new_empty(len(records), end - begin).copy_(records[:, begin:end])
        tensor.index_copy_(0, numbers, values.view(tensor.dtype).reshape(-1, *tensor.shape[1:]))
        begin = end


__all__ = ["packed_rows", "unpack_rows"]
