"""One ``step()`` for the dense parameters and the tables of a model."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torch_dynemb.argument_checks import described
from torch_dynemb.nn.table_optimizers import modules_in, row_optimizers, table_optimizers
from torch_dynemb.optim import FusedOptimizer, SplitOptimizer

Now = int | Callable[[], int] | None

_warned_of_decay = False


class StepWith:
    """Handle of :func:`step_with`; :meth:`remove` ends what it does.

    Args:
        optimizer: of the dense parameters.
        modules: with the tables.
        now: see :func:`step_with`.

    Raises:
        ValueError: as :func:`step_with`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, modules: list[nn.Module], now: Now
    ) -> None:
        self._modules, self._now = modules, now
        self._time: int | None = None
        self._optimizer = weakref.ref(optimizer)
        self._tables = self._found()
        if now is not None and not any(tables._keeps_time() for tables in self._tables):
            raise ValueError(
                "step_with: now is given, but no table keeps times: leave it out, or give a table "
                "policy=Policy(score='timestamp') or a ttl"
            )
        self._take_steps(self._optimizer)
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        # torch has no hook of zero_grad: the method of this instance is replaced
        zero_dense = _without_reference(optimizer.zero_grad)
        handle = weakref.ref(self)  # which has the function; the hooks of the optimizer keep it

        @functools.wraps(zero_dense)
        def zero_grad(*arguments: Any, **keywords: Any) -> None:
            zero_dense(*arguments, **keywords)
            connected = handle()
            for tables in () if connected is None else connected._tables:
                tables.zero_grad()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._zero_grad = zero_grad

    def remove(self) -> None:
        """Have ``optimizer.step()`` leave the tables alone again."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        optimizer = self._optimizer()
        if optimizer is not None and vars(optimizer).get("zero_grad") is self._zero_grad:
            del optimizer.zero_grad
        self._take_steps(None)

    def _take_steps(self, by: weakref.ref[torch.optim.Optimizer] | None) -> None:
        for tables in self._tables:
            tables._stepped_by = by

    def _found(self) -> list[FusedOptimizer]:
        """Find the optimizers that the tables have now."""
        found = table_optimizers(self._modules)
        if not found:
            raise ValueError(
                f"step_with: modules ({', '.join(type(m).__name__ for m in self._modules)}) lack "
                "trainable dynamic tables, expected the model that has them"
            )
        for tables in found:
            by = None if tables._stepped_by is None else tables._stepped_by()
            if by is not None:
                names = [group["name"] for group in tables.param_groups]
                raise ValueError(
                    f"step_with: tables {names} have their steps ended by another call, for "
                    f"{type(by).__name__}: remove() the handle that it returned"
                )
        return found

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(tables._is_retired for tables in self._tables):  # set_optimizer() has been called
            self._take_steps(None)
            self._tables = self._found()
            self._take_steps(self._optimizer)
        self._time = self._now() if callable(self._now) else self._now
        for tables in self._tables:
            tables.check_step(self._time)
            if isinstance(tables, SplitOptimizer) and not _scale_of(optimizer):
                tables.check_unscaled("optimizer.step", "call scaler.step(optimizer)")

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for tables in self._tables:
            scale = _scale_of(optimizer) if isinstance(tables, SplitOptimizer) else {}
            for name, value in scale.items():
                setattr(tables, name, value)
            try:
                with tables._stepping():
                    tables.step(now=self._time)
            finally:
                for name in scale:
                    delattr(tables, name)


def _scale_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what ``GradScaler`` sets on an optimizer that unscales and skips on its own.

    Fused optimizers of torch do so. Others make no step after an overflow.
    """
    given = {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}
    return {name: value for name, value in given.items() if value is not None}


def _without_reference(method: Callable[..., None]) -> Callable[..., None]:
    """Make a function of a bound method; its object may have it without keeping itself alive."""
    bound_to = getattr(method, "__self__", None)
    if bound_to is None:
        return method
    function: Callable[..., None] = method.__func__  # type: ignore[attr-defined]
    owner = weakref.ref(bound_to)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> None:
        function(owner(), *arguments, **keywords)

    return call


def step_with(
    optimizer: torch.optim.Optimizer,
    modules: nn.Module | Iterable[nn.Module],
    *,
    now: Now = None,
) -> StepWith:
    """Have ``optimizer.step()`` also end the step of a model's tables.

    ``optimizer.zero_grad()`` forgets gradients of tables in split mode, as ``zero_grad()`` of a
    model does. ``GradScaler`` needs split mode: ``scaler.unscale_(optimizer)`` and
    ``scaler.step(optimizer)`` include the rows, and an overflow of either skips the whole step.
    Schedulers, closures, gradient accumulation and frameworks that call ``step()`` work as they do
    without tables. Where the tables cannot make a step, neither does the optimizer. Copies and
    pickles of the optimizer step no tables. Warns, once a process, if the optimizer's weight decay
    covers the anchors of tables, of which the own optimizer has none.

    Args:
        optimizer: of the dense parameters.
        modules: a model with the tables, at any depth; or several modules.
        now: seconds, for tables that keep times; or a function that returns them, which each step
            calls before it begins. Default: the time of ``group.clock``, by default the machine's.

    Returns:
        A handle; its ``remove()`` ends the connection.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer, or is the optimizer of tables; or
            ``modules`` are not modules; or ``now`` is neither an int nor a function.
        ValueError: trainable tables are missing, or another optimizer ends their steps already; or
            ``now`` is given, and no table keeps times.
            ``module.optimizer.step()`` of these tables raises RuntimeError from then on.

    Example:
        >>> import torch, torch_dynemb as td
        >>> ads = td.DynamicEmbedding(4, name="ads", optimizer=td.Adam(lr=0.01))
        >>> model = torch.nn.Sequential(ads, torch.nn.Linear(4, 1))
        >>> optimizer = torch.optim.Adam(model[1].parameters(), lr=0.01)
        >>> handle = td.step_with(optimizer, model)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.tensor([7, 8])).square().mean().backward()
        ...     optimizer.step()
        >>> ads.optimizer.updates_since_step()
        0
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"step_with: optimizer is {described(optimizer)}, expected a torch.optim.Optimizer of "
            "the dense parameters; where a framework wraps it, give what it wraps"
        )
    if isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            "step_with: optimizer is that of a table, expected the optimizer of the dense "
            "parameters"
        )
    if now is not None and (isinstance(now, bool) or not (isinstance(now, int) or callable(now))):
        raise TypeError(
            f"step_with: now is {described(now)}, expected seconds as an int, or a function that "
            "returns them"
        )
    roots = modules
    if not isinstance(modules, nn.Module) and isinstance(modules, Iterable):
        roots = list(modules)
    found = modules_in("step_with", roots)
    handle = StepWith(optimizer, [roots] if isinstance(roots, nn.Module) else list(roots), now)
    _warn_of_decay(optimizer, found)
    return handle


def _warn_of_decay(optimizer: torch.optim.Optimizer, modules: list[nn.Module]) -> None:
    """Warn, once a process, of tables that a weight decay of ``parameters()`` misses."""
    global _warned_of_decay
    if _warned_of_decay:
        return
    decayed = {
        id(p): float(group["weight_decay"])
        for group in optimizer.param_groups
        if float(group.get("weight_decay") or 0.0) > 0
        for p in group["params"]
    }
    for module in modules:
        tables, _, anchor = row_optimizers(module)
        if anchor is None or id(anchor) not in decayed:
            continue
        groups = [group for rows in tables for group in rows.param_groups]
        missed = [str(group["name"]) for group in groups if not group["weight_decay"]]
        if missed:
            decay, names = decayed[id(anchor)], ", ".join(missed[:3])
            names += ", ..." if len(missed) > 3 else ""
            _warned_of_decay = True
            warnings.warn(
                f"step_with: {type(optimizer).__name__} has weight_decay={decay} for all "
                f"parameters of the model, which leaves the rows of tables ({names}) as they are: "
                f"give the table's optimizer weight_decay={decay}, which decays the rows of a "
                "batch, or put grad_anchor of the tables in a group with weight_decay=0",
                RuntimeWarning,
                stacklevel=3,
            )
            return


__all__ = ["StepWith", "step_with"]
