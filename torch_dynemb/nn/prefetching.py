"""Batches with rows that come into memory while earlier batches are trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from torch_dynemb.argument_checks import integer

T = TypeVar("T")


def prefetched(
    batches: Iterable[T], prefetch: Callable[[T], object], *, ahead: int = 1
) -> Iterator[T]:
    """Iterate over the batches of a loader; before each one, prefetch the rows of a later one.

    On a GPU lookups wait for earlier prefetches: call ``prefetch`` after the forward instead.

    Args:
        batches: such as a ``torch.utils.data.DataLoader``.
        prefetch: is called with every batch but the first; such as
            ``lambda batch: model.embeddings.prefetch(batch["ids"], ahead=2)``.
        ahead: how many batches later the prefetched one is trained, at least 1; give ``prefetch``
            the same number. With more than 1, a disk that is slower than a step pauses less. The
            cache must hold the rows of ``ahead + 1`` batches.

    Raises:
        TypeError, ValueError: ``ahead`` is not an int, or less than 1.

    Example:
        >>> import torch, torch_dynemb as td
        >>> users = td.DynamicEmbedding(8, name="users", optimizer=td.SGD(lr=0.1))
        >>> for ids in td.prefetched(torch.arange(12).split(4), users.prefetch):
        ...     users(ids).sum().backward()
        ...     users.optimizer.step()
        >>> users.sizes()
        {'users': 12}
    """
    return _prefetched(batches, prefetch, integer("prefetched: ahead", ahead, least=1))


def _prefetched(batches: Iterable[T], prefetch: Callable[[T], object], ahead: int) -> Iterator[T]:
    remaining = iter(batches)
    waiting = deque(islice(remaining, 1))
    while waiting:
        for following in islice(remaining, ahead + 1 - len(waiting)):
            prefetch(following)
            waiting.append(following)
        yield waiting.popleft()


__all__ = ["prefetched"]
