"""Conversions of ragged rows of many features to dense and sparse tensors, and back.

Lists have an entry per feature. Rows of a feature are values of any dtype of 1, 2, 4 or 8 bytes and
int64 offsets [rows + 1], which ascend from 0 to the number of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    begins,
    flat,
    of_any_size,
    split,
)


class Ragged(NamedTuple):
    """A feature of :func:`dense_to_ragged`.

    Attributes:
        values: [n] of the dtype given, one after another.
        offsets: int64 [parts + 1] of each depth, from outermost to innermost.
    """

    values: Tensor
    offsets: list[Tensor]


def _check_depths(
    op: str,
    values: Sequence[Tensor],
    offsets: Sequence[Sequence[Tensor]],
    lengths: Sequence[Sequence[int]],
) -> list[int]:
    """Return the depth of each feature."""
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
    """Return a number as a float and an integer; kernels take their bits from one of them."""
    integral = math.isfinite(value) and value == int(value)
    for tensor in tensors:
        if not tensor.dtype.is_floating_point and not integral:
            raise ValueError(
                f"{op}: {name} is {value}, expected an integer for values of {tensor.dtype}"
            )
    fits = integral and -(2**63) <= value < 2**63
    return float(value), int(value) if fits else 0


@raises_typed_errors
def ragged_to_dense(
    values: Sequence[Tensor],
    offsets: Sequence[Sequence[Tensor]],
    *,
    lengths: Sequence[Sequence[int]],
    padding_value: float = 0,
) -> list[Tensor]:
    """Pad ragged rows of any depth; differentiable in float values.

    Args:
        values: [N] of any dtype.
        offsets: int64 [parts + 1] of each depth, from outermost to innermost: where the rows begin,
            then their parts. Features of a call may differ in depth.
        lengths: sizes of dense dimensions 1, 2, ...
        padding_value: value at the places that a shorter row does not fill.

    Returns:
        [rows, *lengths] for each feature.

    Raises:
        ValueError: offsets and lengths do not match, or a dtype cannot hold padding_value.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to the
            number of parts or values. Or a row is longer than its dense dimension (on a GPU:
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
        list(values), flat(offsets), depths, flat(lengths), *padding
    )
    return dense


@raises_typed_errors
def ragged_to_sparse(
    values: Sequence[Tensor],
    offsets: Sequence[Sequence[Tensor]],
    *,
    lengths: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Convert ragged rows of any depth to sparse COO tensors; differentiable in float values.

    Args:
        values: [N] of any dtype.
        offsets: int64 [parts + 1] of each depth, from outermost to innermost: where the rows begin,
            then their parts. Features of a call may differ in depth.
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
        [value.detach() for value in values], flat(offsets), depths, flat(lengths)
    )
    return [
        torch.sparse_coo_tensor(
            indices,
            value,
            (of_feature[0].shape[0] - 1, *sizes),
            device=value.device,
            is_coalesced=True,
            check_invariants=False,
        )
        for indices, value, of_feature, sizes in zip(
            all_indices, values, offsets, lengths, strict=True
        )
    ]


@raises_typed_errors
def dense_to_ragged(dense: Sequence[Tensor], *, invalid_value: float | None = None) -> list[Ragged]:
    """Convert dense tensors to ragged rows; differentiable in float values.

    Args:
        dense: [n0, ..., nk] of any dtype, k >= 1.
        invalid_value: rows of the last dimension lose their trailing run of it; None: they keep
            all.

    Returns:
        For each feature values and k offsets; all but the innermost are regular.

    Raises:
        ValueError: invalid_value is NaN, which equals nothing, or a dtype cannot hold it.
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
        for value, begin, depth in zip(values, begins(depths), depths, strict=False)
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
    values = of_any_size(dense) if trim else [t.new_empty((t.numel(),)) for t in dense]
    return values, offsets


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
        for f, begin in enumerate(begins(depths)[:-1]):
            if grads[f] is None or not needed[f]:
                continue
            of_feature = offsets[begin : begin + depths[f]]
            (result[f],) = torch.ops.dynemb.ragged_to_dense(
                [grads[f].contiguous()], of_feature, [depths[f]], inputs[f].shape[1:], 0.0, 0
            )
        return result

    call = lambda: tuple(flat(below_autograd(op, keyset, arguments)))  # noqa: E731
    return split(differentiable(call, backward, dense), (features, sum(depths)))


register_autograd_kernel("ragged_to_dense", _to_dense_autograd)


register_autograd_kernel("dense_to_ragged", _dense_to_ragged_autograd)
