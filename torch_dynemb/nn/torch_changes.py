"""The functions of torch that this package replaces, with the reason for each.

torch offers no hook at these places. A replacement checks or adds something for tables, and calls
the function that it replaces. :func:`restore_torch` puts torch's functions back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

CHANGES: dict[str, str] = {
    "GradScaler": (
        "scale, unscale_, _unscale_grads_ and __init_subclass__ of torch.amp.GradScaler, and the "
        "methods of its subclasses: a scaled loss updates no rows in backward, the rows of "
        "step_with are unscaled, and ranks that share rows skip the same steps"
    ),
    "clip_grad": (
        "clip_grad_value_ and _clip_grads_with_norm_ of torch.nn.utils.clip_grad: they warn if "
        "backward has already updated rows, unclipped"
    ),
    "AveragedModel": (
        "__init__ and update_parameters of torch.optim.swa_utils.AveragedModel: rows are averaged, "
        "too"
    ),
    "Module": (
        "_apply and zero_grad of torch.nn.Module: to(), half() and their kin ask the tables of a "
        "model before they convert the first layer; gradients of rows in split mode are forgotten"
    ),
    "DefaultLoadPlanner": (
        "set_up_planner of torch.distributed.checkpoint.DefaultLoadPlanner: it loads tables of "
        "another size; a finder in sys.meta_path waits for its import, after the first state_dict()"
    ),
}


class _Replaced(NamedTuple):
    change: str
    owner: Any
    attribute: str
    original: Any
    replacement: Any


_replaced: list[_Replaced] = []
_restored: set[str] = set()


def is_restored(change: str) -> bool:
    """Return whether a program has chosen torch's own functions in place of a change."""
    return change in _restored


def replace(change: str, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of torch, the first time that this is called for it.

    Args:
        change: of ``CHANGES``.
        owner: a class or a module.
        attribute: of the owner; nothing happens if it is missing.
        make: makes the replacement of the function; of None for one that the owner inherits.
    """
    if is_restored(change) or not hasattr(owner, attribute):
        return
    original = vars(owner).get(attribute)
    if not any(made.owner is owner and made.attribute == attribute for made in _replaced):
        replacement = make(original)
        setattr(owner, attribute, replacement)
        _replaced.append(_Replaced(change, owner, attribute, original, replacement))


def restore_torch(*changes: str) -> None:
    """Put functions of torch back that this package has replaced, and replace them no more.

    Tables lose what ``torch_dynemb.nn.torch_changes.CHANGES`` says of each: a scaled loss, for
    example, updates rows by scaled gradients then. It holds for the whole process.

    Args:
        *changes: names of ``CHANGES``; default: all.

    Raises:
        ValueError: a name is unknown; nothing has been put back.

    Example:
        >>> import torch_dynemb as td
        >>> td.restore_torch("clip_grad")
    """
    unknown = [name for name in changes if name not in CHANGES]
    if unknown:
        raise ValueError(f"restore_torch: changes has {unknown}, expected names of {list(CHANGES)}")
    _restored.update(changes or CHANGES)
    for made in [made for made in _replaced if is_restored(made.change)]:
        # another library may have replaced it since
        if vars(made.owner).get(made.attribute) is made.replacement:
            if made.original is None:
                delattr(made.owner, made.attribute)
            else:
                setattr(made.owner, made.attribute, made.original)
        _replaced.remove(made)


__all__ = ["CHANGES", "is_restored", "replace", "restore_torch"]
