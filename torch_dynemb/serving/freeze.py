"""Read-only copies of models: what is exported and served.

How a module is copied, its package says with :func:`freezes`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.nn.table_module import TableModule

Model = TypeVar("Model", bound=nn.Module)
Maker = TypeVar("Maker", bound=Callable[[Any], nn.Module])

_makers: dict[type[nn.Module], Callable[[Any], nn.Module]] = {}


def freezes(kind: type[nn.Module]) -> Callable[[Maker], Maker]:
    """Registers what makes a read-only copy of a kind of modules, and of classes made from it.

    Args:
        kind: a class of modules.

    Returns:
        A decorator of a class, or a function, that takes such a module.

    Raises:
        ValueError: ``kind`` has been registered before.
    """

    def register(make: Maker) -> Maker:
        if kind in _makers:
            raise ValueError(
                f"freezes: kind is {kind.__name__}, which {_makers[kind]!r} freezes already"
            )
        _makers[kind] = make
        return make

    return register


def freeze(model: Model) -> Model:
    """A deep copy of a model in eval mode whose dynamic tables are read-only.

    Its tables are buffers of the size in use, so it can be exported with ``torch.export``, saved,
    and moved between threads. The model itself is not changed, and may be a table module itself.

    Args:
        model: any module; the dense part is deep-copied as it is.

    Returns:
        A model of the same class; table modules in it are replaced by read-only ones.

    Raises:
        TypeError: ``model`` is no module, or has tables that nobody has registered with
            :func:`torch_dynemb.serving.freezes`.
        RuntimeError: rows of a table lie in a store, and the copy does not fit in memory.

    Example:
        >>> import torch, torch_dynemb as td
        >>> bag = td.DynamicEmbeddingBag(4, optimizer=td.SGD(lr=0.1))
        >>> model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1))
        >>> ids = torch.tensor([[1, 2], [3, 1]])
        >>> _ = model(ids)
        >>> program = torch.export.export(td.freeze(model), (ids,))
        >>> torch.equal(program.module()(ids), model.eval()(ids))
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze: model is {described(model)}, expected a torch.nn.Module")
    memo: dict[int, Any] = {}
    _freeze_parts(model, memo)
    return copy.deepcopy(model, memo).eval()


def _freeze_parts(module: nn.Module, memo: dict[int, Any]) -> None:
    """Puts read-only copies of a module's parts where deepcopy looks for them."""
    if id(module) in memo:
        return
    makers = (_makers[kind] for kind in type(module).__mro__ if kind in _makers)
    make = next(makers, None)
    if make is not None:
        memo[id(module)] = make(module)
        return
    if isinstance(module, TableModule):
        raise TypeError(
            f"freeze: {type(module).__name__} is not a module that freeze() knows: register what "
            "makes a read-only copy of it with torch_dynemb.serving.freezes"
        )
    for part in module.children():
        _freeze_parts(part, memo)


__all__ = ["freeze", "freezes"]
