"""Bags of ids for lookups, from dense tensors of any rank and from ragged tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.nn.inputs import flat_ids, flat_weights
from torch_dynemb.recis.ragged.places import dense_places
from torch_dynemb.recis.ragged.tensor import RaggedTensor
from torch_dynemb.table.given_scores import custom_scores

Ids = Tensor | RaggedTensor
_LEAST_TOO_LARGE = 2.0**63  # score


class Bags(NamedTuple):
    """Ids of a feature, with one bag for each row of the innermost dimension.

    Attributes:
        ids: int64 [n].
        offsets: int64 [bags + 1].
        weights: float32 [n] or None.
        shape: of the bags, in a dense tensor.
        places: int64 [bags], flat position of each bag in ``shape``; None: in order, without gaps.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    shape: tuple[int, ...]
    places: Tensor | None

    def placed(self, rows: Tensor) -> Tensor:
        """Place rows of the bags, [bags, columns], in the shape of the input; gaps are zeros."""
        if len(self.shape) == 1:
            return rows
        if self.places is not None:
            dense = rows.new_zeros(math.prod(self.shape), rows.shape[1])
            rows = dense.index_put((self.places,), rows)
        return rows.reshape(*self.shape, rows.shape[1])


def bags_of(owner: str, ids: Ids, weights: Tensor | None, *, use_weight: bool) -> Bags:
    """Return the bags of an input.

    Args:
        ids: int64 or int32 [..., L], with one bag per row of the last dimension; or a ragged
            tensor.
        weights: float of the shape of dense ids, or one for every value of a ragged tensor.
        use_weight: False: weights are ignored, including those of a ragged tensor.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not match, or weights are given twice.
    """
    if isinstance(ids, RaggedTensor):
        return _ragged_bags(owner, ids, weights, use_weight)
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"{owner} is a {type(ids).__name__}, expected a Tensor or a RaggedTensor: "
            "RaggedTensor(values, row_splits) makes one of two tensors, torch.from_numpy converts "
            "an array"
        )
    if ids.dim() == 0 or ids.layout != torch.strided:
        raise ValueError(
            f"{owner} has shape {tuple(ids.shape)} and layout {ids.layout}, expected a dense "
            "tensor of at least 1 dimension; rows of the last one are bags"
        )
    flat = flat_ids(owner, ids)
    shape = ids.shape[:-1]
    offsets = torch.arange(math.prod(shape) + 1, device=flat.device) * ids.shape[-1]
    return Bags(flat, offsets, _weights(owner, flat, weights, ids.shape, use_weight), shape, None)


def custom_scores_of(owner: str, given: Ids, bags: Bags, *, decays: bool) -> Tensor:
    """Return the custom scores of the ids of bags, int64 or float64 [n].

    Args:
        owner: beginning of an error's message.
        given: a number for each id, as a tensor of n values or a ragged tensor, or for each bag.
        bags: of the ids.
        decays: whether they are added to decayed sums.

    Raises:
        TypeError: ``given`` has another type, or its dtype is neither int64, int32 nor float.
        ValueError: another number of values, or another device; or, on the CPU, a value that is
            not finite or not below 2^63.
    """
    numbers = given.values() if isinstance(given, RaggedTensor) else given
    if not isinstance(numbers, Tensor):
        raise TypeError(f"{owner} is a {type(given).__name__}, expected a Tensor or a RaggedTensor")
    if not numbers.is_floating_point() and numbers.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{owner} has dtype {numbers.dtype}, expected int64, int32 or floats: its values are "
            "scores"
        )
    if numbers.device != bags.ids.device:
        raise ValueError(f"{owner} is on {numbers.device}, but ids on {bags.ids.device}")
    numbers = numbers.reshape(-1)
    ids, of_bags = bags.ids.shape[0], bags.offsets.shape[0] - 1
    if numbers.shape[0] not in (ids, of_bags):
        raise ValueError(
            f"{owner} has {numbers.shape[0]} values, expected one for each of the {ids} ids, or "
            f"for each of the {of_bags} samples"
        )
    if numbers.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = ~(numbers.double().abs() < _LEAST_TOO_LARGE)
        if bool(wrong.any()) and numbers.is_floating_point():
            raise ValueError(
                f"{owner} has {float(numbers[wrong][0])}, expected finite scores below 2^63"
            )
    scores = custom_scores(numbers, decays=decays)
    return scores if numbers.shape[0] == ids else scores.repeat_interleave(bags.offsets.diff())


def _weights(
    owner: str, ids: Tensor, weights: Tensor | None, shape: torch.Size, use_weight: bool
) -> Tensor | None:
    if weights is None:
        return None
    flat = flat_weights(f"{owner}: weights", weights, shape)
    if flat.device != ids.device:
        raise ValueError(f"{owner}: weights are on {flat.device}, but ids on {ids.device}")
    return flat if use_weight else None


def _ragged_bags(
    owner: str, ragged: RaggedTensor, weights: Tensor | None, use_weight: bool
) -> Bags:
    values, (*outer, inner) = ragged.values(), ragged.offsets()
    if values.dim() != 1:
        raise ValueError(f"{owner} has values of shape {tuple(values.shape)}, expected (N,)")
    weight = ragged.weight()
    if weights is not None and weight is not None:
        raise ValueError(f"{owner} has weights, but others are given, too: leave one of them out")
    ids = flat_ids(owner, values)
    chosen = _weights(owner, ids, weight if weights is None else weights, values.shape, use_weight)
    offsets = inner.contiguous()
    if offsets.dtype != torch.int64:
        offsets = offsets.to(torch.int64)
    bags = offsets.shape[0] - 1
    if not outer:
        return Bags(ids, offsets, chosen, (bags,), None)
    shape = ragged.real_shape(0, len(outer) + 1)
    places = None
    if math.prod(shape) != bags:
        places = dense_places(outer, shape[1:], "right")
    return Bags(ids, offsets, chosen, shape, places)


__all__ = ["Bags", "Ids", "bags_of", "custom_scores_of"]
