"""A warning where torch clips gradients of a model without those of its rows.

``parameters()`` has only an anchor of them. Rows that backward updates have moved by then, by
gradients of any size; those of split mode would be applied unclipped. torch offers no hook around
its clipping. ``clip_grad_norm_`` of torch looks a function up in its module on every call, by
whatever name a program or a framework has imported it. That function and ``clip_grad_value_`` are
replaced by ones that warn first and then do the same. Programs that scale ``grad`` on their own are
not seen.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from torch_dynemb.nn.backward_updates import names_of, split_modules, updated_in_backward
from torch_dynemb.nn.torch_changes import replace
from torch_dynemb.optim import FusedOptimizer

# by name in torch.nn.utils.clip_grad: the name in torch.nn.utils, and the argument with the limit
_CLIPPED_BY = {
    "_clip_grads_with_norm_": ("clip_grads_with_norm_", "max_norm"),
    "clip_grad_value_": ("clip_grad_value_", "clip_value"),
}
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_clipping() -> None:
    """Have torch's clipping of gradients looked at in this process."""
    for name, (public, limit) in _CLIPPED_BY.items():
        for module, attribute in ((clip_grad, name), (nn.utils, public)):
            replace("clip_grad", module, attribute, functools.partial(_watched, limit=limit))


def _watched(original: Any, *, limit: str) -> Any:
    @functools.wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *arguments: Any, **keywords: Any) -> Any:
        given_limit = arguments[0] if arguments else keywords.get(limit)
        # no limit: the program measures the norm
        if torch.compiler.is_compiling() or (
            isinstance(given_limit, float) and given_limit == math.inf
        ):
            return original(parameters, *arguments, **keywords)
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        _warn_of_rows(given)
        return original(given, *arguments, **keywords)

    return clip


def _warn_of_rows(parameters: list[Tensor]) -> None:
    """Warn once for a module of which the anchor is among parameters that are clipped."""
    given = {id(p) for p in parameters}

    def unclipped(modules: list[Any]) -> list[Any]:
        met = [m for m in modules if id(m.grad_anchor) in given and m not in _warned]
        return [m for m in met if not _clips_rows(m.optimizer)]

    whole = "torch_dynemb.clip_grad_norm_(model, max_norm), which clips one norm over parameters "
    if moved := unclipped(updated_in_backward()):
        _warn(
            moved,
            f"torch.nn.utils clips gradients, but backward has already updated the rows of "
            f"{names_of(moved)}, unclipped: construct it with split=True and call {whole}and "
            "rows; or give its optimizer clip_norm, which clips each row",
        )
    if split := unclipped(split_modules()):
        _warn(
            split,
            f"torch.nn.utils clips gradients, but not those of the rows of {names_of(split)}, "
            f"which step() applies: call {whole}and rows",
        )


def _warn(modules: list[Any], message: str) -> None:
    _warned.update(modules)
    warnings.warn(message, RuntimeWarning, stacklevel=_frames_to_the_program())


def _frames_to_the_program() -> int:
    """Return how far from the caller the call of the program is that clips."""
    frames, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, clip_grad.__file__):
        frames, frame = frames + 1, frame.f_back
    return frames


def _clips_rows(optimizer: FusedOptimizer) -> bool:
    """Return whether each row's gradient is clipped in backward, by choice."""
    groups = optimizer.param_groups
    return all(group.get("clip_norm") or group.get("clip_value") for group in groups)


__all__ = ["watch_clipping"]
