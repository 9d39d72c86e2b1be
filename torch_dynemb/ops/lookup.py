"""Lookups of rows by handle: pooled and per id, for training and for inference.

The training ops are functional and differentiable. Their backward updates the rows in place with
the optimizer named in the call; the rows themselves have no gradient. ``grad_anchor`` is a float32
[1] tensor that requires grad, so that autograd runs the backward at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.autograd import below_autograd, needs_grad, register_autograd_kernel
from torch_dynemb.ops.columns import ROW_CLOCK_EXTRA, Pooling, RowClock
from torch_dynemb.ops.gradient import bag_weight_grad
from torch_dynemb.ops.index import check_ids
from torch_dynemb.ops.open_lookups import (
    OPEN,
    SEVERAL,
    Gradient,
    end_meeting,
    meeting_of,
    opened_again,
    sum_gradients,
)
from torch_dynemb.ops.pending import PendingGradients, accumulate_grad_
from torch_dynemb.ops.tensors import IndexTensors, LookupBatch, RowTensors
from torch_dynemb.ops.update import APPLIES_DELAYED, NO_OPTIMIZER, OPTIMIZER_NAMES


def check_weights(op: str, batch: LookupBatch) -> None:
    """Raise unless weights of ids are float32, one for each id, and on the device of the ids."""
    per_sample_weights, ids = batch.per_sample_weights, batch.ids
    if per_sample_weights is None:
        return
    if per_sample_weights.dtype != torch.float32:
        raise TypeError(
            f"{op}: per_sample_weights has dtype {per_sample_weights.dtype}, expected float32"
        )
    if per_sample_weights.shape != ids.shape:
        raise ValueError(
            f"{op}: per_sample_weights has shape {tuple(per_sample_weights.shape)}, expected that "
            f"of ids, {tuple(ids.shape)}"
        )
    if per_sample_weights.device != ids.device:
        raise ValueError(
            f"{op}: per_sample_weights is on {per_sample_weights.device}, but ids on {ids.device}"
        )


@raises_typed_errors
def embedding(
    rows: RowTensors,
    batch: LookupBatch,
    handles: Tensor,
    grad_anchor: Tensor,
    *,
    optimizer: int,
) -> Tensor:
    """Look rows or bags up; the backward updates the rows.

    Calls ``torch.ops.dynemb.embedding_bag``, or ``embedding`` if ``batch`` asks for rows.

    Args:
        rows: of the tables. The backward changes weights, generations, state and row_clock; with
            pending tensors it changes these and row_clock.
        batch: ids and settings of the lookup; its weights get a gradient.
        handles: int64 [N], of the ids (:func:`torch_dynemb.ops.find_or_insert_`).
        grad_anchor: float32 [1]; see the module's description.
        optimizer: position in ``OPTIMIZER_NAMES``; -1: the backward leaves the rows alone. Plus
            ``APPLIES_DELAYED`` if the rows may be updated between forward and backward.

    Returns:
        float32 [B, sum of feature_dims], 0 for an empty bag; or without pooling [N, dim], 0 for
        padding ids.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights; or an unknown
            optimizer, if the backward is needed.
        RuntimeError: another argument does not fit the rows. On a GPU, wrong values of tensors are
            reported by a later op. Raised by the backward: create_graph=True, or rows that were
            updated since the forward, where the optimizer does not allow for it.
    """
    ids, offsets, weights, tables, dims, pooling = batch
    if pooling == Pooling.NONE:
        if needs_grad(grad_anchor) and _only_autograd_sees(ids, handles, offsets):
            lookup = _checked_lookup("embedding", rows, optimizer, [*tables], [*dims], pooling)
            return _differentiable(lookup, None, ids, handles, offsets, None, grad_anchor)[0]
        output, _ = torch.ops.dynemb.embedding(
            *rows, ids, handles, offsets, grad_anchor, tables, dims[0], optimizer
        )
    else:
        check_weights("embedding_bag", batch)
        if needs_grad(weights, grad_anchor) and _only_autograd_sees(ids, handles, offsets):
            lookup = _checked_lookup("embedding_bag", rows, optimizer, [*tables], [*dims], pooling)
            return _differentiable(lookup, None, ids, handles, offsets, weights, grad_anchor)[0]
        output, _ = torch.ops.dynemb.embedding_bag(
            *rows, ids, handles, offsets, weights, grad_anchor, tables, dims, pooling, optimizer
        )
    result: Tensor = output
    return result


@raises_typed_errors
def embedding_inference(
    rows: RowTensors, batch: LookupBatch, handles: Tensor, *, formats: Sequence[int] = ()
) -> Tensor:
    """Look rows or bags up without autograd: several times cheaper per call than :func:`embedding`.

    Lookups of quantized rows have the bits of lookups of their :func:`dequantize_rows`. Ids without
    a row read their initial values in float32, as where rows are float32.

    Args:
        rows: of the tables; nothing changes. ``weights`` of quantized slabs are uint8
            [rows, bytes].
        batch: ids and settings of the lookup.
        handles: int64 [N], of the ids.
        formats: a ``columns.RowFormat`` for each slab; empty: all rows are floats.

    Returns:
        float32 [B, sum of feature_dims], 0 for an empty bag; or without pooling [N, dim], 0 for
        padding ids.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights.
        RuntimeError: another argument does not fit the rows.
    """
    check_weights("embedding_inference", batch)
    ids, *asked = batch
    output: Tensor = torch.ops.dynemb.embedding_inference(*rows.read, ids, handles, *asked, formats)
    return output


def find_and_read(index: IndexTensors, rows: RowTensors, batch: LookupBatch) -> Tensor:
    """Look up for inference by ids, in one call: :func:`find`, then the rows; on the CPU only.

    Args:
        index, rows: of the tables, none of which may be a table of counts; nothing changes.
        batch: ids and settings of the lookup.

    Returns:
        float32 [B, sum of feature_dims], or [N, dim] without pooling.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids, offsets or per_sample_weights.
        RuntimeError: another argument does not fit the tables, or they are not on the CPU.
    """
    check_ids("find_and_read", index, batch.ids, batch.offsets)
    check_weights("find_and_read", batch)
    output: Tensor = _FIND_AND_READ(
        index.buckets,
        index.tables,
        index.meta,
        rows.weights,
        rows.generations,
        rows.init_data,
        *batch,
    )
    return output


def find_and_read_rows(
    index: IndexTensors, rows: RowTensors, ids: Tensor, no_offsets: Tensor
) -> Tensor:
    """Look up rows of a single table for inference, with as little overhead as possible.

    This serves calls of few ids with arguments that the caller has checked.

    Args:
        index, rows: of the table, which has no counted ids; nothing changes.
        ids: int64 [N], contiguous, on the CPU.
        no_offsets: int64 [0].

    Returns:
        float32 [N, dim].

    Raises:
        RuntimeError: an argument does not fit the table, there are several tables, or they are not
            on the CPU.
    """
    output: Tensor = _FIND_AND_READ(
        index.buckets,
        index.tables,
        index.meta,
        rows.weights,
        rows.generations,
        rows.init_data,
        ids,
        no_offsets,
    )
    return output


def lookup_output(
    op: str,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> Tensor:
    """Return the output of a lookup without values, for fake implementations."""
    rows, columns = ids.shape[0], feature_dims[0]
    if pooling != Pooling.NONE:
        if isinstance(offsets.shape[0], int) and offsets.shape[0] == 0:
            raise RuntimeError(
                f"dynemb::{op}: offsets is empty, expected where each bag begins, and the last one "
                "ends"
            )
        rows, columns = (offsets.shape[0] - 1) // len(feature_tables), sum(feature_dims)
    return ids.new_empty((rows, columns), dtype=torch.float32)


@register_fake("embedding_bag")
def _embedding_bag_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    *rows, ids, _, offsets, _, _, tables, dims, pooling, _ = arguments
    output = lookup_output("embedding_bag", ids, offsets, tables, dims, pooling)
    return output, RowTensors(*rows).row_clock.new_empty((1,))


@register_fake("embedding")
def _embedding_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    *rows, ids, _, _, _, _, dim, _ = arguments
    output = ids.new_empty((ids.shape[0], dim), dtype=torch.float32)
    return output, RowTensors(*rows).row_clock.new_empty((1,))


@register_fake("embedding_forward")
def _embedding_forward_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    row_clock: Tensor,
    meta: Tensor,
    init_data: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> tuple[Tensor, Tensor]:
    output = lookup_output("embedding_forward", ids, offsets, feature_tables, feature_dims, pooling)
    return output, row_clock.new_empty((1,))


@register_fake("find_and_read")
def _find_and_read_fake(
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    init_data: Tensor,
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    feature_tables: Sequence[int] = (),
    feature_dims: Sequence[int] = (),
    pooling: int = Pooling.NONE,
) -> Tensor:
    if not feature_tables and not feature_dims:
        if tables.shape[0] != 1 or len(weights) != 1:
            raise RuntimeError(
                "dynemb::find_and_read: feature_tables is empty, expected the table of each "
                "feature: it may be left out where there is one table"
            )
        feature_tables, feature_dims = [0], [weights[0].shape[1]]
    return lookup_output("find_and_read", ids, offsets, feature_tables, feature_dims, pooling)


@register_fake("embedding_inference")
def _embedding_inference_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    meta: Tensor,
    init_data: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
    formats: Sequence[int] = (),
) -> Tensor:
    return lookup_output("embedding_inference", ids, offsets, feature_tables, feature_dims, pooling)


# Rows are not saved for backward: autograd would compare their version with the forward's, and
# every backward of the group changes it. The update op compares update counts instead.
#
# Registered at the Autograd key itself: torch.library.register_autograd flattens and rebuilds lists
# of tensors on every call, which takes longer than a small lookup.
class _Lookup(NamedTuple):
    """Data of a lookup's backward that autograd need not see.

    Attributes:
        update_key: of the tables in ``open_lookups``; 0: the backward updates no rows.
    """

    rows: RowTensors
    optimizer: int
    applies_delayed: bool
    update_key: int
    tables: list[int]
    dims: list[int]
    pooling: int

    def batch(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> LookupBatch:
        """Rebuild the batch with the tensors that autograd has saved."""
        return LookupBatch(ids, offsets, weights, self.tables, self.dims, self.pooling)


def _checked_lookup(
    op: str, rows: RowTensors, optimizer: int, tables: list[int], dims: list[int], pooling: int
) -> _Lookup:
    applies_delayed = optimizer >= APPLIES_DELAYED
    position = optimizer - APPLIES_DELAYED if applies_delayed else optimizer
    if not NO_OPTIMIZER <= position < len(OPTIMIZER_NAMES):
        raise ValueError(
            f"dynemb::{op}: optimizer is {optimizer}, expected a position in "
            f"{OPTIMIZER_NAMES} (plus {APPLIES_DELAYED} for delayed gradients), or {NO_OPTIMIZER} "
            "for none"
        )
    key = 0 if position == NO_OPTIMIZER or rows.pending else id(rows.row_clock)
    # plain ints: an op takes half a microsecond longer to read a member of an enum
    return _Lookup(rows, position, applies_delayed, key, tables, dims, int(pooling))


@raises_typed_errors
def _update_rows(
    lookup: _Lookup,
    grad_output: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    updates: Tensor,
) -> None:
    if lookup.optimizer == NO_OPTIMIZER:
        return
    rows = lookup.rows
    if lookup.applies_delayed:
        updates = _updates_now(rows)
    if rows.pending:
        pending = PendingGradients.of(rows.pending)
        batch = lookup.batch(ids, offsets, per_sample_weights)
        accumulate_grad_(pending, rows, grad_output, batch, handles, updates)
        return
    backward_op = _BACKWARD_OPS[OPTIMIZER_NAMES[lookup.optimizer]]
    backward_op(
        *rows.updated,
        grad_output,
        ids,
        handles,
        offsets,
        per_sample_weights,
        updates,
        lookup.tables,
        lookup.dims,
        lookup.pooling,
    )


@raises_typed_errors
def _update_rows_once(lookup: _Lookup, gradients: list[Gradient]) -> None:
    """Update the rows by the sum of the gradients of several lookups."""
    rows = lookup.rows
    total = sum_gradients(rows, gradients)
    # the op compares this with the clock: the oldest lookup has seen the fewest updates
    updates = torch.cat([gradient.updates for gradient in gradients]).amin(0, keepdim=True)
    update_op = _UPDATE_OPS[OPTIMIZER_NAMES[lookup.optimizer]]
    update_op(
        *rows.updated,
        total.handles,
        total.ids,
        total.tables,
        total.gradients,
        total.counts[:, 0].contiguous(),
        updates,
        sorted({table for gradient in gradients for table in gradient.batch.feature_tables}),
    )


def _updates_now(rows: RowTensors) -> Tensor:
    """Copy the count of updates, which the op compares with the clock: updates since the forward
    are allowed then.
    """
    from_end = ROW_CLOCK_EXTRA - int(RowClock.UPDATES)
    return rows.row_clock.narrow(0, -from_end, 1).clone()


def _check_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "dynemb: create_graph=True through a dynamic table: its backward updates the rows and "
            "cannot be differentiated; compute second derivatives without the table"
        )


Kernel = Callable[[], tuple[Tensor, Tensor]]


class _DifferentiableLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lookup: _Lookup,
        own_kernel: Kernel | None,
        ids: Tensor,
        handles: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        grad_anchor: Tensor,
    ) -> tuple[Tensor, Tensor]:
        output, updates = (
            _forward(lookup, ids, handles, offsets, per_sample_weights)
            if own_kernel is None
            else own_kernel()
        )
        ctx.save_for_backward(ids, handles, offsets, per_sample_weights, updates)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(updates)
        ctx.lookup = lookup
        key = lookup.update_key
        if key:
            ctx.meeting = None
            if key in OPEN:
                opened_again(key, ctx)
            OPEN[key] = ref(ctx)
        return output, updates

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        weight_grad = gradient = None
        lookup = ctx.lookup
        key = lookup.update_key
        if key in SEVERAL:
            meeting = meeting_of(key, ctx)
        else:
            meeting = None
            OPEN.pop(key, None)
        if grad_output is not None:
            _check_backward()
            grad_output = grad_output.contiguous()
            ids, handles, offsets, per_sample_weights, updates = ctx.saved_tensors
            if per_sample_weights is not None and ctx.needs_input_grad[5]:
                # before the update, which changes the rows
                batch = lookup.batch(ids, offsets, per_sample_weights)
                weight_grad = bag_weight_grad(lookup.rows, grad_output, batch, handles)
            if meeting is None:
                _update_rows(
                    lookup, grad_output, ids, handles, offsets, per_sample_weights, updates
                )
            else:
                batch = lookup.batch(ids, offsets, per_sample_weights).detached()
                if lookup.applies_delayed:
                    updates = _updates_now(lookup.rows)
                gradient = Gradient(grad_output, batch, handles, updates)
        if meeting is not None and meeting.ends_with(gradient):
            end_meeting(key, meeting)
            if meeting.gradients:
                _update_rows_once(lookup, meeting.gradients)
        return None, None, None, None, None, weight_grad, None


_FORWARD = torch.ops.dynemb.embedding_forward.default
_FIND_AND_READ = torch.ops.dynemb.find_and_read.default
_BACKWARD_OPS = {
    name: getattr(torch.ops.dynemb, f"{name}_backward_").default for name in OPTIMIZER_NAMES
}
_UPDATE_OPS = {
    name: getattr(torch.ops.dynemb, f"{name}_update_").default for name in OPTIMIZER_NAMES
}
_peek_functorch = torch._C._functorch.peek_interpreter_stack


def _forward(
    lookup: _Lookup,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = lookup.rows
    result: tuple[Tensor, Tensor] = _FORWARD(
        rows.weights,
        rows.generations,
        rows.row_clock,
        rows.meta,
        rows.init_data,
        ids,
        handles,
        offsets,
        per_sample_weights,
        lookup.tables,
        lookup.dims,
        lookup.pooling,
    )
    return result


def _differentiable(
    lookup: _Lookup, own_kernel: Kernel | None, *inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a lookup, with its backward attached.

    Args:
        own_kernel: calls the kernel of the op that was called; None: calls ``embedding_forward``.
        *inputs: from ids to grad_anchor.
    """
    result: tuple[Tensor, Tensor] = _DifferentiableLookup.apply(lookup, own_kernel, *inputs)  # type: ignore[no-untyped-call]
    return result


def _only_autograd_sees(ids: Tensor, handles: Tensor, offsets: Tensor) -> bool:
    """Return whether autograd is the only observer of ops: no compiler, tracer, mode or transform.

    Calling an op with an autograd formula in Python takes twice as long as the rest of a small
    lookup. Without other observers the formula is applied directly.
    """
    return (
        not torch.compiler.is_compiling()
        and type(ids) is type(handles) is type(offsets) is Tensor
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and _peek_functorch() is None
        and not torch._C._is_tracing()
    )


# A traced program gets embedding_forward, which has no autograd formula, so that compiled code need
# not run one on every call.
def _bag_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    *rows, ids, handles, offsets, weights, anchor, tables, dims, pooling, optimizer = arguments
    kernel: Kernel = partial(
        below_autograd, torch.ops.dynemb.embedding_bag.default, keyset, arguments
    )
    if not needs_grad(weights, anchor):
        return kernel()
    lookup = _checked_lookup("embedding_bag", RowTensors(*rows), optimizer, tables, dims, pooling)
    own_kernel = None if isinstance(ids, FunctionalTensor) else kernel
    return _differentiable(lookup, own_kernel, ids, handles, offsets, weights, anchor)


def _sequence_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    *rows, ids, handles, offsets, anchor, tables, dim, optimizer = arguments
    op = torch.ops.dynemb.embedding.default
    kernel: Kernel = partial(below_autograd, op, keyset, arguments)
    if not needs_grad(anchor):
        return kernel()
    dims, pooling = [dim] * len(tables), int(Pooling.NONE)
    lookup = _checked_lookup("embedding", RowTensors(*rows), optimizer, tables, dims, pooling)
    own_kernel = None if isinstance(ids, FunctionalTensor) else kernel
    return _differentiable(lookup, own_kernel, ids, handles, offsets, None, anchor)


register_autograd_kernel("embedding_bag", _bag_autograd)
register_autograd_kernel("embedding", _sequence_autograd)
