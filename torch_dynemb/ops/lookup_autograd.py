"""Autograd formulas of lookups: their backward updates the rows, or leaves gradients for a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_dynemb._library.library import raises_typed_errors
from torch_dynemb.ops.autograd import (
    accumulates,
    below_autograd,
    needs_grad,
    register_autograd_kernel,
)
from torch_dynemb.ops.columns import ROW_CLOCK_EXTRA, Pooling, RowClock
from torch_dynemb.ops.gradient import bag_weight_grad
from torch_dynemb.ops.open_lookups import (
    EXPECTED,
    OPEN,
    SEVERAL,
    Gradient,
    end_meeting,
    expect,
    meeting_of,
    opened_again,
    sum_gradients,
)
from torch_dynemb.ops.pending import PendingGradients, accumulate_grad_
from torch_dynemb.ops.tensors import LookupBatch, RowTensors
from torch_dynemb.ops.update import APPLIES_DELAYED, NO_OPTIMIZER, OPTIMIZER_NAMES


# Rows are not saved for backward: autograd would compare their version with the forward's, and
# every backward of the group changes it. The update op compares update counts instead.
#
# Registered at the Autograd key itself: torch.library.register_autograd flattens and rebuilds lists
# of tensors on every call, which takes longer than a small lookup.
class Lookup(NamedTuple):
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


def checked_lookup(
    op: str, rows: RowTensors, optimizer: int, tables: list[int], dims: list[int], pooling: int
) -> Lookup:
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
    return Lookup(rows, position, applies_delayed, key, tables, dims, int(pooling))


@raises_typed_errors
def _update_rows(
    lookup: Lookup,
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
    _BACKWARD(
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
        lookup.optimizer,
    )


@raises_typed_errors
def _update_rows_once(lookup: Lookup, gradients: list[Gradient]) -> None:
    """Update the rows by the sum of the gradients of several lookups."""
    rows = lookup.rows
    total = sum_gradients(rows, gradients)
    # the op compares this with the clock: the oldest lookup has seen the fewest updates
    updates = torch.cat([gradient.updates for gradient in gradients]).amin(0, keepdim=True)
    _APPLY_GRAD(
        *rows.updated,
        total.handles,
        total.ids,
        total.tables,
        total.gradients,
        total.counts[:, 0].contiguous(),
        updates,
        sorted({table for gradient in gradients for table in gradient.batch.feature_tables}),
        lookup.optimizer,
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


def _open(ctx: Any, lookup: Lookup) -> None:
    """Prepare a node of the graph for its backward."""
    ctx.set_materialize_grads(False)
    ctx.lookup = lookup
    key = lookup.update_key
    if key:
        ctx.meeting = None
        last = OPEN.get(key)
        if last is not None and (last() is not None or key in SEVERAL):
            opened_again(key, ctx)
        OPEN[key] = ref(ctx)


def _run_backward(
    ctx: Any, grad_output: Tensor | None, weights_learn: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Update the rows of a lookup if the backward trains.

    Returns:
        The gradient of its weights if they learn, and that of the anchor. The output does not
        depend on the anchor, so its gradient is 0. None leaves its ``grad`` alone in training;
        compiled autograd, which adds the gradients of several lookups, needs zeros.
    """
    if not _trains(ctx, grad_output):
        return _gradients_alone(ctx, grad_output, weights_learn)
    weight_grad = gradient = anchor_grad = None
    lookup = ctx.lookup
    key = lookup.update_key
    meeting = EXPECTED.get(key)
    if meeting is not None or (not key and getattr(ctx, "compiled", False)):
        anchor_grad = torch.zeros(1, device=lookup.rows.row_clock.device)
    elif key in SEVERAL:
        meeting = meeting_of(key, ctx)
    else:
        OPEN.pop(key, None)
    if grad_output is not None:
        _check_backward()
        grad_output = grad_output.contiguous()
        ids, handles, offsets, per_sample_weights, updates = ctx.saved_tensors
        if per_sample_weights is not None and weights_learn:
            # before the update, which changes the rows
            batch = lookup.batch(ids, offsets, per_sample_weights)
            weight_grad = bag_weight_grad(lookup.rows, grad_output, batch, handles)
        if meeting is None:
            _update_rows(lookup, grad_output, ids, handles, offsets, per_sample_weights, updates)
        else:
            batch = lookup.batch(ids, offsets, per_sample_weights).detached()
            if lookup.applies_delayed:
                updates = _updates_now(lookup.rows)
            gradient = Gradient(grad_output, batch, handles, updates)
    if meeting is not None and meeting.ends_with(gradient):
        if EXPECTED.pop(key, None) is None:
            end_meeting(key, meeting)
        if meeting.gradients:
            _update_rows_once(lookup, meeting.gradients)
    return weight_grad, anchor_grad


def _trains(ctx: Any, grad_output: Tensor | None) -> bool:
    """Return whether the backward that runs is to update rows, and not only to give gradients."""
    if torch.compiler.is_compiling() or ctx.lookup.update_key in EXPECTED:
        return True  # no engine runs, which could be asked
    if isinstance(grad_output, FakeTensor | FunctionalTensor):
        return True  # a trace, which torch.autograd.grad makes of any backward
    return accumulates(ctx.next_functions[-1][0])


def _gradients_alone(
    ctx: Any, grad_output: Tensor | None, weights_learn: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Compute what :func:`_run_backward` returns; the lookup stays open for a backward to come."""
    if grad_output is None:
        return None, None
    anchor_grad = grad_output.new_zeros(1)
    if not weights_learn:
        return None, anchor_grad
    _check_backward()
    ids, handles, offsets, per_sample_weights, _ = ctx.saved_tensors
    batch = ctx.lookup.batch(ids, offsets, per_sample_weights)
    rows = ctx.lookup.rows
    return bag_weight_grad(rows, grad_output.contiguous(), batch, handles), anchor_grad


def _compiled_autograd_key(ctx: Any) -> tuple[Any, ...]:
    ctx.compiled = True  # in split mode lookups do not meet, and are not expected
    expect(ctx.lookup.update_key, ctx)
    return (ctx._autograd_function_id,)


class _DifferentiableLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lookup: Lookup,
        own_kernel: Kernel | None,
        ids: Tensor,
        handles: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        grad_anchor: Tensor,
    ) -> tuple[Tensor, Tensor]:
        output, updates = (
            lookup_forward(lookup, ids, handles, offsets, per_sample_weights)
            if own_kernel is None
            else own_kernel()
        )
        ctx.save_for_backward(ids, handles, offsets, per_sample_weights, updates)
        ctx.mark_non_differentiable(updates)
        _open(ctx, lookup)
        return output, updates

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        gradients = _run_backward(ctx, grad_output, ctx.needs_input_grad[5])
        return None, None, None, None, None, *gradients

    _compiled_autograd_key = staticmethod(_compiled_autograd_key)


class _InsertingLookup(torch.autograd.Function):
    """The same, but its forward finds or inserts the ids in the same op."""

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Lookup,
        bound: int,
        ids: Tensor,
        offsets: Tensor,
        feature_policies: list[int],
        per_sample_weights: Tensor | None,
        grad_anchor: Tensor,
    ) -> Tensor:
        output, handles, updates = _INSERT_AND_READ(
            bound,
            ids,
            offsets,
            per_sample_weights,
            lookup.tables,
            lookup.dims,
            lookup.pooling,
            feature_policies,
        )
        ctx.save_for_backward(ids, handles, offsets, per_sample_weights, updates)
        _open(ctx, lookup)
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Any, ...]:
        gradients = _run_backward(ctx, grad_output, ctx.needs_input_grad[5])
        return None, None, None, None, None, *gradients

    _compiled_autograd_key = staticmethod(_compiled_autograd_key)


# Function.apply looks for transforms of functorch first, which the caller has excluded.
insert_and_read: Callable[..., Any] = super(torch.autograd.Function, _InsertingLookup).apply
_FORWARD = torch.ops.dynemb.embedding_forward.default
_INSERT_AND_READ = torch.ops.dynemb.insert_and_read.default
_BACKWARD = torch.ops.dynemb.embedding_backward_.default
_APPLY_GRAD = torch.ops.dynemb.apply_grad_.default
_peek_functorch = torch._C._functorch.peek_interpreter_stack


def lookup_forward(
    lookup: Lookup,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a lookup, without its backward."""
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


def differentiable(
    lookup: Lookup, own_kernel: Kernel | None, *inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a lookup, with its backward attached.

    Args:
        own_kernel: calls the kernel of the op that was called; None: calls ``embedding_forward``.
        *inputs: from ids to grad_anchor.
    """
    result: tuple[Tensor, Tensor] = _DifferentiableLookup.apply(lookup, own_kernel, *inputs)  # type: ignore[no-untyped-call]
    return result


def only_autograd_sees(ids: Tensor, offsets: Tensor, handles: Tensor | None = None) -> bool:
    """Return whether autograd is the only observer of ops: no compiler, tracer, mode or transform.

    Calling an op with an autograd formula in Python takes twice as long as the rest of a small
    lookup. Without other observers the formula is applied directly.
    """
    return (
        not torch.compiler.is_compiling()
        and type(ids) is type(offsets) is Tensor
        and (handles is None or type(handles) is Tensor)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and _peek_functorch() is None
        and not torch._C._is_tracing()
    )


# A traced program gets embedding_forward, which has no autograd formula, so that compiled code need
# not run one on every call.
def _embedding_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    *rows, ids, handles, offsets, weights, anchor, tables, dims, pooling, optimizer = arguments
    kernel: Kernel = partial(below_autograd, torch.ops.dynemb.embedding.default, keyset, arguments)
    if pooling == Pooling.NONE:
        weights = None  # the kernel does not read them
    if not needs_grad(weights, anchor):
        return kernel()
    lookup = checked_lookup("embedding", RowTensors(*rows), optimizer, tables, dims, pooling)
    own_kernel = None if isinstance(ids, FunctionalTensor) else kernel
    return differentiable(lookup, own_kernel, ids, handles, offsets, weights, anchor)


register_autograd_kernel("embedding", _embedding_autograd)
