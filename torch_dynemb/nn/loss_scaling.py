"""GradScaler beside tables: no scaled loss updates rows, and all gradients are unscaled alike.

A backward that updates rows would apply gradients that are still multiplied by the loss scale, and
nothing in such a gradient says so. torch offers no hook around ``GradScaler.scale``, so the method
is replaced by one that adds a hook to the scaled loss; what it returns stays the same.

In split mode the tables of :func:`torch_dynemb.step_with` belong to an optimizer that has no
parameter of them. ``_unscale_grads_``, which unscales and looks for infinities, is replaced by one
that takes their gradients along. The gradient of a row lies on the rank that has the row, so one
rank alone may find an infinity. Ranks would skip different steps and get different scales: the
function returns what any rank has found. ``unscale_`` is replaced by one that records the call.

Subclasses with methods of their own (FSDP's ``ShardedGradScaler``) are treated alike. Scalers that
do not inherit from ``torch.amp.GradScaler`` are not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from torch_dynemb.nn.backward_updates import names_of, split_modules, updated_in_backward
from torch_dynemb.nn.module_kinds import SharedRows
from torch_dynemb.nn.table_optimizers import row_optimizers
from torch_dynemb.nn.torch_changes import replace
from torch_dynemb.ops.autograd import accumulates
from torch_dynemb.optim import SplitOptimizer

# The backward of a scaled loss that began last, for comparison with the one that runs; -1: none.
scaled_task = -1

_REMEDY = (
    "construct it with split=True, and call scaler.step(module.optimizer) as for any optimizer; or "
    "train with autocast(dtype=torch.bfloat16), which needs no scaler"
)


def watch_scalers() -> None:
    """Have the calls of any GradScaler in this process checked."""
    kinds: list[type[GradScaler]] = [GradScaler]
    for kind in kinds:
        _watch(kind)
        kinds += kind.__subclasses__()
    replace("GradScaler", GradScaler, "__init_subclass__", lambda _: classmethod(_watch_subclass))


def check_not_scaled(owner: str) -> None:
    """Raise RuntimeError if a training lookup comes within the backward of a scaled loss.

    Checkpoints with ``use_reentrant=True`` look up there, and :func:`_check_backward` cannot see
    that they will.

    Args:
        owner: the module.
    """
    if scaled_task >= 0 and torch._C._current_graph_task_id() == scaled_task:
        raise RuntimeError(
            f"{owner}: a training lookup in the backward of a loss that GradScaler has scaled: its "
            f"rows would be updated by gradients that are multiplied by the scale: {_REMEDY}"
        )


def _watch_subclass(kind: type[GradScaler], /, **arguments: Any) -> None:
    super(GradScaler, kind).__init_subclass__(**arguments)
    _watch(kind)


def _watch(kind: type[GradScaler]) -> None:
    watches = (("scale", _scale_of), ("_unscale_grads_", _grads_of), ("unscale_", _unscale_of))
    for name, watched in watches:
        if name in vars(kind):
            replace("GradScaler", kind, name, watched)


def _scale_of(original: Any) -> Any:
    @functools.wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if torch.compiler.is_compiling() or not self.is_enabled():
            return scaled
        return _watched(scaled)

    return scale


def _unscale_of(original: Any) -> Any:
    @functools.wraps(original)
    def unscale(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_enabled():
            return
        if isinstance(optimizer, SplitOptimizer):
            optimizer._check_own_step("GradScaler.unscale_")
        original(self, optimizer)
        for tables, _ in _stepped_by(optimizer):
            tables.gradients_are_unscaled()

    return unscale


def _grads_of(original: Any) -> Any:
    @functools.wraps(original)
    def unscale_grads(
        self: GradScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        *arguments: Any,
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = original(
            self, optimizer, inv_scale, found_inf, *arguments
        )
        stepped = _stepped_by(optimizer)
        for tables, _ in stepped:
            if tables._stepped_by is not None and tables._stepped_by() is optimizer:
                of_rows = original(self, tables, inv_scale, found_inf, *arguments)
                for device, flag in of_rows.items():
                    found[device] = torch.maximum(found.get(device, flag), flag)
        if not found and any(
            stepped_tables.has_scaled_gradients() for stepped_tables, _ in stepped
        ):
            found[found_inf.device] = found_inf  # of lookups without ids; torch wants a flag
        shares = {shared for _, shared in stepped if shared is not None}
        # in an order that is that of the other ranks, too
        for shared in sorted(shares, key=lambda shared: str(shared.ranks.group_name)):
            flag = found.get(shared.device)
            if flag is None:  # no gradient is pending on this rank
                flag = torch.zeros_like(found_inf, device=shared.device)
                found[shared.device] = flag
            dist.all_reduce(flag, dist.ReduceOp.MAX, shared.ranks)
        return found

    return unscale_grads


def _stepped_by(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[SplitOptimizer, SharedRows | None]]:
    """Return the optimizers of rows that an optimizer steps, with the ranks that share the rows.

    It has their parameters, or :func:`torch_dynemb.step_with` connects them.
    """
    parameters = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    }
    return [
        (row_optimizer, shared)
        for optimizers, shared, _ in map(row_optimizers, split_modules())
        for row_optimizer in optimizers
        if isinstance(row_optimizer, SplitOptimizer)
        and (
            (row_optimizer._stepped_by is not None and row_optimizer._stepped_by() is optimizer)
            or any(id(parameter) in parameters for parameter in row_optimizer.stand_ins())
        )
    ]


def _watched(scaled: Any) -> Any:
    if isinstance(scaled, Tensor):
        if scaled.requires_grad:
            scaled.register_hook(_check_backward)
    elif isinstance(scaled, Iterator):
        return (_watched(part) for part in scaled)
    elif isinstance(scaled, list | tuple):
        for part in scaled:
            _watched(part)
    return scaled


def _check_backward(_: Tensor) -> None:
    """Raise RuntimeError if the backward that begins here reaches rows that it would update."""
    global scaled_task
    scaled_task = torch._C._current_graph_task_id()
    reached = [m for m in updated_in_backward() if _is_reached(m.grad_anchor)]
    if reached:
        raise RuntimeError(
            f"GradScaler: the backward of a scaled loss would update the rows of "
            f"{names_of(reached)} by gradients that are multiplied by the scale: {_REMEDY}. No row "
            "has changed"
        )
    split = [module for module in split_modules() if _is_reached(module.grad_anchor)]
    if alone := [module for module in split if not module._shares_infinities]:
        raise RuntimeError(
            f"GradScaler: ranks share the rows of {names_of(alone)}, and each would look for "
            "infinities in its own gradients alone, so ranks could skip different steps: train "
            "with autocast(dtype=torch.bfloat16), which needs no scaler. No row has changed"
        )
    for module in split:
        module.optimizer.gradients_are_scaled()


def _is_reached(anchor: Tensor) -> bool:
    # compiled code, too, has the anchor as an input
    if not anchor.requires_grad:
        return False
    return accumulates(torch.autograd.graph.get_gradient_edge(anchor).node)


__all__ = ["check_not_scaled", "watch_scalers"]
