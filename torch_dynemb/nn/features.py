"""Inputs of the collections: ids of many features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dynemb.nn.table_module import flat_ids


@runtime_checkable
class KeyedJaggedShaped(Protocol):
    """What a collection needs of a keyed jagged input; TorchRec's KeyedJaggedTensor has it."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


class KeyedJagged:
    """Ragged ids of several features: values feature after feature, one bag per sample.

    Args:
        keys: feature names, F of them.
        values: int64 (N,).
        offsets: int64 (F * B + 1,), from 0 to N; bag b of feature f is
            ``values[offsets[f * B + b] : offsets[f * B + b + 1]]``.
        weights: float32 (N,) or None.
    """

    def __init__(
        self, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> None:
        self._keys = list(keys)
        self._values = values
        self._offsets = offsets
        self._weights = weights

    def keys(self) -> list[str]:
        """Feature names."""
        return self._keys

    def values(self) -> Tensor:
        """Ids, (N,)."""
        return self._values

    def offsets(self) -> Tensor:
        """Where bags begin, (F * B + 1,)."""
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        """Weights of the ids, (N,), or None."""
        return self._weights

    def stride(self) -> int:
        """Batch size B."""
        return (self._offsets.shape[0] - 1) // len(self._keys)


pytree.register_pytree_node(
    KeyedJagged,
    lambda jagged: ([jagged._values, jagged._offsets, jagged._weights], jagged._keys),
    lambda children, keys: KeyedJagged(keys, *children),
    serialized_type_name="torch_dynemb.KeyedJagged",
    to_dumpable_context=lambda keys: list(keys),
    from_dumpable_context=lambda keys: list(keys),
)


class GroupedIds(NamedTuple):
    """Ids of all features as the ops take them.

    Attributes:
        ids: int64 (N,), feature after feature.
        offsets: int64 (F * B + 1,).
        weights: float32 (N,) or None.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


Features = Mapping[str, Any] | KeyedJaggedShaped


def group_ids(owner: str, names: list[str], features: Features) -> GroupedIds:
    """Brings an input into the order of ``names``.

    Args:
        features: a dict with, per name, ids (B, L), or (values, offsets) with offsets (B + 1,); or
            a keyed jagged input.

    Raises:
        KeyError: a feature is missing.
        TypeError, ValueError: dtypes or shapes do not match.
    """
    if isinstance(features, Mapping):
        return _from_dict(owner, names, features)
    if not isinstance(features, KeyedJaggedShaped):
        raise TypeError(
            f"{owner}: features is a {type(features).__name__}, expected a dict of ids by feature "
            "name or a KeyedJaggedTensor"
        )
    return _from_keyed_jagged(owner, names, features)


def _missing(owner: str, names: list[str], given: Sequence[str]) -> KeyError:
    return KeyError(
        f"{owner}: features lacks {[n for n in names if n not in given]}; it has {list(given)}"
    )


def _from_dict(owner: str, names: list[str], features: Mapping[str, Any]) -> GroupedIds:
    if any(name not in features for name in names):
        raise _missing(owner, names, list(features))
    ids: list[Tensor] = []
    lengths: list[Tensor] = []
    for name in names:
        value = features[name]
        if isinstance(value, tuple):
            values, offsets = value
            ids.append(flat_ids(f"{owner}: feature {name!r}", values))
            lengths.append(offsets.to(torch.int64).diff())
        else:
            flat = flat_ids(f"{owner}: feature {name!r}", value)
            if value.dim() != 2:
                raise ValueError(
                    f"{owner}: feature {name!r} has shape {tuple(value.shape)}, expected (B, L), "
                    "or a tuple (values, offsets)"
                )
            ids.append(flat)
            lengths.append(torch.full((value.shape[0],), value.shape[1], dtype=torch.int64))
    for name, length in zip(names, lengths, strict=True):
        if length.shape[0] != lengths[0].shape[0]:
            raise ValueError(
                f"{owner}: feature {name!r} has {length.shape[0]} bags, but {names[0]!r} has "
                f"{lengths[0].shape[0]}"
            )
    zero = torch.zeros(1, dtype=torch.int64)
    return GroupedIds(torch.cat(ids), torch.cat([zero, torch.cat(lengths).cumsum(0)]), None)


def _from_keyed_jagged(owner: str, names: list[str], features: KeyedJaggedShaped) -> GroupedIds:
    keys = list(features.keys())
    if any(name not in keys for name in names):
        raise _missing(owner, names, keys)
    ids = flat_ids(owner, features.values())
    offsets = features.offsets().to(torch.int64)
    weights = features.weights_or_none()
    if weights is not None and (weights.shape != ids.shape or weights.dtype != torch.float32):
        raise ValueError(
            f"{owner}: weights are {weights.dtype} {tuple(weights.shape)}, expected float32 "
            f"{tuple(ids.shape)}"
        )
    if (offsets.shape[0] - 1) % len(keys) != 0:
        raise ValueError(
            f"{owner}: offsets has {offsets.shape[0]} elements, expected {len(keys)} features * "
            "batch + 1"
        )
    if keys == names:
        return GroupedIds(ids, offsets, weights)
    # Another order, or more features than the tables have: take the features one by one.
    batch = (offsets.shape[0] - 1) // len(keys)
    lengths = offsets.diff()
    picked, picked_lengths, picked_weights = [], [], []
    for name in names:
        f = keys.index(name)
        bounds = offsets[f * batch], offsets[(f + 1) * batch]
        chosen = slice(int(bounds[0]), int(bounds[1]))
        picked.append(ids[chosen])
        picked_lengths.append(lengths[f * batch : (f + 1) * batch])
        if weights is not None:
            picked_weights.append(weights[chosen])
    zero = torch.zeros(1, dtype=torch.int64)
    return GroupedIds(
        torch.cat(picked),
        torch.cat([zero, torch.cat(picked_lengths).cumsum(0)]),
        torch.cat(picked_weights) if weights is not None else None,
    )
