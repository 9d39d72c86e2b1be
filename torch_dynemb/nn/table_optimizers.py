"""The optimizers of all tables of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.nn.module_kinds import RowOptimizers, optimizers_in
from torch_dynemb.optim import FusedOptimizer


def table_optimizers(modules: nn.Module | Iterable[nn.Module]) -> list[FusedOptimizer]:
    """Return the optimizers of all dynamic tables in a model; call ``step()`` of each once a step.

    Optimizers of ``torch.optim`` do not update tables, because tables are not parameters.

    Args:
        modules: a model, or several modules, with the dynamic tables in them.

    Returns:
        One for each module with trainable tables, without duplicates.

    Raises:
        TypeError: ``modules`` are not modules.

    Example:
        >>> import torch, torch_dynemb as td
        >>> towers = [td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)) for _ in range(2)]
        >>> model = torch.nn.ModuleList(towers)
        >>> for tower in model:
        ...     tower(torch.tensor([7])).sum().backward()
        >>> for optimizer in td.table_optimizers(model):
        ...     optimizer.step()
    """
    found = {
        id(optimizer): optimizer
        for module in modules_in("table_optimizers", modules)
        for optimizer in row_optimizers(module).optimizers
    }
    return list(found.values())


def modules_in(call: str, modules: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all their submodules, without duplicates.

    Args:
        call: function with which an error begins.
        modules: one or several.

    Raises:
        TypeError: they are not modules.
    """
    if not isinstance(modules, nn.Module | Iterable):
        raise TypeError(f"{call}: modules is {described(modules)}, expected a module or several")
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    for i, root in enumerate(roots):
        if not isinstance(root, nn.Module):
            raise TypeError(
                f"{call}: modules[{i}] is {described(root)}, expected a torch.nn.Module"
            )
    return list({id(m): m for root in roots for m in root.modules()}.values())


def row_optimizers(module: nn.Module) -> RowOptimizers:
    """Return what trains the rows of a module's dynamic tables, but not of modules in it."""
    find = optimizers_in(module)
    return RowOptimizers() if find is None else find(module)


__all__ = ["modules_in", "row_optimizers", "table_optimizers"]
