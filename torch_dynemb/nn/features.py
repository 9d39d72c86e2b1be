"""Inputs of the collections: ids of many features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dynemb import ops
from torch_dynemb.argument_checks import described
from torch_dynemb.nn.inputs import as_ops_take_them, flat_weights, integer_ids, integer_offsets


@runtime_checkable
class KeyedJaggedShaped(Protocol):
    """Protocol of a keyed jagged input, such as TorchRec's KeyedJaggedTensor."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


class KeyedJagged:
    """Ragged ids of several features: values feature after feature, one bag per sample.

    Args:
        keys: feature names, F of them, each once.
        values: int64 or int32 (N,).
        offsets: int64 or int32 (F * B + 1,), from 0 to N; bag b of feature f is
            ``values[offsets[f * B + b] : offsets[f * B + b + 1]]``.
        weights: float32, bfloat16 or float16 (N,), or None.

    Raises:
        TypeError: ``keys`` is not a sequence of names. The tensors are checked by the lookup.
    """

    def __init__(
        self, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> None:
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise TypeError(f"KeyedJagged: keys is {described(keys)}, expected a list of names")
        self._keys = list(keys)
        self._values = values
        self._offsets = offsets
        self._weights = weights

    def keys(self) -> list[str]:
        """Return feature names."""
        return self._keys

    def values(self) -> Tensor:
        """Return ids, (N,)."""
        return self._values

    def offsets(self) -> Tensor:
        """Return where bags begin, (F * B + 1,)."""
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        """Return weights of the ids, (N,), or None."""
        return self._weights

    def stride(self) -> int:
        """Return batch size B."""
        return (self._offsets.shape[0] - 1) // len(self._keys)


def _flatten(jagged: KeyedJagged) -> tuple[list[Any], list[str]]:
    return [jagged.values(), jagged.offsets(), jagged.weights_or_none()], jagged.keys()


def _flatten_with_keys(
    jagged: KeyedJagged,
) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:
    children, keys = _flatten(jagged)
    names = [pytree.GetAttrKey(name) for name in ("values", "offsets", "weights")]
    return list(zip(names, children, strict=True)), keys


pytree.register_pytree_node(
    KeyedJagged,
    _flatten,
    lambda children, keys: KeyedJagged(keys, *children),
    serialized_type_name="torch_dynemb.KeyedJagged",
    to_dumpable_context=lambda keys: list(keys),
    from_dumpable_context=lambda keys: list(keys),
    flatten_with_keys_fn=_flatten_with_keys,
)
# torch.export saves example inputs; torch.load refuses unregistered classes
torch.serialization.add_safe_globals([KeyedJagged])


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
    """Bring an input into the order of ``names``.

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
    return keyed_ids(owner, names, features)


class AnyBatch(NamedTuple):
    """Result of :func:`any_batch`.

    Attributes:
        offsets: [F * B + 1], with the values that were given.
        batch: B.
    """

    offsets: Tensor
    batch: int


def any_batch(offsets: Tensor, features: int) -> AnyBatch:
    """Return offsets from which an exported program does not conclude that samples are several.

    Args:
        offsets: [F * B + 1], where bags begin.
        features: how many there are.
    """
    batch = (offsets.shape[0] - 1) // features
    if not _supposes_sizes():
        return AnyBatch(offsets, batch)
    batch = _any_number(batch, offsets.device)
    chosen = torch.arange(features * batch + 1, device=offsets.device)
    return AnyBatch(offsets[chosen], batch)


def begins_of_features(offsets: Tensor, features: int) -> Tensor:
    """Return int64 [features + 1], where each feature begins in the ids, and the last one ends.

    Args:
        offsets: int64 [F * B + 1], where bags begin.
        features: F.
    """
    bags = (offsets.shape[0] - 1) // features
    return offsets[torch.arange(features + 1, device=offsets.device) * bags]


_for_compiled_code = False


@contextmanager
def exports_for_compiled_code() -> Iterator[None]:
    """Export programs inside for AOTInductor: their code also serves batches of none and one.

    It does not check what torch.export supposes of sizes of inputs; of a number that comes out of
    a tensor it does, so there must be none.
    """
    global _for_compiled_code
    before, _for_compiled_code = _for_compiled_code, True
    try:
        yield
    finally:
        _for_compiled_code = before


def _supposes_sizes() -> bool:
    """Return whether torch is making a program that supposes sizes of inputs of at least 2."""
    return torch.compiler.is_exporting() and not _for_compiled_code


def _any_number(size: int, device: torch.device) -> int:
    """Return a number of which torch.export supposes nothing.

    If a size of the example is at least 2, it supposes the same of what is computed from it. It
    does not of a number that comes out of a tensor.
    """
    number: Any = torch.full((), size, dtype=torch.int64, device=device).item()
    torch._check(number >= 0)
    return number  # type: ignore[no-any-return]


def _missing(owner: str, names: list[str], given: Sequence[str]) -> KeyError:
    return KeyError(
        f"{owner}: features lacks {[n for n in names if n not in given]}; it has {list(given)}"
    )


def _from_dict(owner: str, names: list[str], features: Mapping[str, Any]) -> GroupedIds:
    if any(name not in features for name in names):
        raise _missing(owner, names, list(features))
    ids: list[Tensor] = []
    offsets: list[Tensor | None] = []
    bags: list[int] = []
    for name in names:
        feature = f"{owner}: feature {name!r}"
        value = features[name]
        if isinstance(value, tuple):
            if len(value) != 2:
                raise ValueError(
                    f"{feature} is a tuple of {len(value)}, expected (values, offsets); weights of "
                    "ids go into a KeyedJagged"
                )
            ids.append(integer_ids(feature, value[0]))
            item_offsets = integer_offsets(feature, value[1])
            if item_offsets.shape[0] == 0:
                raise ValueError(f"{feature}: offsets is empty, expected (B + 1,)")
            offsets.append(item_offsets)
            bags.append(item_offsets.shape[0] - 1)
            continue
        ids.append(integer_ids(feature, value))
        if value.dim() != 2:
            raise ValueError(
                f"{feature} has shape {tuple(value.shape)}, expected (B, L), or a tuple (values, "
                "offsets)"
            )
        offsets.append(None)
        bags.append(value.shape[0])
    for name, batch in zip(names, bags, strict=True):
        if batch != bags[0]:
            raise ValueError(
                f"{owner}: feature {name!r} has {batch} bags, but {names[0]!r} has {bags[0]}"
            )
    batch = bags[0]
    # Of ids (B, L), B is a size of an input itself, of which torch.export does not suppose it.
    if _supposes_sizes() and all(item_offsets is not None for item_offsets in offsets):
        batch = _any_number(batch, ids[0].device)
    return GroupedIds(*ops.ids_concat(ids, bags=batch, offsets=offsets), None)


def keyed_ids(
    owner: str, names: list[str], features: KeyedJaggedShaped, *, anew: bool = True
) -> GroupedIds:
    """Group ids of a keyed jagged input, as :func:`group_ids` does.

    Args:
        owner: what errors begin with.
        names: of the features, in the order that is wanted.
        features: which may have others, too.
        anew: False: its offsets have gone through :func:`any_batch`.

    Raises:
        KeyError, TypeError, ValueError: as :func:`group_ids`.
    """
    keys = list(features.keys())
    places = {name: place for place, name in enumerate(keys)}
    if keys != names and any(name not in places for name in names):
        raise _missing(owner, names, keys)
    if len(places) != len(keys):
        raise ValueError(f"{owner}: keys of features are {keys}, expected every key once")
    variable_stride = getattr(features, "variable_stride_per_key", None)
    if variable_stride is not None and variable_stride():
        raise ValueError(f"{owner}: features has a batch size per key, expected one for all keys")
    values = features.values()
    if isinstance(values, Tensor) and values.dtype not in (torch.int64, torch.int32):
        integer_ids(f"{owner}: features {keys}", values)  # raises; names cost time otherwise
    ids = integer_ids(owner, values)
    offsets = integer_offsets(owner, features.offsets())
    weights = features.weights_or_none()
    if weights is not None:
        weights = flat_weights(f"{owner}: weights", weights, ids.shape)
    if offsets.shape[0] == 0 or (offsets.shape[0] - 1) % len(keys) != 0:
        raise ValueError(
            f"{owner}: offsets has {offsets.shape[0]} elements, expected {len(keys)} features * "
            "batch + 1"
        )
    if anew:
        offsets = any_batch(offsets, len(keys)).offsets
    if not as_ops_take_them(ids, offsets):
        ids, offsets = ops.ids_concat([ids], bags=offsets.shape[0] - 1, offsets=[offsets])
    if keys == names:
        return GroupedIds(ids, offsets, weights)
    return _reordered([places[name] for name in names], GroupedIds(ids, offsets, weights), keys)


def _reordered(chosen: list[int], given: GroupedIds, keys: list[str]) -> GroupedIds:
    """Take the ids of the chosen features, in their order.

    Offsets may be wrong, which only the lookup checks: nothing here reads or writes outside of the
    ids, and offsets that decrease, begin or end elsewhere still do so afterwards.
    """
    batch = (given.offsets.shape[0] - 1) // len(keys)
    begins = given.offsets[:-1].reshape(len(keys), batch)
    bounds = given.offsets[torch.arange(len(keys) + 1, device=given.offsets.device) * batch]
    # Features are picked one by one: an index tensor would be copied to a GPU, which waits for it.
    lengths = torch.cat([bounds[f + 1 : f + 2] - bounds[f : f + 1] for f in chosen])
    ends = lengths.cumsum(0)
    moves = torch.cat([bounds[f + 1 : f + 2] for f in chosen]) - ends  # from new to old positions
    kept = (torch.cat([begins[f : f + 1] for f in chosen]) - moves[:, None]).reshape(-1)
    wrong_end = given.offsets[-1:] - given.ids.shape[0]
    offsets = torch.cat([kept[:1] + given.offsets[:1], kept[1:], ends[-1:] + wrong_end])
    # With every feature once the count is known, so compiled code needs no value of a tensor.
    every = sorted(chosen) == list(range(len(keys)))
    count: Any = given.ids.shape[0]
    if not every:
        # item(), not int(), which torch.export would want to know; torch.jit.trace keeps its value
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        count = ends[-1] if tracing else ends[-1].item()
    position = torch.arange(count, device=ends.device)
    feature = torch.searchsorted(ends, position, right=True).clamp(max=len(chosen) - 1)
    source = (position + moves[feature]).clamp(0, given.ids.shape[0] - 1)
    return GroupedIds(
        given.ids[source], offsets, None if given.weights is None else given.weights[source]
    )
