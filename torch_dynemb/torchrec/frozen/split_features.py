"""Ids of a KeyedJaggedTensor for read-only collections: by feature, with any batch size.

TorchRec's ``to_dict()`` fails for an empty batch. Programs that torch.export makes of it need at
least two samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.nn.features import any_batch


class JaggedIds(NamedTuple):
    """Ids of all features.

    Attributes:
        keys: names of the F features.
        values: [N], feature after feature.
        lengths: [F * B], of the bags.
        offsets: [F * B + 1], where bags begin in values.
        weights: [N], or None.
        batch: B.
        bags: number of bags of each feature, with a batch size per feature. B is the largest; other
            features are padded with empty bags. None: all have B.
    """

    keys: list[str]
    values: Tensor
    lengths: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch: int
    bags: list[int] | None


class FeatureIds(NamedTuple):
    """Ids of one feature.

    Attributes:
        values: [n].
        lengths: [B], of the bags; B is the feature's own with a batch size per feature.
        offsets: [B + 1], where bags begin in values.
        weights: [n], or None.
    """

    values: Tensor
    lengths: Tensor
    offsets: Tensor
    weights: Tensor | None


def jagged_ids(owner: str, features: KeyedJaggedTensor) -> JaggedIds:
    """Return the tensors of a batch.

    Args:
        owner: prefix of error messages.
        features: with one batch size, or one per feature.

    Raises:
        ValueError: features have a batch size each, and torch.export traces.
    """
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    lengths, offsets = features.lengths(), features.offsets()
    if features.variable_stride_per_key():
        if torch.compiler.is_exporting():
            raise ValueError(
                f"{owner}: features has a batch size per feature, which exported programs cannot "
                "take: export with one for all of them"
            )
        bags = features.stride_per_key()
        offsets = _padded(offsets, bags)
        lengths = offsets[1:] - offsets[:-1]
        return JaggedIds(keys, values, lengths, offsets, weights, max(bags), bags)
    offsets, batch = any_batch(offsets, len(keys))
    if torch.compiler.is_exporting():
        lengths = lengths[torch.arange(len(keys) * batch, device=lengths.device)]
    return JaggedIds(keys, values, lengths, offsets, weights, batch, None)


def _padded(offsets: Tensor, bags: list[int]) -> Tensor:
    """Pad offsets with empty bags for features that have fewer than others."""
    most, first = max(bags), 0
    parts = []
    for count in bags:
        end = offsets[first + count]
        parts += [offsets[first : first + count], end.expand(most - count)]
        first += count
    return torch.cat([*parts, offsets[first:]])


def bags_of_samples(owner: str, features: KeyedJaggedTensor, bags: list[int]) -> dict[str, Tensor]:
    """Return the bag of each sample by feature, for a batch size per feature.

    Args:
        owner: prefix of error messages.
        features: the batch.
        bags: number of bags of each feature.

    Returns:
        int64 [samples] by feature; empty if all features have one bag per sample.

    Raises:
        ValueError: features have different numbers of bags, and ``inverse_indices`` is missing or
            lacks features.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is not None:
        of_samples = dict(zip(inverse[0], inverse[1].unbind(), strict=True))
        lacking = [key for key in features.keys() if key not in of_samples]  # noqa: SIM118
        if lacking:
            raise ValueError(
                f"{owner}: inverse_indices of features lacks {lacking}; it has {list(of_samples)}"
            )
        return of_samples
    if len(set(bags)) > 1:
        raise ValueError(
            f"{owner}: features has a batch size per feature, {bags}, but no inverse_indices: give "
            "the bag of each sample there, or one batch size for all features"
        )
    return {}


def split_ids(jagged: JaggedIds) -> dict[str, FeatureIds]:
    """Split ids by feature; on a GPU it waits for their lengths.

    Args:
        jagged: of all features.
    """
    keys, values, lengths, offsets, weights, batch, bags = jagged
    bounds = offsets[torch.arange(len(keys) + 1, device=offsets.device) * batch]
    sizes = (bounds[1:] - bounds[:-1]).tolist()
    if torch.compiler.is_compiling():
        for size in sizes:
            torch._check(size >= 0)
    parts = values.split(sizes)
    of_ids = [None] * len(keys) if weights is None else weights.split(sizes)
    split = {}
    for f, key in enumerate(keys):
        count = batch if bags is None else bags[f]
        begins = offsets.narrow(0, f * batch, count + 1)
        of_feature = lengths.narrow(0, f * batch, count)
        split[key] = FeatureIds(parts[f], of_feature, begins - begins[0], of_ids[f])
    return split


def repeated(given: FeatureIds, bag_of_sample: Tensor) -> FeatureIds:
    """Repeat bags that samples share, so that each sample has its own.

    Args:
        given: ids of a feature, with shared bags.
        bag_of_sample: int64 [samples].
    """
    lengths = given.lengths[bag_of_sample]
    ends = lengths.cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    moves = given.offsets[bag_of_sample] - offsets[:-1]  # from output to input positions
    places = moves.repeat_interleave(lengths)
    places = places + torch.arange(places.shape[0], device=places.device)
    weights = None if given.weights is None else given.weights[places]
    return FeatureIds(given.values[places], lengths, offsets, weights)


__all__ = [
    "FeatureIds",
    "JaggedIds",
    "bags_of_samples",
    "jagged_ids",
    "repeated",
    "split_ids",
]
