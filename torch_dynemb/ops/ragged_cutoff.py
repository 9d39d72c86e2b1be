"""Parts of the rows of many features: one call, and on a GPU a constant number of launches.

Lists have an entry per feature. Rows of a feature are values of any dtype of 1, 2, 4 or 8 bytes and
int64 offsets [rows + 1], which ascend from 0 to the number of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.autograd import (
    Tensors,
    below_autograd,
    differentiable,
    needs_grad,
    register_autograd_kernel,
)
from torch_dynemb.ops.ragged_lists import (
    Weights,
    all_weights,
    check_weights_length,
    flags,
    flat,
    gathered,
    given_weights,
    of_any_size,
    offsets_among,
    split,
)


class CutRagged(NamedTuple):
    """Result of :func:`ragged_cutoff_2d` and :func:`ragged_topk_index_cutoff`.

    Attributes:
        values: [n] of the dtype given: the remaining values, per feature.
        offsets: int64 [rows + 1], per feature.
        weights: float32 [n], weights of the values; None for a feature without.
    """

    values: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor | None]


class CutRagged3D(NamedTuple):
    """Result of :func:`ragged_cutoff_3d`.

    Attributes:
        values: [n] of the dtype given: the remaining values, per feature.
        outer_offsets: int64 [rows + 1], multiples of keep_length.
        inner_offsets: int64 [rows * keep_length + 1].
        weights: float32 [n], weights of the values; None for a feature without.
    """

    values: list[Tensor]
    outer_offsets: list[Tensor]
    inner_offsets: list[Tensor]
    weights: list[Tensor | None]


@raises_typed_errors
def ragged_cutoff_2d(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    keep_lengths: Sequence[int],
    *,
    weights: Weights = None,
    drop_left: Sequence[bool] | None = None,
) -> CutRagged:
    """Keep at most ``keep_length`` values of every row; differentiable in float values and weights.

    Args:
        values: [N] of any dtype.
        offsets: int64 [rows + 1].
        keep_lengths: how many values a row of each feature keeps.
        weights: float32 [N], or None for a feature without; cut with the values.
        drop_left: whether longer rows lose their first values; default: their last.

    Raises:
        ValueError: the number of weights is not that of features.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to N.

    Example:
        >>> values, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 4])
        >>> cut = ragged_cutoff_2d([values], [offsets], [2])
        >>> cut.values[0].tolist(), cut.offsets[0].tolist()
        ([1, 2, 4], [0, 2, 3])
    """
    check_weights_length("ragged_cutoff_2d", "weights", weights, len(values))
    given, weighted = given_weights(weights)
    cut_values, cut_offsets, cut_weights = torch.ops.dynemb.ragged_cutoff_2d(
        list(values),
        list(offsets),
        given,
        weighted,
        list(keep_lengths),
        flags(drop_left, len(values)),
    )
    return CutRagged(cut_values, cut_offsets, all_weights(cut_weights, weighted, len(values)))


@raises_typed_errors
def ragged_cutoff_3d(
    values: Sequence[Tensor],
    outer_offsets: Sequence[Tensor],
    inner_offsets: Sequence[Tensor],
    keep_lengths: Sequence[int],
    *,
    weights: Weights = None,
    drop_left: Sequence[bool] | None = None,
    pad_left: Sequence[bool] | None = None,
) -> CutRagged3D:
    """Cut or pad rows to ``keep_length`` inner lists; differentiable in float values and weights.

    A row with more lists loses some, with all their values; one with fewer gets empty ones.

    Args:
        values: [N] of any dtype.
        outer_offsets: int64 [rows + 1], where the lists of a row begin.
        inner_offsets: int64 [lists + 1], where the values of a list begin.
        keep_lengths: how many lists a row of each feature has afterwards.
        weights: float32 [N], or None for a feature without; cut with the values.
        drop_left: whether longer rows lose their first lists; default: their last.
        pad_left: whether empty lists precede those of a shorter row; default: they follow.

    Raises:
        ValueError: the number of weights is not that of features.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to the
            number of lists or values.

    Example:
        >>> values = torch.tensor([1, 2, 3])
        >>> outer, inner = torch.tensor([0, 2, 2]), torch.tensor([0, 2, 3])
        >>> cut = ragged_cutoff_3d([values], [outer], [inner], [1])
        >>> cut.values[0].tolist(), cut.inner_offsets[0].tolist()
        ([1, 2], [0, 2, 2])
    """
    check_weights_length("ragged_cutoff_3d", "weights", weights, len(values))
    given, weighted = given_weights(weights)
    cut_values, cut_outer, cut_inner, cut_weights = torch.ops.dynemb.ragged_cutoff_3d(
        list(values),
        list(outer_offsets),
        list(inner_offsets),
        given,
        weighted,
        list(keep_lengths),
        flags(drop_left, len(values)),
        flags(pad_left, len(values)),
    )
    return CutRagged3D(
        cut_values, cut_outer, cut_inner, all_weights(cut_weights, weighted, len(values))
    )


@raises_typed_errors
def ragged_topk_index_cutoff(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    indices: Sequence[Tensor],
    *,
    weights: Weights = None,
) -> CutRagged:
    """Take the values of every row at given positions; differentiable in float values and weights.

    Args:
        values: [N] of any dtype.
        offsets: int64 [rows + 1].
        indices: int64 [rows, k], positions within the row, in the order of the result. Positions
            outside the row are left out.
        weights: float32 [N], or None for a feature without; taken with the values.

    Raises:
        ValueError: the number of weights is not that of features.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to N.

    Example:
        >>> values, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 4])
        >>> cut = ragged_topk_index_cutoff([values], [offsets], [torch.tensor([[2, 0], [-1, 0]])])
        >>> cut.values[0].tolist(), cut.offsets[0].tolist()
        ([3, 1, 4], [0, 2, 3])
    """
    check_weights_length("ragged_topk_index_cutoff", "weights", weights, len(values))
    given, weighted = given_weights(weights)
    cut_values, cut_offsets, cut_weights = torch.ops.dynemb.ragged_topk_index_cutoff(
        list(values), list(offsets), list(indices), given, weighted
    )
    return CutRagged(cut_values, cut_offsets, all_weights(cut_weights, weighted, len(values)))


def _taken(
    values: Sequence[Tensor], weights: Sequence[Tensor], weighted: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return values of unknown number, and as many weights."""
    taken = of_any_size(values)
    return taken, [
        weight.new_empty(taken[f].shape) for f, weight in zip(weighted, weights, strict=True)
    ]


@register_fake("ragged_cutoff_2d")
def _cutoff_2d_fake(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    weighted: Sequence[int],
    keep_lengths: Sequence[int],
    drop_left: Sequence[int],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    taken, taken_weights = _taken(values, weights, weighted)
    return taken, [torch.empty_like(tensor) for tensor in offsets], taken_weights


@register_fake("ragged_cutoff_3d")
def _cutoff_3d_fake(
    values: Sequence[Tensor],
    outer_offsets: Sequence[Tensor],
    inner_offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    weighted: Sequence[int],
    keep_lengths: Sequence[int],
    drop_left: Sequence[int],
    pad_left: Sequence[int],
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    taken, taken_weights = _taken(values, weights, weighted)
    inner = [
        outer.new_empty(((outer.shape[0] - 1) * keep + 1,))
        for outer, keep in zip(outer_offsets, keep_lengths, strict=True)
    ]
    return taken, [torch.empty_like(tensor) for tensor in outer_offsets], inner, taken_weights


@register_fake("ragged_topk_index_cutoff")
def _topk_fake(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    indices: Sequence[Tensor],
    weights: Sequence[Tensor],
    weighted: Sequence[int],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    taken, taken_weights = _taken(values, weights, weighted)
    return taken, [torch.empty_like(tensor) for tensor in offsets], taken_weights


def _places(rows: Tensor, begin: Tensor, cut: Tensor, count: int) -> Tensor:
    """Return the position of each of ``count`` values among the kept ones; -1: it was cut.

    Args:
        rows: [rows + 1], where rows begin.
        begin: [rows], the first value that a row keeps.
        cut: [rows + 1], where rows begin in the result.
    """
    row = torch.arange(begin.shape[0], device=begin.device)
    row = row.repeat_interleave(rows.diff(), output_size=count)
    within = torch.arange(count, device=begin.device) - begin[row]
    valid = (within >= 0) & (within < cut.diff()[row])
    return torch.where(valid, cut[:-1][row] + within, -1)


def _kept_begin(offsets: Tensor, kept: Tensor, drop_left: int) -> Tensor:
    return offsets[1:] - kept if drop_left else offsets[:-1]


def _cut_gradients(
    places_of: Callable[[int], Tensor],
    inputs: Tensors,
    grads: Sequence[Tensor | None],
    weighted: Sequence[int],
    needed: Sequence[bool],
    features: int,
) -> list[Tensor | None]:
    """Return gradients of all inputs: values first, weights last, as among the outputs."""
    result: list[Tensor | None] = [None] * len(inputs)
    pairs = [(f, f, f) for f in range(features)]
    for k, f in enumerate(reversed(weighted), start=1):
        pairs.append((f, len(inputs) - k, len(grads) - k))
    places: dict[int, Tensor] = {}
    for feature, of_input, of_output in pairs:
        grad = grads[of_output]
        if grad is None or not needed[of_input]:
            continue
        if feature not in places:
            places[feature] = places_of(feature)
        result[of_input] = gathered(grad, places[feature])
    return result


def _cutoff_2d_autograd(
    keyset: Any,
    values: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    weighted: list[int],
    keep_lengths: list[int],
    drop_left: list[int],
) -> Any:
    op = torch.ops.dynemb.ragged_cutoff_2d.default
    arguments = (values, offsets, weights, weighted, keep_lengths, drop_left)
    if not needs_grad(*values, *weights):
        return below_autograd(op, keyset, arguments)
    features = len(values)

    def backward(inputs: Tensors, fixed: Tensors, grads: Any, needed: Any) -> Any:
        (cut_offsets,) = offsets_among(fixed, features, 1)

        def places_of(f: int) -> Tensor:
            rows, cut = inputs[features + f], cut_offsets[f]
            begin = _kept_begin(rows, cut.diff(), drop_left[f])
            return _places(rows, begin, cut, inputs[f].shape[0])

        return _cut_gradients(places_of, inputs, grads, weighted, needed, features)

    call = lambda: tuple(flat(below_autograd(op, keyset, arguments)))  # noqa: E731
    outputs = differentiable(call, backward, [*values, *offsets, *weights])
    return split(outputs, (features, features, len(weights)))


def _cutoff_3d_autograd(
    keyset: Any,
    values: list[Tensor],
    outer_offsets: list[Tensor],
    inner_offsets: list[Tensor],
    weights: list[Tensor],
    weighted: list[int],
    keep_lengths: list[int],
    drop_left: list[int],
    pad_left: list[int],
) -> Any:
    op = torch.ops.dynemb.ragged_cutoff_3d.default
    arguments = (
        values,
        outer_offsets,
        inner_offsets,
        weights,
        weighted,
        keep_lengths,
        drop_left,
        pad_left,
    )
    if not needs_grad(*values, *weights):
        return below_autograd(op, keyset, arguments)
    features = len(values)

    def backward(inputs: Tensors, fixed: Tensors, grads: Any, needed: Any) -> Any:
        cut_outer, cut_inner = offsets_among(fixed, features, 2)

        def places_of(f: int) -> Tensor:
            outer, inner = inputs[features + f], inputs[2 * features + f]
            kept = outer.diff().clamp(max=keep_lengths[f])
            begin = inner[_kept_begin(outer, kept, drop_left[f])]
            cut = cut_inner[f][cut_outer[f]]
            return _places(inner[outer], begin, cut, inputs[f].shape[0])

        return _cut_gradients(places_of, inputs, grads, weighted, needed, features)

    call = lambda: tuple(flat(below_autograd(op, keyset, arguments)))  # noqa: E731
    outputs = differentiable(call, backward, [*values, *outer_offsets, *inner_offsets, *weights])
    return split(outputs, (features, features, features, len(weights)))


def _spread_indices(
    grad: Tensor | None, needed: bool, offsets: Tensor, indices: Tensor, given: Tensor
) -> Tensor | None:
    """Scatter the gradient of values taken at ``indices``, by tensors of fixed size."""
    if grad is None or not needed:
        return None
    valid = (indices >= 0) & (indices < offsets.diff()[:, None])
    rank = torch.where(valid.flatten(), valid.flatten().cumsum(0) - 1, -1)
    beyond = given.shape[0]  # position of the zeros of values that were left out
    source = torch.where(valid, offsets[:-1, None] + indices, beyond).flatten()
    terms = gathered(grad, rank)
    return given.new_zeros(beyond + 1).index_add(0, source, terms)[:-1]


def _topk_autograd(
    keyset: Any,
    values: list[Tensor],
    offsets: list[Tensor],
    indices: list[Tensor],
    weights: list[Tensor],
    weighted: list[int],
) -> Any:
    op = torch.ops.dynemb.ragged_topk_index_cutoff.default
    arguments = (values, offsets, indices, weights, weighted)
    if not needs_grad(*values, *weights):
        return below_autograd(op, keyset, arguments)
    features = len(values)

    def backward(inputs: Tensors, fixed: Tensors, grads: Any, needed: Any) -> Any:
        result: list[Tensor | None] = [None] * len(inputs)
        places = [(f, f, f) for f in range(features)]
        places += [(f, 3 * features + k, 2 * features + k) for k, f in enumerate(weighted)]
        for f, of_input, of_output in places:
            result[of_input] = _spread_indices(
                grads[of_output],
                needed[of_input],
                inputs[features + f],
                inputs[2 * features + f],
                inputs[of_input],
            )
        return result

    call = lambda: tuple(flat(below_autograd(op, keyset, arguments)))  # noqa: E731
    outputs = differentiable(call, backward, [*values, *offsets, *indices, *weights])
    return split(outputs, (features, features, len(weights)))


register_autograd_kernel("ragged_cutoff_2d", _cutoff_2d_autograd)


register_autograd_kernel("ragged_cutoff_3d", _cutoff_3d_autograd)


register_autograd_kernel("ragged_topk_index_cutoff", _topk_autograd)
