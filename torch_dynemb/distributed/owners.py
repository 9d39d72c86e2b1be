"""Owners of ids: the part of a table that has an id, and the size of each part."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.policy.policy import Policy


def part_of(ids: Tensor, parts: int) -> Tensor:
    """Return the part that owns each id, int64 [N]: ``mix_ids(ids)`` modulo parts, unsigned.

    Args:
        ids: int64 [N], contiguous.
        parts: at least 1.

    Raises:
        RuntimeError: ids are not int64 of 1 dimension, or not contiguous.

    Example:
        >>> import torch
        >>> part_of(torch.tensor([1, 2, -3]), 3)
        tensor([2, 1, 1])
    """
    return ops.id_owners(ids, parts=parts, slots=parts)  # one slot for each part


def slots_of(part: int, parts: int, slots: int) -> range:
    """Return the slots of a part, in the distribution of :func:`torch_dynemb.ops.id_owners`.

    They are contiguous; the first ``slots % parts`` parts have one more than the others.

    Example:
        >>> slots_of(1, 3, 8)
        range(3, 6)
    """
    each, longer = divmod(slots, parts)
    begin = part * each + min(part, longer)
    return range(begin, begin + each + (part < longer))


def rows_of(part: int, parts: int, rows: int) -> range:
    """Return a part's share of rows without an owner: contiguous, with equal sizes up to one row.

    Example:
        >>> [rows_of(part, 3, 8) for part in range(3)]
        [range(0, 2), range(2, 5), range(5, 8)]
    """
    return range(rows * part // parts, rows * (part + 1) // parts)


def share_of(whole: int, parts: int) -> int:
    """Return a part's share of a table's total, such as its capacity, rounded up."""
    return -(-whole // parts)


def policy_of_share(policy: Policy, parts: int) -> Policy:
    """Return the policy of a part of a table, with its shares of numbers of ids.

    Args:
        policy: of the whole table.
        parts: number of parts.
    """
    capacity, kept = (
        None if ids is None else share_of(ids, parts)
        for ids in (policy.capacity, policy.keep_at_least)
    )
    return replace(policy, capacity=capacity, keep_at_least=kept)


__all__ = ["part_of", "policy_of_share", "rows_of", "share_of", "slots_of"]
