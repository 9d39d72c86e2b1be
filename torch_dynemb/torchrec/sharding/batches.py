"""Checks and changes of batches before sharded collections send them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torch_dynemb.torchrec.planning.options import TableOptions

_ID_DTYPES = (torch.int64, torch.int32)
_TOO_LARGE = 2.0**63  # score
_TENSORS = ("_values", "_weights", "_lengths", "_offsets")  # of a KeyedJaggedTensor


class BatchCheck:
    """Check of each batch of a collection; TorchRec checks only the first one.

    Values on a GPU are not checked, because reading them would synchronize.

    Args:
        owner: the collection.
        configs: of its tables.
        options: of its dynamic tables, by name.
        weighted: whether ids need weights on the rank of the batch.
        detaches: whether weights of bags get no gradient.
    """

    def __init__(
        self,
        owner: str,
        configs: Sequence[BaseEmbeddingConfig],
        options: Mapping[str, TableOptions],
        *,
        weighted: bool = False,
        detaches: bool = False,
    ) -> None:
        self._owner = owner
        self._features = list(dict.fromkeys(n for of in configs for n in of.feature_names))
        self._weighted = weighted
        self._scored = scored_features(configs, options)
        self._detaches = detaches
        self._keys: list[str] = []

    def __call__(self, features: object, *, first: bool, trains: bool) -> KeyedJaggedTensor:
        """Return the batch as a KeyedJaggedTensor.

        Args:
            first: True for the first batch, for which TorchRec builds its distribution of features.
            trains: whether the batch may change scores.

        Raises:
            KeyError: a feature is missing.
            TypeError, ValueError: another type, wrong dtypes of ids or weights, or lengths that do
                not match the ids.
        """
        batch = maybe_td_to_kjt(features, None)
        if not isinstance(batch, KeyedJaggedTensor):
            raise TypeError(
                f"{self._owner}: features is a {type(batch).__name__}, expected a KeyedJaggedTensor"
            )
        keys = batch.keys()
        if first:
            self._check_names(keys)
            self._keys = list(keys)
        elif keys != self._keys:
            self._check_names(keys)
            raise ValueError(
                f"{self._owner}: keys of features are {keys}, but those of the first batch were "
                f"{self._keys}, and TorchRec finds features by position: give all batches the "
                "same keys in the same order"
            )
        batch = _contiguous(batch)
        ids = batch.values()
        if ids.dtype not in _ID_DTYPES:
            if ids.numel() > 0:
                raise TypeError(
                    f"{self._owner}: ids of features {keys} have dtype {ids.dtype}, expected int64 "
                    "or int32"
                )
            batch = with_ids(batch, ids.to(torch.int64))  # an empty tensor is float32 by default
        self._check_weights(batch, trains)
        self._check_sizes(batch)
        if trains and self._scored:
            self._check_scores(batch)
        return batch

    def _check_names(self, keys: list[str]) -> None:
        missing = [name for name in self._features if name not in keys]
        if missing:
            raise KeyError(
                f"{self._owner}: features lacks {missing}; it has {keys}: every batch has all "
                "features, those without ids with lengths of 0"
            )
        if len(set(keys)) != len(keys):
            # the words of TorchRec's own check
            raise ValueError(
                f"{self._owner}: keys must be unique, but those of features are {keys}, expected "
                "every key once"
            )

    def _check_weights(self, batch: KeyedJaggedTensor, trains: bool) -> None:
        weights = batch.weights_or_none()
        if weights is None:
            if self._scored and trains:
                raise ValueError(
                    f"{self._owner}: features has no weights, but those of {list(self._scored)} "
                    "are scores by score_from='weights': give weights=, one for every id"
                )
            if self._weighted:
                raise missing_weights(self._owner)
            return
        if not weights.is_floating_point():
            raise TypeError(
                f"{self._owner}: weights of features have dtype {weights.dtype}, expected float32"
            )
        if self._detaches and weights.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{self._owner}: weights of features require a gradient, but those that ranks "
                "exchange, and those that divide means, get none: detach() them, or compute them "
                "by feature processors in a FeatureProcessedEmbeddingBagCollection"
            )
        if weights.shape != batch.values().shape:
            raise ValueError(
                f"{self._owner}: weights of features have shape {tuple(weights.shape)}, expected "
                f"that of the ids, {tuple(batch.values().shape)}"
            )

    def _check_scores(self, batch: KeyedJaggedTensor) -> None:
        """Raise ValueError unless weights that are scores are in the range of their scores."""
        weights, ends = batch.weights(), batch.offset_per_key()
        if weights.device.type != "cpu":
            return
        for name, least in self._scored.items():
            place = self._keys.index(name)
            scores = weights[ends[place] : ends[place + 1]]
            wrong = ~((scores >= least) & (scores < _TOO_LARGE))
            if bool(wrong.any()):
                raise ValueError(
                    f"{self._owner}: weights of feature {name!r} have {float(scores[wrong][0])}, "
                    "but are scores by score_from='weights': give numbers from "
                    f"{'0' if least == 0 else '-2^63'} on, below 2^63"
                )

    def _check_sizes(self, batch: KeyedJaggedTensor) -> None:
        keys, lengths, ids = batch.keys(), batch.lengths(), batch.values()
        if batch.variable_stride_per_key():
            if batch.inverse_indices_or_none() is None:
                raise ValueError(
                    f"{self._owner}: features has a batch size per feature, but no "
                    "inverse_indices, which map samples to bags: give both, or one batch "
                    "size for all features"
                )
            self._check_bags_of_samples(batch)
            bags, expected = sum(batch.stride_per_key()), "the sum of the batch sizes"
        else:
            stride = batch.stride()
            bags, expected = stride * len(keys), f"{len(keys)} features * batch size {stride}"
        if lengths.numel() != bags:
            raise ValueError(
                f"{self._owner}: features has {lengths.numel()} lengths, expected {bags}: "
                f"{expected}"
            )
        if ids.device.type != "cpu" or lengths.device.type != "cpu":
            return
        # FBGEMM's ops trust lengths: wrong ones make them access memory out of bounds
        if bags > 0:
            least, most = (int(length) for length in torch.aminmax(lengths))
            if least < 0 or most > ids.numel():
                of_keys = lengths.split(batch.stride_per_key())
                wrong = [
                    key
                    for key, of_key in zip(keys, of_keys, strict=True)
                    if bool(((of_key < 0) | (of_key > ids.numel())).any())
                ]
                raise ValueError(
                    f"{self._owner}: lengths of features {wrong} are from {least} to {most}, "
                    f"expected 0 to {ids.numel()}, the number of ids: offsets must not decrease"
                )
        total = int(lengths.sum())
        offsets = batch.offsets_or_none()
        begin = 0 if offsets is None or offsets.numel() == 0 else int(offsets[0])
        if total != ids.numel() or begin != 0:
            raise ValueError(
                f"{self._owner}: lengths of features {keys} add up to {total} from position "
                f"{begin}, but there are {ids.numel()} ids: lengths must add up to their number, "
                "and offsets go from 0 to it"
            )

    def _check_bags_of_samples(self, batch: KeyedJaggedTensor) -> None:
        """Raise ValueError unless inverse_indices have a bag for each sample of each feature."""
        names, bags = batch.inverse_indices()
        lacking = [name for name in self._features if name not in names]
        if lacking or bags.dim() != 2 or bags.shape[0] != len(names):
            raise ValueError(
                f"{self._owner}: inverse_indices has names {list(names)} and shape "
                f"{tuple(bags.shape)}, expected a row for each of {self._features}"
            )
        if bags.device.type != "cpu" or bags.shape[1] == 0:
            return
        sizes = dict(zip(batch.keys(), batch.stride_per_key(), strict=True))
        least, most = (of.tolist() for of in torch.aminmax(bags, dim=1))
        for name, first, last in zip(names, least, most, strict=True):
            size = sizes.get(name)
            if size is not None and not 0 <= first <= last < size:
                raise ValueError(
                    f"{self._owner}: inverse_indices of feature {name!r} are from {first} to "
                    f"{last}, expected 0 to {size - 1}, the bags of its batch"
                )


def check_processed(owner: str, needs: Mapping[str, bool]) -> None:
    """Check that feature processors may compute weights, which they do after the exchange.

    Args:
        owner: the collection.
        needs: by option, whether it needs weights before the exchange.

    Raises:
        NotImplementedError: an option needs them.
    """
    found = [option for option, needed in needs.items() if needed]
    if found:
        raise NotImplementedError(
            f"{owner}: {found} need the weights of ids before ranks exchange them, but feature "
            "processors compute weights afterwards: leave these options out, or the processors"
        )


def missing_weights(owner: str) -> ValueError:
    """Return the error of a batch of a weighted collection without weights."""
    return ValueError(
        f"{owner}: features has no weights, but is_weighted is True: give weights=, one for every "
        "id"
    )


def scored_features(
    configs: Sequence[BaseEmbeddingConfig], options: Mapping[str, TableOptions]
) -> dict[str, float]:
    """Return the least score of each feature of which the weights are scores.

    Args:
        configs: of the tables of a collection.
        options: of its dynamic tables, by name.
    """
    least: dict[str, float] = {}
    for config in configs:
        of_table = options.get(config.name)
        if of_table is None or of_table.score_from is None:
            continue
        own = 0.0 if of_table.adds_weights_to_decayed_sums else -_TOO_LARGE
        for feature in config.feature_names:
            least[feature] = max(own, least.get(feature, own))
    return least


def with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Return the same bags with other ids."""
    changed = copy.copy(features)
    changed._values = ids
    return changed


def copied(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Copy features into memory of their own."""
    return _changed(features, Tensor.clone)


def _contiguous(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the same features, contiguous: ops of FBGEMM ignore the strides of tensors."""
    tensors = [getattr(features, name) for name in _TENSORS]
    if features._inverse_indices is not None:
        tensors.append(features._inverse_indices[1])
    if all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return features
    return _changed(features, Tensor.contiguous)


def _changed(features: KeyedJaggedTensor, change: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
    changed = copy.copy(features)
    for name in _TENSORS:
        tensor = getattr(features, name)
        setattr(changed, name, None if tensor is None else change(tensor))
    if features._inverse_indices is not None:
        names, bags = features._inverse_indices
        changed._inverse_indices = names, change(bags)
    changed._jt_dict = None  # its tensors are views of the originals
    return changed


def with_one_sample(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a batch without samples as one empty sample, with a batch size per feature too."""
    keys = features.keys()
    if features.variable_stride_per_key():
        sizes = features.stride_per_key()
        lengths_of_keys = features.lengths().split(sizes)
        names, bags = features.inverse_indices()
        return KeyedJaggedTensor(
            keys=keys,
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=torch.cat([of if of.numel() else of.new_zeros(1) for of in lengths_of_keys]),
            stride_per_key_per_rank=[[max(size, 1)] for size in sizes],
            inverse_indices=(names, bags.new_zeros(len(names), 1)),
        )
    # of the dtype that other ranks send
    lengths = torch.zeros(len(keys), dtype=features.lengths().dtype, device=features.device())
    return KeyedJaggedTensor(
        keys=keys,
        values=features.values(),
        weights=features.weights_or_none(),  # other ranks send theirs
        lengths=lengths,
        stride=1,
    )


__all__ = [
    "BatchCheck",
    "check_processed",
    "copied",
    "missing_weights",
    "scored_features",
    "with_ids",
    "with_one_sample",
]
