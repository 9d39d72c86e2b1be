"""Counting of the ids of a stream, in bounded memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import flat_int64, integer

KEPT = 1 << 19  # ids of a column
_CPU = torch.device("cpu")
_ODD, _SHIFT = -7046029254386353131, 32  # of the hash by which ids are sampled


class IdCounts(NamedTuple):
    """Ids of a stream, or a sample of them.

    Attributes:
        ids: int64 [n], ascending.
        counts: int64 [n], occurrences of each.
        first: int64 [n], line of the first occurrence, from 0.
        weights: float64 [n], number of ids of the stream that each represents.
        lookups: number of all occurrences in the stream.
        lines: number of lines.
    """

    ids: Tensor
    counts: Tensor
    first: Tensor
    weights: Tensor
    lookups: int
    lines: int

    @property
    def sampled(self) -> bool:
        """Whether the ids are a sample."""
        return bool((self.weights != 1).any())

    @property
    def distinct(self) -> float:
        """Number of distinct ids; an estimate if ids are a sample."""
        return float(self.weights.sum())

    def seen(self, times: int) -> float:
        """Return the number of ids with exactly this count.

        Args:
            times: at least 1.
        """
        return float(self.weights[self.counts == times].sum())


def hashes(ids: Tensor) -> Tensor:
    """Hash ids to numbers from 0 to 2^63 - 1, by which they are sampled.

    Args:
        ids: int64 of any shape.
    """
    mixed = (ids ^ (ids >> _SHIFT)) * _ODD
    mixed = (mixed ^ (mixed >> _SHIFT)) * _ODD
    return (mixed ^ (mixed >> _SHIFT)) & ((1 << 63) - 1)


class IdCounter:
    """Counter of ids: exact up to a number of ids, and of a sample beyond it.

    The sample follows Gibbons (2001): ids with a hash below a bound, which is halved whenever there
    are too many ids. The choice of ids does not depend on their frequency, and all occurrences
    of chosen ids are counted. The ids that are most frequent at the first halving always stay:
    a few ids with a large share of lookups are counted exactly.

    Args:
        kept: number of ids, at least 64; each takes 24 bytes, and 48 while a batch is added.

    Raises:
        TypeError: ``kept`` is not an int.
        ValueError: it is less than 64.

    Example:
        >>> import torch
        >>> counter = IdCounter()
        >>> counter.add(torch.tensor([7, 8, 7]), torch.tensor([0, 1, 1]), lines=2)
        >>> counter.counts().counts
        tensor([2, 1])
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = integer("IdCounter: kept", kept, least=64)
        self._counted = [
            torch.empty(0, dtype=torch.int64, device="cpu")
        ] * 3  # ids, counts, first lines
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._waiting_ids = 0
        self._certain = torch.empty(0, dtype=torch.int64, device="cpu")
        self._halvings = 0
        self._lookups = 0
        self._lines = 0

    def add(self, ids: Tensor, on_lines: Tensor, *, lines: int) -> None:
        """Count the ids of the next lines.

        Args:
            ids: int64 [n].
            on_lines: int64 [n], the line of each, from 0 for the first of these lines.
            lines: number of these lines, at least 0.

        Raises:
            TypeError: ids or lines have a wrong type.
            ValueError: ``lines`` is negative, or a tensor is on another device than the CPU.
        """
        ids = flat_int64("IdCounter.add: ids", ids, _CPU)
        on_lines = flat_int64("IdCounter.add: on_lines", on_lines, _CPU) + self._lines
        self._lines += integer("IdCounter.add: lines", lines, least=0)
        self._lookups += ids.numel()
        if self._halvings > 0:
            taken = self._stays(ids)
            ids, on_lines = ids[taken], on_lines[taken]
        self._waiting.append((ids, on_lines))
        self._waiting_ids += ids.numel()
        if self._waiting_ids >= max(self._kept, self._counted[0].numel()):
            self._merge()

    def counts(self) -> IdCounts:
        """Return the counts so far."""
        self._merge()
        ids, counts, first = self._counted
        weights = torch.full(ids.shape, 2.0**self._halvings, dtype=torch.float64, device="cpu")
        weights[self._is_certain(ids)] = 1.0
        return IdCounts(ids, counts, first, weights, self._lookups, self._lines)

    def _merge(self) -> None:
        if not self._waiting:
            return
        new, on_lines = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._waiting_ids = [], 0
        ids, counts, first = self._counted
        distinct, places = torch.cat([ids, new]).unique(return_inverse=True)
        counts = torch.zeros_like(distinct).index_add_(
            0, places, torch.cat([counts, torch.ones_like(new)])
        )
        first = torch.full_like(distinct, self._lines).scatter_reduce_(
            0, places, torch.cat([first, on_lines]), "amin"
        )
        self._counted = [distinct, counts, first]
        while self._counted[0].numel() > self._kept:
            self._halve()

    def _halve(self) -> None:
        ids, counts, _ = self._counted
        if self._halvings == 0:
            self._certain = ids[counts.topk(self._kept // 8).indices].sort().values
        self._halvings += 1
        stays = self._stays(ids)
        self._counted = [tensor[stays] for tensor in self._counted]

    def _stays(self, ids: Tensor) -> Tensor:
        """Return a mask of ids in the sample, bool [n]."""
        return (hashes(ids) < 1 << (63 - self._halvings)) | self._is_certain(ids)

    def _is_certain(self, ids: Tensor) -> Tensor:
        """Return a mask of ids that always stay, bool [n]."""
        if self._certain.numel() == 0:
            return torch.zeros_like(ids, dtype=torch.bool)
        places = torch.searchsorted(self._certain, ids)
        return self._certain[places.clamp_(max=self._certain.numel() - 1)] == ids


__all__ = ["KEPT", "IdCounter", "IdCounts", "hashes"]
