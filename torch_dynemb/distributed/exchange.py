"""Exchange of rows between ranks: to the ranks that own them, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from torch_dynemb import ops
from torch_dynemb.distributed.ranks import RankGroup, process_group_of
from torch_dynemb.files.tensor_file import as_bytes, rows_as_bytes

# Page faults of a fresh tensor of this size cost more than writing it.
_HUGE_PAGES_FROM = 16 << 20

# -- rows, by collectives ----------------------------------------------------------------------


def all_to_all(
    rows: Tensor, received: Sequence[int], sent: Sequence[int], ranks: RankGroup
) -> Tensor:
    """Send ``sent[r]`` rows to rank r; the result arrives later: :func:`arrived` waits for it.

    Differentiable and compilable.

    Args:
        rows: [sum of sent, ...], in the order of ranks.
        received: rows that come from each rank.

    Returns:
        [sum of received, ...], in the order of ranks.
    """
    name: Any = ranks.name
    return collectives.all_to_all_single_autograd(rows, list(received), list(sent), name)


def arrived(rows: Tensor) -> Tensor:
    """Wait for the result of :func:`all_to_all` and return it."""
    if isinstance(rows, collectives.AsyncCollectiveTensor):
        return rows.wait()
    return rows


def one_to_each(rows: Tensor, ranks: RankGroup) -> Tensor:
    """Send row r to rank r; wait for and return [ranks, ...], as ``rows`` is."""
    equal = [1] * ranks.size
    return arrived(all_to_all(rows, equal, equal, ranks))


def move_rows(
    rows: Tensor, received: Sequence[int], sent: Sequence[int], ranks: RankGroup
) -> Tensor:
    """Send rows as :func:`start_rows` does, and wait for those of other ranks.

    Returns:
        [sum of received, ...], of the dtype of the rows; the rows themselves on a single rank.
    """
    process_group = process_group_of(ranks)
    if process_group is None:
        return rows.detach()
    return start_rows(rows, received, sent, process_group).wait()


def from_rank(
    tensor: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    source: int,
    process_group: dist.ProcessGroup,
    *,
    to_all: bool,
) -> Tensor | None:
    """Send a tensor of one rank to all, or to the first; all ranks call it.

    Args:
        tensor: on the rank that sends; None on the others.
        shape, dtype: of the tensor, on all ranks.
        device: on which it arrives.
        source: rank that sends.
        to_all: False: only the first rank gets it.

    Returns:
        The tensor; None on ranks that do not get it.
    """
    rank = process_group.rank()
    if not to_all and rank not in (0, source):
        return None
    if not to_all and rank == source == 0:
        return tensor
    if tensor is None:
        tensor = torch.empty(list(shape), dtype=dtype, device=device)
    tensor = tensor.detach().contiguous()
    if tensor.numel() == 0:
        return tensor if to_all or rank == 0 else None
    sent = as_bytes(tensor)
    if to_all:
        dist.broadcast(sent, group=process_group, group_src=source)
        return tensor
    if rank == source:
        dist.send(sent, group=process_group, group_dst=0)
        return None
    dist.recv(sent, group=process_group, group_src=source)
    return tensor


# -- rows, from rank to rank -------------------------------------------------------------------


def is_gloo(process_group: dist.ProcessGroup) -> bool:
    """Return whether ranks of the group exchange tensors by :func:`start_exchange`."""
    several = process_group.size() > 1 and not torch.compiler.is_compiling()
    return several and dist.get_backend(process_group) == "gloo"


def room_for(like: Tensor, size: Sequence[int]) -> Tensor:
    """Allocate a tensor to receive into, in huge pages if it is large.

    Args:
        like: of the same dtype and device.
        size: of the tensor.
    """
    if like.device.type == "cpu" and math.prod(size) * like.element_size() >= _HUGE_PAGES_FROM:
        return ops.reserve(size, like.dtype, huge_pages=True)
    return like.new_empty(size)


def start_exchange(
    sent: Sequence[Tensor], received: Sequence[Tensor], process_group: dist.ProcessGroup
) -> list[dist.Work]:
    """Send a tensor to every other rank and receive one from each.

    Over gloo, this takes less time than its collectives.

    Args:
        sent, received: by rank; those of this rank are left alone.

    Returns:
        Works to wait for.
    """
    others = [rank for rank in range(process_group.size()) if rank != process_group.rank()]
    works = [dist.irecv(received[rank], group=process_group, group_src=rank) for rank in others]
    works += [dist.isend(sent[rank], group=process_group, group_dst=rank) for rank in others]
    return [work for work in works if work is not None]


class RowsUnderWay(NamedTuple):
    """Result of :func:`start_rows`.

    Attributes:
        rows: [sum of received, ...], complete as soon as ``works`` are done.
        works: to wait for.
    """

    rows: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Wait for all rows and return them."""
        for work in self.works:
            work.wait()
        return self.rows


def start_rows(
    rows: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    process_group: dist.ProcessGroup,
) -> RowsUnderWay:
    """Send ``sent[r]`` rows to rank r by the group's all-to-all; no gradient flows back.

    Over gloo and for few rows it takes half the time of :func:`start_exchange`: there, gloo's
    thread polls while sender and receiver announce that they are ready.

    Args:
        rows: [sum of sent, ...], of any dtype, in the order of ranks.
        received: rows that come from each rank.

    Returns:
        [sum of received, ...], of the dtype of the rows, to wait for.
    """
    rows = rows.detach().contiguous()
    arriving = room_for(rows, (sum(received), *rows.shape[1:]))
    work = dist.all_to_all_single(
        _carried(arriving),
        _carried(rows),
        list(received),
        list(sent),
        group=process_group,
        async_op=True,
    )
    return RowsUnderWay(arriving, [] if work is None else [work])


def _carried(rows: Tensor) -> Tensor:
    """View contiguous rows as a dtype that gloo carries, [n, ...]."""
    if rows.dtype == torch.float32:
        return rows
    return rows_as_bytes(rows)


__all__ = [
    "RowsUnderWay",
    "all_to_all",
    "arrived",
    "from_rank",
    "is_gloo",
    "move_rows",
    "one_to_each",
    "room_for",
    "start_exchange",
    "start_rows",
]
