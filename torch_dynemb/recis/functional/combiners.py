"""Combiners of the rows of a sample, by name, which users can add to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from torch_dynemb.argument_checks import described, text
from torch_dynemb.recis.functional.embedding_ops import ragged_embedding_segment_reduce

Combiner: TypeAlias = Callable[..., Tensor]
C = TypeVar("C", bound=Combiner)


def _own(
    combiner: str,
    *,
    emb: Tensor,
    weight: Tensor | None,
    reverse_index: Tensor,
    offsets: Tensor,
    combiner_kwargs: Mapping[str, Any] | None = None,
) -> Tensor:
    return ragged_embedding_segment_reduce(
        emb, weight, reverse_index, offsets, combiner, combiner_kwargs
    )


OWN_COMBINERS = ("sum", "mean", "tile")
_COMBINERS: dict[str, Combiner] = {name: functools.partial(_own, name) for name in OWN_COMBINERS}


def register_combiner(name: str) -> Callable[[C], C]:
    """Register a combiner, by a decorator, for ``EmbeddingOption(combiner=name)``.

    Its function is called once for each feature, with keyword arguments:

    * ``emb``: float32 [U, dim], rows; ``emb[reverse_index]`` has one for each id.
    * ``weight``: float32 [N], 1 for ids without a weight; None with ``use_weight=False``.
    * ``reverse_index``: int64 [N], the row of each id.
    * ``offsets``: int64 [S + 1], where samples begin among the ids.
    * ``combiner_kwargs``: those of the option, a dict.

    It returns float [S, columns], with any number of columns, and must be differentiable in
    ``emb``. All ranks, and programs that load the model, register it under the same name.

    Args:
        name: of the combiner.

    Raises:
        TypeError: ``name`` is not a str, or no function is decorated.
        ValueError: the name is taken.

    Example:
        >>> import torch
        >>> from torch_dynemb.recis import DynamicEmbedding, EmbeddingOption
        >>> @register_combiner("largest of the sample")
        ... def largest(emb, weight, reverse_index, offsets, combiner_kwargs):
        ...     return torch.segment_reduce(emb[reverse_index], "max", offsets=offsets, initial=0)
        >>> option = EmbeddingOption(embedding_dim=4, combiner="largest of the sample")
        >>> DynamicEmbedding(option)(torch.tensor([[1, 2], [3, 4]])).shape
        torch.Size([2, 4])
    """
    name = text("register_combiner: name", name)
    if name in _COMBINERS:
        raise ValueError(f"register_combiner: name is {name!r}, which is taken: choose another")

    def register(function: C) -> C:
        if not callable(function):
            raise TypeError(
                f"register_combiner: {described(function)} is decorated, expected a function"
            )
        _COMBINERS[name] = function
        return function

    return register


def get_combiner(name: str) -> Combiner:
    """Return the function of a combiner; see :func:`register_combiner` for its arguments.

    Args:
        name: "sum", "mean", "tile" (as :func:`ragged_embedding_segment_reduce`), or a registered
            one.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _COMBINERS:
        raise ValueError(
            f"get_combiner: name is {name!r}, expected one of {list(_COMBINERS)}: "
            "register_combiner adds others"
        )
    return _COMBINERS[name]


def combiner_names() -> list[str]:
    """Return the names of all combiners."""
    return list(_COMBINERS)


__all__ = ["OWN_COMBINERS", "combiner_names", "get_combiner", "register_combiner"]
