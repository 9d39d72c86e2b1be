"""Errors for names that only ``nn.Embedding`` and ``nn.EmbeddingBag`` have: what to use instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch_dynemb.argument_checks import described
from torch_dynemb.keyword_options import takes_options

_NO_VOCABULARY = (
    "ids need no vocabulary: any int64 is an id, and policy=torch_dynemb.Policy(capacity=N) bounds "
    "their number"
)
_FROM_EMBEDDING = "from_embedding(module) makes a dynamic table of an nn.Embedding or its weight"
_NO_WEIGHT = (
    "rows lie in a hash table: group.read(0, ids) and group.export(0) give them, "
    f"group.insert_or_assign(0, ids, rows) sets them, and {_FROM_EMBEDDING}"
)
_POLICY = "it belongs to the policy: policy=torch_dynemb.Policy({0}=...)"
_OPTIMIZER = "it belongs to the optimizer: optimizer=torch_dynemb.Adam({0}=...)"
_NO_NORM = "rows are not renormalised: optimizer=torch_dynemb.Adam(clip_norm=...) bounds updates"

ARGUMENTS: Mapping[str, str] = {
    "num_embeddings": _NO_VOCABULARY,
    "max_norm": _NO_NORM,
    "norm_type": _NO_NORM,
    "scale_grad_by_freq": "gradients of an id in a batch are summed: scale the loss, or lr",
    "sparse": "leave it out: only the rows of a batch are updated, always",
    "_weight": _FROM_EMBEDDING,
    "weight": _FROM_EMBEDDING,
    "_freeze": "trainable=False freezes the rows",
    "freeze": "trainable=False freezes the rows",
    "lr": _OPTIMIZER.format("lr"),
    "weight_decay": _OPTIMIZER.format("weight_decay"),
    "capacity": _POLICY.format("capacity"),
    "score": _POLICY.format("score"),
    "admission": _POLICY.format("admission"),
    "ttl": _POLICY.format("ttl"),
}
ATTRIBUTES: Mapping[str, str] = {
    "weight": _NO_WEIGHT,
    "num_embeddings": f"{_NO_VOCABULARY}; len(module) or module.sizes() count those that are there",
    "max_norm": _NO_NORM,
    "norm_type": _NO_NORM,
    "scale_grad_by_freq": "gradients of an id in a batch are summed",
    "sparse": "only the rows of a batch are updated, always",
    "from_pretrained": _FROM_EMBEDDING,
    "reset_parameters": "module.group.clear(0) takes all ids out; rows begin by initializer=",
}
Maker = TypeVar("Maker", bound=Callable[..., Any])


def advises(*first: str) -> Callable[[Maker], Maker]:
    """Make a constructor refuse arguments of static tables with what to use in their place.

    Args:
        *first: the only arguments that may be given by position.

    Returns:
        A decorator of ``__init__``, or of a function beneath ``classmethod``, that takes options as
        :func:`torch_dynemb.keyword_options.takes_options` says. What it returns raises TypeError.
    """

    def of(make: Maker) -> Maker:
        make = takes_options(make)
        known = inspect.signature(make).parameters
        suffix = "" if make.__name__ == "__init__" else f".{make.__name__}"

        @functools.wraps(make)
        def checked(self: Any, *positional: Any, **named: Any) -> Any:
            owner = (self if isinstance(self, type) else type(self)).__name__ + suffix
            if len(positional) > len(first):
                given = ", ".join(described(value) for value in positional)
                advice = "give other arguments by name"
                if first == ("embedding_dim",):
                    advice += f"; num_embeddings is unknown here, because {_NO_VOCABULARY}"
                raise TypeError(
                    f"{owner}: {given} are given by position, expected {' and '.join(first)} "
                    f"alone: {advice}"
                )
            for name in named:
                if name not in known and name in ARGUMENTS:
                    raise TypeError(f"{owner}: unknown argument {name}: {ARGUMENTS[name]}")
            return make(self, *positional, **named)

        return checked  # type: ignore[return-value]

    return of


def missing_attribute(
    owner: str, name: str, instead: Mapping[str, str] = ATTRIBUTES
) -> AttributeError:
    """Make the error for an attribute that a class lacks.

    Args:
        owner: the class.
        name: of the attribute.
        instead: what to use instead, by name.
    """
    return AttributeError(f"{owner} has no {name}: {instead[name]}", name=name)


class ClassAttribute:
    """An attribute of a class of static tables: to look it up is an AttributeError with advice."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise missing_attribute(owner.__name__, self._name)


__all__ = ["ARGUMENTS", "ATTRIBUTES", "ClassAttribute", "advises", "missing_attribute"]
