"""Batches with rows that come into memory while the batch before is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetched(batches: Iterable[T], prefetch: Callable[[T], object]) -> Iterator[T]:
    """Iterate over the batches of a loader; before each one, prefetch the rows of the next.

    On a GPU lookups wait for earlier prefetches: call ``prefetch`` after the forward instead.

    Args:
        batches: such as a ``torch.utils.data.DataLoader``.
        prefetch: is called with every batch but the first, one batch ahead; such as
            ``lambda batch: model.embeddings.prefetch(batch["ids"])``.

    Example:
        >>> import torch, torch_dynemb as td
        >>> users = td.DynamicEmbedding(8, name="users", optimizer=td.SGD(lr=0.1))
        >>> for ids in td.prefetched(torch.arange(12).split(4), users.prefetch):
        ...     users(ids).sum().backward()
        ...     users.optimizer.step()
        >>> users.sizes()
        {'users': 12}
    """
    remaining = iter(batches)
    try:
        batch = next(remaining)
    except StopIteration:
        return
    for following in remaining:
        prefetch(following)
        yield batch
        batch = following
    yield batch


__all__ = ["prefetched"]
