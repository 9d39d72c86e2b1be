"""The ids of a KeyedJaggedTensor as read-only collections take them: by feature, and of any batch.

TorchRec's ``to_dict()`` does not take a batch of no samples, and programs that torch.export makes
of it want at least two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.nn.features import any_batch


class JaggedIds(NamedTuple):
    """The ids of all features.

    Attributes:
        keys: names of the features, F of them.
        values: [N], feature after feature.
        lengths: [F * B], of the bags.
        offsets: [F * B + 1], where bags begin in values.
        weights: [N], or None.
        batch: B.
    """

    keys: list[str]
    values: Tensor
    lengths: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch: int


class FeatureIds(NamedTuple):
    """The ids of one feature.

    Attributes:
        values: [n].
        lengths: [B], of the bags.
        offsets: [B + 1], where bags begin in values.
        weights: [n], or None.
    """

    values: Tensor
    lengths: Tensor
    offsets: Tensor
    weights: Tensor | None


def jagged_ids(owner: str, features: KeyedJaggedTensor) -> JaggedIds:
    """The tensors of a batch.

    Args:
        owner: what errors begin with.
        features: of one batch size for all of them.

    Raises:
        ValueError: there is a batch size per feature.
    """
    if features.variable_stride_per_key():
        raise ValueError(
            f"{owner}: features has a batch size per feature, expected one for all of them"
        )
    keys, lengths, offsets = features.keys(), features.lengths(), features.offsets()
    offsets, batch = any_batch(offsets, len(keys))
    if torch.compiler.is_exporting():
        lengths = lengths[torch.arange(len(keys) * batch, device=lengths.device)]
    return JaggedIds(keys, features.values(), lengths, offsets, features.weights_or_none(), batch)


def split_ids(jagged: JaggedIds) -> dict[str, FeatureIds]:
    """Ids by feature; on a GPU it waits for their numbers.

    Args:
        jagged: of all features.
    """
    keys, values, lengths, offsets, weights, batch = jagged
    bounds = offsets[torch.arange(len(keys) + 1, device=offsets.device) * batch]
    sizes = (bounds[1:] - bounds[:-1]).tolist()
    if torch.compiler.is_compiling():
        for size in sizes:
            torch._check(size >= 0)
    parts = values.split(sizes)
    of_ids = [None] * len(keys) if weights is None else weights.split(sizes)
    split = {}
    for f, key in enumerate(keys):
        begins = offsets.narrow(0, f * batch, batch + 1)
        of_feature = lengths.narrow(0, f * batch, batch)
        split[key] = FeatureIds(parts[f], of_feature, begins - begins[0], of_ids[f])
    return split


__all__ = ["FeatureIds", "JaggedIds", "jagged_ids", "split_ids"]
