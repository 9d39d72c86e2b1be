"""Ops that make ids distinct and find the shards that own them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake

_UNIQUE_IDS = torch.ops.dynemb.unique_ids.default


class UniqueIds(NamedTuple):
    """Result of :func:`unique_ids`.

    Attributes:
        ids: int64 [n], distinct within a group, group after group in order of first occurrence.
        offsets: int64 [groups + 1], where groups begin in ``ids``.
        inverse: int64 [N], position of every given id in ``ids``.
        counts: int64 [n], how often each of ``ids`` was given.
    """

    ids: Tensor
    offsets: Tensor
    inverse: Tensor
    counts: Tensor


class PartitionedIds(NamedTuple):
    """Result of :func:`ids_partition`.

    Attributes:
        ids: int64 [n], distinct within a group, by owner, then group, then first occurrence.
        lengths: int64 [parts, groups], number of ids of each owner and group.
        inverse: int64 [N], position of every given id in ``ids``.
        counts: int64 [n], how often each of ``ids`` was given.
    """

    ids: Tensor
    lengths: Tensor
    inverse: Tensor
    counts: Tensor


@raises_typed_errors
def mix_ids(ids: Tensor) -> Tensor:
    """Apply a bijection to ids, int64 [N]; its result modulo the number of shards is the owner.

    splitmix64's finaliser (Steele, Lea, Flood 2014). The same on CPU and GPU.

    Args:
        ids: int64 [N].

    Raises:
        RuntimeError: ids are not int64 of 1 dimension, or not contiguous.
    """
    mixed: Tensor = torch.ops.dynemb.mix_ids(ids)
    return mixed


@raises_typed_errors
def unmix_ids(quotients: Tensor, *, parts: int, part: int) -> Tensor:
    """Invert :func:`mix_ids` for ``quotients * parts + part``, unsigned; int64 [N].

    Args:
        quotients: int64 [N].
        parts: at least 1.
        part: 0 to ``parts - 1``.

    Raises:
        RuntimeError: quotients are not int64 of 1 dimension, or not contiguous, or ``part`` is out
            of range.
    """
    ids: Tensor = torch.ops.dynemb.unmix_ids(quotients, parts, part)
    return ids


@raises_typed_errors
def unique_ids(ids: Tensor, offsets: Tensor, *, padded: bool = False) -> UniqueIds:
    """Return the distinct ids of each group.

    Args:
        ids: int64 [N], group after group.
        offsets: int64 [groups + 1], where groups begin in ``ids``.
        padded: ids and counts have the length of the input, with zeros after ``offsets[-1]``. On a
            GPU the host otherwise waits for their number, and a CUDA graph cannot capture the call.

    Raises:
        RuntimeError: dtypes or shapes do not match, or offsets are not ascending from 0 to N.

    Example:
        >>> ids, offsets = torch.tensor([7, 5, 7, 7]), torch.tensor([0, 3, 4])
        >>> unique_ids(ids, offsets).ids
        tensor([7, 5, 7])
        >>> unique_ids(ids, offsets, padded=True).counts
        tensor([2, 1, 1, 0])
    """
    return UniqueIds(*_UNIQUE_IDS(ids, offsets, padded))


@raises_typed_errors
def id_owners(ids: Tensor, *, parts: int, slots: int = 65536) -> Tensor:
    """Return the part that owns each id, int64 [N].

    The slot of an id is its :func:`mix_ids`, unsigned, modulo ``slots``. Parts have contiguous
    ranges of slots; the first ``slots % parts`` ranges have one more than the others. The result is
    the same on CPU and GPU, whatever the sign of an id.

    Args:
        ids: int64 [N].
        parts: 1 to ``slots``.
        slots: at least 1.

    Raises:
        RuntimeError: ids are not int64 of 1 dimension, or there are more parts than slots.

    Example:
        >>> id_owners(torch.tensor([1, 2, -3]), parts=2)
        tensor([0, 0, 1])
    """
    owners: Tensor = torch.ops.dynemb.id_owners(ids, parts, slots)
    return owners


@raises_typed_errors
def ids_partition(
    ids: Tensor, offsets: Tensor, *, parts: int, slots: int = 65536
) -> PartitionedIds:
    """Return the distinct ids of each group, ordered by owner (:func:`id_owners`).

    ``result.ids[result.inverse]`` are the ids given. On a GPU the host waits for their number.

    Args:
        ids: int64 [N], group after group.
        offsets: int64 [groups + 1], where groups begin in ``ids``.
        parts: 1 to ``slots``.
        slots: at least 1.

    Raises:
        RuntimeError: as :func:`unique_ids` and :func:`id_owners`.

    Example:
        >>> partition = ids_partition(torch.tensor([2, 1, 2, 3]), torch.tensor([0, 4]), parts=2)
        >>> partition.ids, partition.lengths.tolist()
        (tensor([2, 1, 3]), [[2], [1]])
    """
    return PartitionedIds(*torch.ops.dynemb.ids_partition(ids, offsets, parts, slots))


@raises_typed_errors
def ids_encode(ids: Sequence[Tensor], tables: Sequence[int]) -> Tensor:
    """Encode ids of several tables as ids of one, int64 [sum of N].

    The id of a table becomes ``mix(id ^ mix(table))``, where mix is :func:`mix_ids`: a bijection of
    all 64 bits. So ids of one table never collide. Ids of two tables of n1 and n2 ids collide by
    chance only, with a probability of about ``n1 * n2 / 2**64``.

    Args:
        ids: int64, of any shape, for each feature.
        tables: a number of the table for each feature; features of a table have the same.

    Raises:
        RuntimeError: a dtype does not match, a tensor is not contiguous, or the lists differ in
            length.

    Example:
        >>> ids = torch.tensor([5])
        >>> in_one, again, in_two = ids_encode([ids, ids, ids], [1, 1, 2]).tolist()
        >>> in_one == again, in_one == in_two
        (True, False)
    """
    if not ids:  # an op without tensors has no device
        if tables:
            raise RuntimeError(
                f"ids_encode: tables has {len(tables)} entries, expected one for each of 0 ids"
            )
        return torch.empty(0, dtype=torch.int64, device="cpu")
    encoded: Tensor = torch.ops.dynemb.ids_encode(list(ids), list(tables))
    return encoded


class ConcatenatedIds(NamedTuple):
    """Result of :func:`ids_concat`.

    Attributes:
        ids: int64 [N], feature after feature.
        offsets: int64 [features * bags + 1].
    """

    ids: Tensor
    offsets: Tensor


@raises_typed_errors
def ids_concat(
    ids: Sequence[Tensor], *, bags: int, offsets: Sequence[Tensor | None] | None = None
) -> ConcatenatedIds:
    """Concatenate ids of many features for a lookup, with the offsets of their bags.

    Args:
        ids: int64 or int32, of any shape, for each feature.
        bags: of each feature.
        offsets: int64 or int32 [bags] or [bags + 1] for each feature, or None if all bags of it
            have one length. The number of ids at the end may be omitted.

    Raises:
        ValueError: ids is empty, or offsets has another length.
        RuntimeError: a dtype or shape does not match, or a tensor is not contiguous. Or offsets do
            not begin with 0, or do not end with the number of ids where the next feature begins.
            Other errors in offsets are raised by the lookup. On a GPU a later op raises, and
            lookups with this result change nothing.

    Example:
        >>> shown, clicked = torch.tensor([[5, 6], [7, 8]]), torch.tensor([9, 9, 5])
        >>> result = ids_concat([shown, clicked], bags=2, offsets=[None, torch.tensor([0, 1])])
        >>> result.ids.tolist(), result.offsets.tolist()
        ([5, 6, 7, 8, 9, 9, 5], [0, 2, 4, 5, 7])
    """
    if not ids:
        raise ValueError("ids_concat: ids is empty, expected those of a feature or more")
    given = [] if offsets is None else list(offsets)
    if offsets is not None and len(given) != len(ids):
        raise ValueError(
            f"ids_concat: offsets has {len(given)} entries, expected one for each of {len(ids)} "
            "features: give None where all bags have one length"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return _traced_concat(ids, bags, given or [None] * len(ids))
    ragged = [f for f, of_feature in enumerate(given) if of_feature is not None]
    if not ragged and torch.compiler.is_exporting():
        # code compiled by AOTInductor cannot call an op with an empty list of tensors
        length = ids[0].numel() // torch.sym_max(bags, 1)
        ragged, given = [0], [torch.arange(bags, device=ids[0].device) * length]
    return ConcatenatedIds(
        *torch.ops.dynemb.ids_concat(list(ids), [given[f] for f in ragged], ragged, bags)
    )


def _traced_concat(
    ids: Sequence[Tensor], bags: int, offsets: Sequence[Tensor | None]
) -> ConcatenatedIds:
    """Compute :func:`ids_concat` by torch's own ops, for ``torch.jit.trace``.

    A trace freezes integers that ops of other libraries receive, such as the number of bags. Here
    it is the size of a tensor each time. Features of different numbers of bags do not stack.
    """
    first = torch.zeros((), dtype=torch.int64, device=ids[0].device)  # of the feature's ids
    begins, wrong = [], first
    for of_feature, own in zip(ids, offsets, strict=True):
        count = of_feature.numel()
        if own is None:
            begins.append(first + _even_bags(of_feature, bags))
        else:
            own = own.to(torch.int64)
            if own.shape[0] == bags + 1:
                own, end = own[:-1], own[-1]
                wrong = wrong + (end - count).abs()
            # the lookup would not see this error, because the bags of another feature end there
            wrong = wrong + own[:1].abs().sum()
            begins.append(first + own)
        first = first + count
    every = torch.stack(begins).reshape(-1)
    joined = torch.cat([of_feature.reshape(-1).to(torch.int64) for of_feature in ids])
    # the lookup refuses offsets that end elsewhere
    return ConcatenatedIds(joined, torch.cat([every, (first + wrong).reshape(1)]))


def _even_bags(ids: Tensor, bags: int) -> Tensor:
    """Return where the bags of a feature begin if all have one length."""
    if isinstance(bags, Tensor) and ids.dim() == 2:  # a size of a tensor: each row is a bag
        bags, length = ids.shape[0], ids.shape[1]
    else:
        length = ids.numel() // max(bags, 1)
    return torch.arange(bags, device=ids.device) * length


@register_fake("ids_concat")
def _ids_concat_fake(
    ids: Sequence[Tensor], offsets: Sequence[Tensor], ragged: Sequence[int], bags: int
) -> tuple[Tensor, Tensor]:
    count = sum(tensor.numel() for tensor in ids)
    return (
        ids[0].new_empty((count,), dtype=torch.int64),
        ids[0].new_empty((len(ids) * bags + 1,), dtype=torch.int64),
    )


@register_fake("mix_ids")
def _mix_ids_fake(ids: Tensor) -> Tensor:
    return torch.empty_like(ids)


@register_fake("unmix_ids")
def _unmix_ids_fake(quotients: Tensor, parts: int, part: int) -> Tensor:
    return torch.empty_like(quotients)


@register_fake("id_owners")
def _id_owners_fake(ids: Tensor, parts: int, slots: int) -> Tensor:
    return torch.empty_like(ids)


@register_fake("ids_encode")
def _ids_encode_fake(ids: list[Tensor], tables: list[int]) -> Tensor:
    return ids[0].new_empty((sum(tensor.numel() for tensor in ids),))


@register_fake("unique_ids")
def _unique_ids_fake(
    ids: Tensor, offsets: Tensor, padded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = ids.shape[0] if padded else torch.library.get_ctx().new_dynamic_size()
    inverse = torch.empty_like(ids)
    return ids.new_empty((count,)), torch.empty_like(offsets), inverse, ids.new_empty((count,))


@register_fake("ids_partition")
def _ids_partition_fake(
    ids: Tensor, offsets: Tensor, parts: int, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    lengths = ids.new_empty((parts, offsets.shape[0] - 1))
    return ids.new_empty((count,)), lengths, torch.empty_like(ids), ids.new_empty((count,))
