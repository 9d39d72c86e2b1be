"""Ids on their way to the shard that owns them: which shard that is, and which ids are the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library import register_fake


class UniqueIds(NamedTuple):
    """Result of :func:`unique_ids`.

    Attributes:
        ids: int64 [n], distinct within a group, group after group in order of first occurrence.
        offsets: int64 [groups + 1], where groups begin in ``ids``.
        inverse: int64 [N], position of every given id in ``ids``.
    """

    ids: Tensor
    offsets: Tensor
    inverse: Tensor


def mix_ids(ids: Tensor) -> Tensor:
    """A bijection of ids, int64 [N]: modulo the number of shards it says who owns an id.

    splitmix64's finaliser (Steele, Lea, Flood 2014). The same on CPU and GPU.

    Raises:
        RuntimeError: ids are not int64 of 1 dimension, or not contiguous.
    """
    mixed: Tensor = torch.ops.dynemb.mix_ids(ids)
    return mixed


def unmix_ids(quotients: Tensor, *, parts: int, part: int) -> Tensor:
    """The ids whose :func:`mix_ids` is ``quotients * parts + part``, unsigned; int64 [N].

    Raises:
        RuntimeError: quotients are not int64 of 1 dimension, or ``part`` is none of ``parts``.
    """
    ids: Tensor = torch.ops.dynemb.unmix_ids(quotients, parts, part)
    return ids


def unique_ids(ids: Tensor, offsets: Tensor) -> UniqueIds:
    """The distinct ids of each group.

    Args:
        ids: int64 [N], group after group.
        offsets: int64 [groups + 1], where groups begin in ``ids``.

    Raises:
        RuntimeError: dtypes or shapes do not match, or offsets are not ascending from 0 to N.
    """
    return UniqueIds(*torch.ops.dynemb.unique_ids(ids, offsets))


@register_fake("mix_ids")
def _mix_ids_fake(ids: Tensor) -> Tensor:
    return torch.empty_like(ids)


@register_fake("unmix_ids")
def _unmix_ids_fake(quotients: Tensor, parts: int, part: int) -> Tensor:
    return torch.empty_like(quotients)


@register_fake("unique_ids")
def _unique_ids_fake(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty((count,)), torch.empty_like(offsets), torch.empty_like(ids)


def sorted_unique_ids(ids: Tensor, offsets: Tensor) -> UniqueIds:
    """:func:`unique_ids` by sorting: what runs on a GPU. Offsets are not checked there."""
    count = ids.shape[0]
    by_id = torch.argsort(ids, stable=True)
    group = torch.searchsorted(offsets[1:], by_id, right=True)
    by_group = torch.argsort(group, stable=True)
    order = by_id[by_group]  # by group, then id, then position
    sorted_ids, sorted_group = ids[order], group[by_group]
    begins = torch.ones(count, dtype=torch.bool, device=ids.device)
    begins[1:] = (sorted_ids[1:] != sorted_ids[:-1]) | (sorted_group[1:] != sorted_group[:-1])
    run = begins.cumsum(0) - 1
    first = order[begins]  # first position of each distinct id, as sorting is stable
    by_occurrence = torch.argsort(first)
    rank = torch.empty_like(by_occurrence)
    rank[by_occurrence] = torch.arange(first.shape[0], device=ids.device)
    inverse = torch.empty_like(ids)
    inverse[order] = rank[run]
    unique = ids[first[by_occurrence]]
    bounds = torch.searchsorted(first[by_occurrence].contiguous(), offsets)
    return UniqueIds(unique, bounds, inverse)


_cuda = torch.library.Library("dynemb", "IMPL")
_cuda.impl("unique_ids", lambda ids, offsets: tuple(sorted_unique_ids(ids, offsets)), "CUDA")
