"""Names of modules and state without wrappers, such as torch.compile, DDP, and FSDP.

So a model and its wrapped form have the same names in checkpoints, logs and served copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

# modules inside torch.compile, FSDP, checkpoint_wrapper, and TorchRec's models
FSDP = "_fsdp_wrapped_module"
_INNER = ("_orig_mod", FSDP, "_checkpoint_wrapped_module", "_dmp_wrapped_module")


def wrapped_by(module: nn.Module) -> str | None:
    """Return the name of the module inside a wrapper; None if the module is not a wrapper."""
    for name in _INNER:
        if name in module._modules:
            return name
    is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return "module" if is_wrapper else None


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names of entries of a state dict by their names without wrappers.

    All names stay as they are if two of them would be the same: a wrapper has entries of its own.

    Args:
        model: the model.
        names: names in its state dict.
    """
    names = list(names)
    plain = {_plain_name(model, name): name for name in names}
    return plain if len(plain) == len(names) else {name: name for name in names}


def _plain_name(model: nn.Module, name: str) -> str:
    module: nn.Module | None = model
    plain = []
    for part in name.split("."):
        # state dicts of some wrappers leave their name out
        while module is not None and (inner := wrapped_by(module)) not in (None, part):
            assert inner is not None
            module = module._modules[inner]
        if module is None or wrapped_by(module) is None:
            plain.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(plain)


__all__ = ["FSDP", "plain_names", "wrapped_by"]
