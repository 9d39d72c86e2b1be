"""Comparison of options that all ranks of a group must share, when a module is constructed."""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from torch_dynemb.distributed.ranks import from_all_ranks, from_first_rank
from torch_dynemb.storage.tiers import ExternalStore

_SHOWN_CHARACTERS = 200
_SHOWN_RANKS = 8
_SENT = 8  # differences that a rank sends to the others


class Option(NamedTuple):
    """An option that is compared.

    Attributes:
        table: name of a table; empty: all of the module.
        name: of the option, such as ``"policy.capacity"``.
    """

    table: str
    name: str


Described = dict[Option, str]


def comparable(value: object) -> str:
    """Return a text that is equal in two processes if the values are.

    Unlike repr, it has no addresses, covers all of a tensor, and skips derived fields of
    dataclasses. A store is represented by its type, since each rank has its own store.
    """
    if isinstance(value, Tensor):
        values = value.detach().cpu()
        digest = hashlib.sha256(repr(values.tolist()).encode()).hexdigest()[:8]
        return f"tensor({tuple(values.shape)}, {values.dtype}, sha256 {digest})"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, ExternalStore):
        caches = f"cache={comparable(value.cache)}, device_cache={comparable(value.device_cache)}"
        return f"ExternalStore({comparable(type(value.store))}, {caches})"
    if is_dataclass(value) and not isinstance(value, type):
        given = [of.name for of in fields(value) if of.init]
        inner = ", ".join(f"{name}={comparable(getattr(value, name))}" for name in given)
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        items = sorted((comparable(key), comparable(of)) for key, of in value.items())
        return "{" + ", ".join(f"{key}: {of}" for key, of in items) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(comparable(of) for of in value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(comparable(of) for of in value) + "]"
    if isinstance(value, functools.partial):
        return f"partial({comparable([value.func, value.args, value.keywords])})"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(value, '__module__', '')}.{name}"
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__name__}" if " at 0x" in text else text


def options_of(table: str, prefix: str, value: object) -> Described:
    """Return an option for each field of a dataclass or entry of a mapping."""
    if isinstance(value, Mapping):
        return {Option(table, f"{prefix}[{key!r}]"): comparable(of) for key, of in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            Option(table, f"{prefix}.{of.name}"): comparable(getattr(value, of.name))
            for of in fields(value)
        }
        return {Option(table, prefix): type(value).__name__, **parts}
    return {Option(table, prefix): comparable(value)}


def check_agreement(
    owner: str, options: Described, process_group: dist.ProcessGroup | None
) -> None:
    """Raise on all ranks of a group unless all of them have the same options.

    Collective; without a group, or in a group of one, nothing is sent. If all agree, every rank
    sends one hash.

    Raises:
        ValueError: options differ. The message names a table, an option, and the values by rank.
    """
    if process_group is None or process_group.size() < 2:
        return
    text = repr(sorted(options.items()))
    digests = from_all_ranks(hashlib.sha256(text.encode()).hexdigest(), process_group)
    if len(set(digests)) == 1:
        return
    first = from_first_rank(options, process_group)
    differing = sorted(
        option
        for option in options.keys() | first.keys()
        if options.get(option) != first.get(option)
    )
    sent = {option: options.get(option) for option in differing[:_SENT]}
    of_ranks = from_all_ranks(sent, process_group)
    found = sorted({option for of_rank in of_ranks for option in of_rank})
    values = [of_rank.get(found[0], first.get(found[0])) for of_rank in of_ranks]
    raise ValueError(_message(owner, found, values, dist.get_process_group_ranks(process_group)))


def _message(
    owner: str, differing: list[Option], values: Sequence[str | None], ranks: Sequence[int]
) -> str:
    by_value: dict[str | None, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        by_value.setdefault(value, []).append(rank)
    given = "; ".join(f"{_shown(value)} on {_ranks(of)}" for value, of in by_value.items())
    others = [_name(option) for option in differing[1:_SENT]]
    also = f" (and so do {', '.join(others)})" if others else ""
    return (
        f"{owner}: {_name(differing[0])} differs between ranks: {given}{also}: the ranks share the "
        "tables, so give all of them the same"
    )


def _name(option: Option) -> str:
    return f"table {option.table!r}: {option.name}" if option.table else option.name


def _shown(value: str | None) -> str:
    if value is None:
        return "not given"
    if len(value) <= _SHOWN_CHARACTERS:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:8]
    return f"{value[:_SHOWN_CHARACTERS]}... (sha256 {digest})"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"ranks {', '.join(map(str, ranks[:_SHOWN_RANKS]))}{more}"


__all__ = ["Described", "Option", "check_agreement", "comparable", "options_of"]
