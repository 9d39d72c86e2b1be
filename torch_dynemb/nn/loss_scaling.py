"""Checks of GradScaler: no scaled loss updates rows, and ranks that share rows skip alike.

A backward that updates rows would apply gradients that are still multiplied by the loss scale, and
nothing in such a gradient says so. torch offers no hook around ``GradScaler.scale``, so the method
is replaced by one that adds a hook to the scaled loss; what it returns stays the same.

In split mode the gradient of a row lies on the rank that has the row, so one rank alone may find
an infinity. Ranks would skip different steps and get different scales. ``_unscale_grads_``, which
looks for infinities, is replaced by one that returns what any rank has found.

Subclasses with methods of their own (FSDP's ``ShardedGradScaler``) are treated alike. Scalers that
do not inherit from ``torch.amp.GradScaler`` are not seen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from torch_dynemb.nn.backward_updates import names_of, split_modules, updated_in_backward
from torch_dynemb.nn.module_kinds import SharedRows
from torch_dynemb.nn.table_optimizers import row_optimizers
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
    GradScaler.__init_subclass__ = classmethod(_watch_subclass)  # type: ignore[assignment]


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
    for name, watched in (("scale", _scale_of), ("_unscale_grads_", _unscale_of)):
        own: Any = vars(kind).get(name)
        if own is None or getattr(own, "watches_for", None) == __name__:
            continue
        method = watched(own)
        method.watches_for = __name__
        setattr(kind, name, method)


def _scale_of(own: Any) -> Any:
    @functools.wraps(own)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = own(self, outputs)
        if torch.compiler.is_compiling() or not self.is_enabled():
            return scaled
        return _watched(scaled, self)

    return scale


def _unscale_of(own: Any) -> Any:
    @functools.wraps(own)
    def unscale(
        self: GradScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        *arguments: Any,
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = own(self, optimizer, inv_scale, found_inf, *arguments)
        for shared in _shared_by(optimizer):
            flag = found.get(shared.device)
            if flag is None:  # no gradient is pending on this rank
                flag = torch.zeros_like(found_inf, device=shared.device)
                found[shared.device] = flag
            dist.all_reduce(flag, dist.ReduceOp.MAX, shared.ranks)
        return found

    return unscale


def _shared_by(optimizer: torch.optim.Optimizer) -> list[SharedRows]:
    """Return the ranks that share rows of an optimizer, in an order that is theirs, too."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = set()
    for optimizers, shared, _ in map(row_optimizers, split_modules()):
        splits = [of for of in optimizers if isinstance(of, SplitOptimizer)]
        if shared is not None and any(id(p) in own for of in splits for p in of.stand_ins()):
            found.add(shared)
    return sorted(found, key=lambda shared: str(shared.ranks.group_name))


def _watched(scaled: Any, scaler: GradScaler) -> Any:
    if isinstance(scaled, Tensor):
        if scaled.requires_grad:
            by = weakref.ref(scaler)
            scaled.register_hook(lambda _: _check_backward(by))
    elif isinstance(scaled, Iterator):
        return (_watched(part, scaler) for part in scaled)
    elif isinstance(scaled, list | tuple):
        for part in scaled:
            _watched(part, scaler)
    return scaled


def _check_backward(scaler: weakref.ref[GradScaler]) -> None:
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
    if alone := [module for module in split if not module.shares_infinities]:
        raise RuntimeError(
            f"GradScaler: ranks share the rows of {names_of(alone)}, and each would look for "
            "infinities in its own gradients alone, so ranks could skip different steps: train "
            "with autocast(dtype=torch.bfloat16), which needs no scaler. No row has changed"
        )
    for module in split:
        module.optimizer.scaled_by = scaler


def _is_reached(anchor: Tensor) -> bool:
    # compiled code, too, has the anchor as an input
    if not anchor.requires_grad:
        return False
    node: Any = torch.autograd.graph.get_gradient_edge(anchor).node
    reached: bool = torch._C._will_engine_execute_node(node)
    return reached


__all__ = ["check_not_scaled", "watch_scalers"]
