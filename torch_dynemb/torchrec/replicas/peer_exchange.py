"""Exchange of bytes between the ranks of a replica group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb.distributed.exchange import move_rows
from torch_dynemb.distributed.ranks import RankGroup, rank_group
from torch_dynemb.files.tensor_file import rows_as_bytes


class PeerExchange:
    """Collectives of the ranks that have the same shard; all of them call each method.

    Args:
        process_group: the replica group.

    Attributes:
        sent_bytes: bytes that this rank has sent to other ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        ranks = rank_group(process_group)
        assert ranks is not None
        self._ranks: RankGroup = ranks
        self.sent_bytes = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._ranks.size

    @property
    def rank(self) -> int:
        """Number of this rank among them."""
        return self._ranks.rank

    def to_all(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Send a tensor to every rank; return those of all ranks, by rank.

        Args:
            mine: [n, ...], of any dtype.
            counts: n of each rank.
        """
        sent = [mine.shape[0]] * self.size
        self._count(mine, sent)
        return list(self._moved(torch.cat([mine] * self.size), counts, sent).split(list(counts)))

    def to_each(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Send a tensor of its own to each rank; return those from all ranks, by rank.

        Args:
            parts: [n, ...] for each rank, of one dtype.
            counts: length of what each rank sends here.
        """
        sent = [part.shape[0] for part in parts]
        self._count(parts[0], sent)
        return list(self._moved(torch.cat(list(parts)), counts, sent).split(list(counts)))

    def _moved(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        return move_rows(rows, received, sent, self._ranks)

    def _count(self, like: Tensor, sent: Sequence[int]) -> None:
        others = sum(sent) - sent[self.rank]
        self.sent_bytes += others * math.prod(like.shape[1:]) * like.element_size()


def merged_rows(count: int, rank: int, ranks: int) -> slice:
    """Return the part of ``count`` rows that a rank merges.

    Args:
        count: number of rows.
        rank, ranks: of the replica group.
    """
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def bytes_of_row(like: Sequence[Tensor]) -> int:
    """Return the bytes of a row that :func:`joined_bytes` joins."""
    return sum(math.prod(of.shape[1:]) * of.element_size() for of in like)


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Join the bytes of tensors row by row, uint8 [n, bytes].

    Args:
        tensors: [n, ...] each, of any dtype; at least one.
    """
    return torch.cat([rows_as_bytes(tensor) for tensor in tensors], 1)


def unpacked(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Separate what :func:`joined_bytes` has joined.

    Args:
        rows: uint8 [n, bytes].
        like: tensors of the same dtypes and sizes of a row.
    """
    count, begin, result = rows.shape[0], 0, []
    for of in like:
        end = begin + math.prod(of.shape[1:]) * of.element_size()
        # a copy, because a part of a row may be unaligned
        part = rows.new_empty(count, end - begin).copy_(rows[:, begin:end])
        result.append(part.view(of.dtype).reshape(count, *of.shape[1:]))
        begin = end
    return result


__all__ = ["PeerExchange", "bytes_of_row", "joined_bytes", "merged_rows", "unpacked"]
