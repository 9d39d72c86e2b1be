"""Ragged rows of many features: one call, and on a GPU a constant number of launches, for all.

Lists have an entry per feature. Rows of a feature are values of any dtype of 1, 2, 4 or 8 bytes and
int64 offsets [rows + 1], which ascend from 0 to the number of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dynemb._library import register_fake
from torch_dynemb.ops.autograd import (
    Tensors,
    below_autograd,
    differentiable,
    needs_grad,
    register_autograd_kernel,
)


class CutRagged(NamedTuple):
    """Result of :func:`ragged_cutoff_2d` and :func:`ragged_topk_index_cutoff`.

    Attributes:
        values: what is left, per feature.
        offsets: int64 [rows + 1], per feature.
        weights: weights of the values; None for a feature without.
    """

    values: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor | None]


class CutRagged3D(NamedTuple):
    """Result of :func:`ragged_cutoff_3d`.

    Attributes:
        values: what is left, per feature.
        outer_offsets: int64 [rows + 1], multiples of keep_length.
        inner_offsets: int64 [rows * keep_length + 1].
        weights: weights of the values; None for a feature without.
    """

    values: list[Tensor]
    outer_offsets: list[Tensor]
    inner_offsets: list[Tensor]
    weights: list[Tensor | None]


class Ragged(NamedTuple):
    """A feature of :func:`dense_to_ragged`.

    Attributes:
        values: one after another.
        offsets: int64, from outermost to innermost.
    """

    values: Tensor
    offsets: list[Tensor]


class CrossedRagged(NamedTuple):
    """Result of :func:`feature_cross_ragged`.

    Attributes:
        values: int64, ids of pairs, per pair of features.
        offsets: int64 [rows + 1].
        weights: float32, a weight per id.
    """

    values: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor]


Weights = Sequence[Tensor | None] | None


def _given_weights(weights: Weights) -> tuple[list[Tensor], list[int]]:
    """The weights that there are, and whose they are."""
    numbered = [(f, w) for f, w in enumerate(weights or ()) if w is not None]
    return [w for _, w in numbered], [f for f, _ in numbered]


def _all_weights(weights: list[Tensor], weighted: list[int], features: int) -> list[Tensor | None]:
    result: list[Tensor | None] = [None] * features
    for feature, weight in zip(weighted, weights, strict=True):
        result[feature] = weight
    return result


def _flags(flags: Sequence[bool] | None, features: int) -> list[int]:
    return [0] * features if flags is None else [int(flag) for flag in flags]


def _check_weights_length(op: str, name: str, weights: Weights, features: int) -> None:
    if weights is not None and len(weights) != features:
        raise ValueError(
            f"{op}: {name} has {len(weights)} entries, expected one, or None, for each of "
            f"{features} features"
        )


def ragged_cutoff_2d(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    keep_lengths: Sequence[int],
    *,
    weights: Weights = None,
    drop_left: Sequence[bool] | None = None,
) -> CutRagged:
    """At most ``keep_length`` values of every row; differentiable in float values and weights.

    Args:
        values: [N] of any dtype.
        offsets: int64 [rows + 1].
        keep_lengths: how many values a row of each feature keeps.
        weights: float32 [N], or None for a feature without; cut with the values.
        drop_left: whether longer rows lose their first values; default: their last.

    Raises:
        ValueError: weights are not as many as features.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to N.

    Example:
        >>> values, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 4])
        >>> cut = ragged_cutoff_2d([values], [offsets], [2])
        >>> cut.values[0].tolist(), cut.offsets[0].tolist()
        ([1, 2, 4], [0, 2, 3])
    """
    _check_weights_length("ragged_cutoff_2d", "weights", weights, len(values))
    given, weighted = _given_weights(weights)
    cut_values, cut_offsets, cut_weights = torch.ops.dynemb.ragged_cutoff_2d(
        list(values),
        list(offsets),
        given,
        weighted,
        list(keep_lengths),
        _flags(drop_left, len(values)),
    )
    return CutRagged(cut_values, cut_offsets, _all_weights(cut_weights, weighted, len(values)))


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
    """Exactly ``keep_length`` inner lists in every row; differentiable in float values and weights.

    A row with more loses lists, with all their values; one with less gets empty ones.

    Args:
        values: [N] of any dtype.
        outer_offsets: int64 [rows + 1], where the lists of a row begin.
        inner_offsets: int64 [lists + 1], where the values of a list begin.
        keep_lengths: how many lists a row of each feature has afterwards.
        weights: float32 [N], or None for a feature without; cut with the values.
        drop_left: whether longer rows lose their first lists; default: their last.
        pad_left: whether empty lists stand before those of a shorter row; default: after them.

    Raises:
        ValueError: weights are not as many as features.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to the
            number of lists or values.

    Example:
        >>> values = torch.tensor([1, 2, 3])
        >>> outer, inner = torch.tensor([0, 2, 2]), torch.tensor([0, 2, 3])
        >>> cut = ragged_cutoff_3d([values], [outer], [inner], [1])
        >>> cut.values[0].tolist(), cut.inner_offsets[0].tolist()
        ([1, 2], [0, 2, 2])
    """
    _check_weights_length("ragged_cutoff_3d", "weights", weights, len(values))
    given, weighted = _given_weights(weights)
    cut_values, cut_outer, cut_inner, cut_weights = torch.ops.dynemb.ragged_cutoff_3d(
        list(values),
        list(outer_offsets),
        list(inner_offsets),
        given,
        weighted,
        list(keep_lengths),
        _flags(drop_left, len(values)),
        _flags(pad_left, len(values)),
    )
    return CutRagged3D(
        cut_values, cut_outer, cut_inner, _all_weights(cut_weights, weighted, len(values))
    )


def ragged_topk_index_cutoff(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    indices: Sequence[Tensor],
    *,
    weights: Weights = None,
) -> CutRagged:
    """The values of every row at given positions; differentiable in float values and weights.

    Args:
        values: [N] of any dtype.
        offsets: int64 [rows + 1].
        indices: int64 [rows, k], positions within the row, in the order of the result; those
            less than 0 or beyond the row are left out.
        weights: float32 [N], or None for a feature without; taken with the values.

    Raises:
        ValueError: weights are not as many as features.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to N.

    Example:
        >>> values, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 4])
        >>> cut = ragged_topk_index_cutoff([values], [offsets], [torch.tensor([[2, 0], [-1, 0]])])
        >>> cut.values[0].tolist(), cut.offsets[0].tolist()
        ([3, 1, 4], [0, 2, 3])
    """
    _check_weights_length("ragged_topk_index_cutoff", "weights", weights, len(values))
    given, weighted = _given_weights(weights)
    cut_values, cut_offsets, cut_weights = torch.ops.dynemb.ragged_topk_index_cutoff(
        list(values), list(offsets), list(indices), given, weighted
    )
    return CutRagged(cut_values, cut_offsets, _all_weights(cut_weights, weighted, len(values)))


def _flat(nested: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for items in nested for item in items]


def _check_depths(
    op: str,
    values: Sequence[Tensor],
    offsets: Sequence[Sequence[Tensor]],
    lengths: Sequence[Sequence[int]],
) -> list[int]:
    """The depth of each feature."""
    for name, given in (("offsets", offsets), ("lengths", lengths)):
        if len(given) != len(values):
            raise ValueError(
                f"{op}: {name} has {len(given)} entries, expected one for each of {len(values)} "
                "features"
            )
    for feature, (one, other) in enumerate(zip(offsets, lengths, strict=True)):
        if len(one) != len(other) or not one:
            raise ValueError(
                f"{op}: feature {feature} has {len(one)} offsets and {len(other)} lengths, "
                "expected one of each for every depth"
            )
    return [len(one) for one in offsets]


def _number(op: str, name: str, value: float, tensors: Sequence[Tensor]) -> tuple[float, int]:
    """A number as the float and the integer that kernels take their bits from."""
    integral = math.isfinite(value) and value == int(value)
    for tensor in tensors:
        if not tensor.dtype.is_floating_point and not integral:
            raise ValueError(
                f"{op}: {name} is {value}, expected an integer for values of {tensor.dtype}"
            )
    fits = integral and -(2**63) <= value < 2**63
    return float(value), int(value) if fits else 0


def ragged_to_dense(
    values: Sequence[Tensor],
    offsets: Sequence[Sequence[Tensor]],
    *,
    lengths: Sequence[Sequence[int]],
    padding_value: float = 0,
) -> list[Tensor]:
    """Ragged rows of any depth, padded; differentiable in float values.

    Args:
        values: [N] of any dtype.
        offsets: int64 offsets of each depth, from outermost to innermost. Features of a call may
            differ in depth.
        lengths: sizes of dense dimensions 1, 2, ...
        padding_value: what stands where a row is shorter.

    Returns:
        [rows, *lengths] for each feature.

    Raises:
        ValueError: offsets and lengths do not match, or padding_value is no value of a dtype.
        RuntimeError: a dtype or shape does not match, offsets are not ascending from 0 to the
            number of what they divide, or a row is longer than its dense dimension (on a GPU:
            reported later, and cut).

    Example:
        >>> values, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
        >>> ragged_to_dense([values], [[offsets]], lengths=[[2]], padding_value=-1)
        [tensor([[ 1,  2],
                [ 3, -1]])]
    """
    op = "ragged_to_dense"
    depths = _check_depths(op, values, offsets, lengths)
    padding = _number(op, "padding_value", padding_value, values)
    dense: list[Tensor] = torch.ops.dynemb.ragged_to_dense(
        list(values), _flat(offsets), depths, _flat(lengths), *padding
    )
    return dense


def ragged_to_sparse(
    values: Sequence[Tensor],
    offsets: Sequence[Sequence[Tensor]],
    *,
    lengths: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Ragged rows of any depth as sparse COO tensors; differentiable in float values.

    Args:
        values: [N] of any dtype.
        offsets: int64 offsets of each depth, from outermost to innermost. Features of a call may
            differ in depth.
        lengths: sizes of dimensions 1, 2, ...

    Returns:
        Coalesced tensors of size [rows, *lengths].

    Raises:
        ValueError: offsets and lengths do not match.
        RuntimeError: as for :func:`ragged_to_dense`.

    Example:
        >>> values, offsets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 3])
        >>> (sparse,) = ragged_to_sparse([values], [[offsets]], lengths=[[4]])
        >>> sparse.indices().tolist(), tuple(sparse.shape)
        ([[0, 0, 1], [0, 1, 0]], (2, 4))
    """
    depths = _check_depths("ragged_to_sparse", values, offsets, lengths)
    all_indices = torch.ops.dynemb.ragged_indices(
        [value.detach() for value in values], _flat(offsets), depths, _flat(lengths)
    )
    return [
        torch.sparse_coo_tensor(
            indices,
            value,
            (of_feature[0].shape[0] - 1, *sizes),
            is_coalesced=True,
            check_invariants=False,
        )
        for indices, value, of_feature, sizes in zip(
            all_indices, values, offsets, lengths, strict=True
        )
    ]


def dense_to_ragged(dense: Sequence[Tensor], *, invalid_value: float | None = None) -> list[Ragged]:
    """Dense tensors as ragged rows; differentiable in float values.

    Args:
        dense: [n0, ..., nk] of any dtype, k >= 1.
        invalid_value: rows of the last dimension lose their trailing run of it; None: they keep
            all.

    Returns:
        For each feature values and k offsets; all but the innermost are regular.

    Raises:
        ValueError: invalid_value is NaN, which equals nothing, or no value of a dtype.
        RuntimeError: a tensor has less than 2 dimensions or is not contiguous.

    Example:
        >>> (ragged,) = dense_to_ragged([torch.tensor([[1, 0, 0], [0, 2, 3]])], invalid_value=0)
        >>> ragged.values.tolist(), ragged.offsets[0].tolist()
        ([1, 0, 2, 3], [0, 1, 4])
    """
    op = "dense_to_ragged"
    if invalid_value is not None and math.isnan(invalid_value):
        raise ValueError(f"{op}: invalid_value is nan, which equals nothing")
    invalid = _number(op, "invalid_value", invalid_value or 0, dense)
    values, offsets = torch.ops.dynemb.dense_to_ragged(
        list(dense), invalid_value is not None, *invalid
    )
    result: list[Ragged] = []
    for tensor, value in zip(dense, values, strict=True):
        depth = tensor.dim() - 1
        result.append(Ragged(value, offsets[:depth]))
        offsets = offsets[depth:]
    return result


def feature_cross_ragged(
    x_values: Sequence[Tensor],
    x_offsets: Sequence[Tensor],
    y_values: Sequence[Tensor],
    y_offsets: Sequence[Tensor],
    *,
    x_weights: Weights = None,
    y_weights: Weights = None,
) -> CrossedRagged:
    """Ids of all pairs of the ids of two features, row by row.

    A row gives for every distinct x and every distinct y, both in order of first occurrence, x by
    x, the id ``mix_id(mix_id(x) + y)`` (see :func:`mix_ids`). Its weight is the product of the
    weights of x and y; an id that occurs several times in a row has the sum of its weights there.

    Args:
        x_values, y_values: int64 [N].
        x_offsets, y_offsets: int64 [rows + 1], of the same number of rows.
        x_weights, y_weights: float32 [N], or None for a feature without, whose weights are 1.

    Raises:
        ValueError: weights require grad, for which there is no formula, or are not as many as
            features.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to N.

    Example:
        >>> x, y, offsets = torch.tensor([7, 7, 8]), torch.tensor([1, 2, 3]), torch.tensor([0, 3])
        >>> crossed = feature_cross_ragged([x], [offsets], [y], [offsets])
        >>> crossed.offsets[0].tolist(), crossed.weights[0].tolist()
        ([0, 6], [2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    """
    op = "feature_cross_ragged"
    for name, weights in (("x_weights", x_weights), ("y_weights", y_weights)):
        _check_weights_length(op, name, weights, len(x_values))
        for feature, weight in enumerate(weights or ()):
            if weight is not None and weight.requires_grad:
                raise ValueError(
                    f"{op}: {name}[{feature}] requires grad, expected weights without: detach them"
                )
    return CrossedRagged(
        *torch.ops.dynemb.feature_cross_ragged(
            list(x_values),
            list(x_offsets),
            list(y_values),
            list(y_offsets),
            *_given_weights(x_weights),
            *_given_weights(y_weights),
        )
    )


# -- fake implementations ------------------------------------------------------------------------


def _of_any_size(tensors: Sequence[Tensor]) -> list[Tensor]:
    context = torch.library.get_ctx()
    return [tensor.new_empty((context.new_dynamic_size(),)) for tensor in tensors]


def _taken(
    values: Sequence[Tensor], weights: Sequence[Tensor], weighted: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Values of any number, and as many weights."""
    taken = _of_any_size(values)
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


def _begins(depths: Sequence[int]) -> list[int]:
    """Where the offsets of each feature begin."""
    begins = [0]
    for depth in depths:
        begins.append(begins[-1] + depth)
    return begins


@register_fake("ragged_to_dense")
def _to_dense_fake(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    depths: Sequence[int],
    lengths: Sequence[int],
    padding: float,
    integer_padding: int,
) -> list[Tensor]:
    return [
        value.new_empty((offsets[begin].shape[0] - 1, *lengths[begin : begin + depth]))
        for value, begin, depth in zip(values, _begins(depths), depths, strict=False)
    ]


@register_fake("ragged_indices")
def _indices_fake(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    depths: Sequence[int],
    lengths: Sequence[int],
) -> list[Tensor]:
    return [
        value.new_empty((depth + 1, value.shape[0]), dtype=torch.int64)
        for value, depth in zip(values, depths, strict=True)
    ]


@register_fake("dense_to_ragged")
def _dense_to_ragged_fake(
    dense: Sequence[Tensor], trim: bool, invalid: float, integer_invalid: int
) -> tuple[list[Tensor], list[Tensor]]:
    offsets: list[Tensor] = []
    for tensor in dense:
        parts: Any = 1
        for size in tensor.shape[:-1]:
            parts *= size
            offsets.append(tensor.new_empty((parts + 1,), dtype=torch.int64))
    values = _of_any_size(dense) if trim else [t.new_empty((t.numel(),)) for t in dense]
    return values, offsets


@register_fake("feature_cross_ragged")
def _cross_fake(
    x_values: Sequence[Tensor],
    x_offsets: Sequence[Tensor],
    y_values: Sequence[Tensor],
    y_offsets: Sequence[Tensor],
    x_weights: Sequence[Tensor],
    x_weighted: Sequence[int],
    y_weights: Sequence[Tensor],
    y_weighted: Sequence[int],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    values = _of_any_size(x_values)
    weights = [value.new_empty(value.shape, dtype=torch.float32) for value in values]
    return values, [torch.empty_like(tensor) for tensor in x_offsets], weights


# -- autograd ------------------------------------------------------------------------------------


# The sizes of the gradients are known to nobody before the forward has run, so that a compiled
# backward cannot be told them: these formulas do not ask.
def _gathered(grad: Tensor, places: Tensor) -> Tensor:
    """Gradients at ``places``; 0 where these are -1."""
    return F.pad(grad, (0, 1))[places]


def _places(rows: Tensor, begin: Tensor, cut: Tensor, count: int) -> Tensor:
    """Where each of ``count`` values stands among those that were kept; -1: it was not.

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
    """Gradients of all inputs: values first, weights last, as among the outputs."""
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
        result[of_input] = _gathered(grad, places[feature])
    return result


def _offsets_among(fixed: Tensors, features: int, lists: int) -> list[list[Tensor]]:
    """Lists of offsets at the end of what outputs have no gradient."""
    given = fixed[len(fixed) - lists * features :]
    return [list(given[k * features : (k + 1) * features]) for k in range(lists)]


def _split(outputs: Tensors, sizes: Sequence[int]) -> tuple[list[Tensor], ...]:
    begins = _begins(sizes)
    return tuple(list(outputs[begin:end]) for begin, end in pairwise(begins))


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
        (cut_offsets,) = _offsets_among(fixed, features, 1)

        def places_of(f: int) -> Tensor:
            rows, cut = inputs[features + f], cut_offsets[f]
            begin = _kept_begin(rows, cut.diff(), drop_left[f])
            return _places(rows, begin, cut, inputs[f].shape[0])

        return _cut_gradients(places_of, inputs, grads, weighted, needed, features)

    call = lambda: tuple(_flat(below_autograd(op, keyset, arguments)))  # noqa: E731
    flat = differentiable(call, backward, [*values, *offsets, *weights])
    return _split(flat, (features, features, len(weights)))


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
        cut_outer, cut_inner = _offsets_among(fixed, features, 2)

        def places_of(f: int) -> Tensor:
            outer, inner = inputs[features + f], inputs[2 * features + f]
            kept = outer.diff().clamp(max=keep_lengths[f])
            begin = inner[_kept_begin(outer, kept, drop_left[f])]
            cut = cut_inner[f][cut_outer[f]]
            return _places(inner[outer], begin, cut, inputs[f].shape[0])

        return _cut_gradients(places_of, inputs, grads, weighted, needed, features)

    call = lambda: tuple(_flat(below_autograd(op, keyset, arguments)))  # noqa: E731
    flat = differentiable(call, backward, [*values, *outer_offsets, *inner_offsets, *weights])
    return _split(flat, (features, features, features, len(weights)))


def _spread_indices(
    grad: Tensor | None, needed: bool, offsets: Tensor, indices: Tensor, given: Tensor
) -> Tensor | None:
    """The gradient of values of which those at ``indices`` were taken, by tensors of fixed size."""
    if grad is None or not needed:
        return None
    valid = (indices >= 0) & (indices < offsets.diff()[:, None])
    rank = torch.where(valid.flatten(), valid.flatten().cumsum(0) - 1, -1)
    beyond = given.shape[0]  # where the zeros of what was left out go
    source = torch.where(valid, offsets[:-1, None] + indices, beyond).flatten()
    terms = _gathered(grad, rank)
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

    call = lambda: tuple(_flat(below_autograd(op, keyset, arguments)))  # noqa: E731
    flat = differentiable(call, backward, [*values, *offsets, *indices, *weights])
    return _split(flat, (features, features, len(weights)))


def _to_dense_autograd(
    keyset: Any,
    values: list[Tensor],
    offsets: list[Tensor],
    depths: list[int],
    lengths: list[int],
    padding: float,
    integer_padding: int,
) -> Any:
    op = torch.ops.dynemb.ragged_to_dense.default
    arguments = (values, offsets, depths, lengths, padding, integer_padding)
    if not needs_grad(*values):
        return below_autograd(op, keyset, arguments)
    features = len(values)

    def backward(inputs: Tensors, _: Tensors, grads: Any, needed: Any) -> Any:
        all_indices = torch.ops.dynemb.ragged_indices(
            inputs[:features], inputs[features:], depths, lengths
        )
        result: list[Tensor | None] = [None] * len(inputs)
        for f, (grad, indices) in enumerate(zip(grads, all_indices, strict=True)):
            if grad is not None and needed[f]:
                result[f] = grad[tuple(indices)]
        return result

    call = lambda: tuple(below_autograd(op, keyset, arguments))  # noqa: E731
    return list(differentiable(call, backward, [*values, *offsets]))


def _dense_to_ragged_autograd(
    keyset: Any, dense: list[Tensor], trim: bool, invalid: float, integer_invalid: int
) -> Any:
    op = torch.ops.dynemb.dense_to_ragged.default
    arguments = (dense, trim, invalid, integer_invalid)
    if not needs_grad(*dense):
        return below_autograd(op, keyset, arguments)
    features = len(dense)
    depths = [tensor.dim() - 1 for tensor in dense]

    def backward(inputs: Tensors, fixed: Tensors, grads: Any, needed: Any) -> Any:
        offsets = fixed[len(fixed) - sum(depths) :]
        result: list[Tensor | None] = [None] * features
        for f, begin in enumerate(_begins(depths)[:-1]):
            if grads[f] is None or not needed[f]:
                continue
            of_feature = offsets[begin : begin + depths[f]]
            (result[f],) = torch.ops.dynemb.ragged_to_dense(
                [grads[f].contiguous()], of_feature, [depths[f]], inputs[f].shape[1:], 0.0, 0
            )
        return result

    call = lambda: tuple(_flat(below_autograd(op, keyset, arguments)))  # noqa: E731
    return _split(differentiable(call, backward, dense), (features, sum(depths)))


register_autograd_kernel("ragged_cutoff_2d", _cutoff_2d_autograd)
register_autograd_kernel("ragged_cutoff_3d", _cutoff_3d_autograd)
register_autograd_kernel("ragged_topk_index_cutoff", _topk_autograd)
register_autograd_kernel("ragged_to_dense", _to_dense_autograd)
register_autograd_kernel("dense_to_ragged", _dense_to_ragged_autograd)
