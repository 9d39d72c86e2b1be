"""Clipping of one norm over all gradients of a model, rows included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_dynemb.argument_checks import number
from torch_dynemb.distributed.dtensors import is_dtensor, replicated, whole
from torch_dynemb.nn.module_kinds import SharedRows
from torch_dynemb.nn.table_optimizers import modules_in, row_optimizers
from torch_dynemb.optim import SplitOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip one norm over the gradients of all parameters and rows, as torch's function does.

    Ranks may share tables: TorchRec's, and those of :mod:`torch_dynemb.recis` with a process group.
    Then all ranks of the group call this function and get one norm, over the rows of all ranks.
    Gradients of parameters are assumed to be equal on all ranks, as DistributedDataParallel makes
    them, or DTensors, as FSDP2 makes them.

    Args:
        modules: one, or several, with their parameters and the dynamic tables in them.
        max_norm, norm_type, error_if_nonfinite: as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, 0-d.

    Raises:
        TypeError: ``modules`` are not modules, or ``max_norm`` or ``norm_type`` is not a number.
        ValueError: a table updates its rows in backward, so its gradients are gone. Construct it
            with ``split=True``, or clip each row with the optimizer's ``clip_norm``.
        RuntimeError: gradients of rows are multiplied by the scale of ``GradScaler``. Or the norm
            is not finite, and ``error_if_nonfinite`` is True. After an error, all gradients are
            unchanged.
    """
    found = modules_in("clip_grad_norm_", modules)
    max_norm = number("clip_grad_norm_: max_norm", max_norm)
    norm_type = number("clip_grad_norm_: norm_type", norm_type)
    local: dict[int, nn.Parameter] = {}
    shared: dict[SharedRows, dict[int, nn.Parameter]] = {}
    for module in found:
        optimizers, rows, anchor = row_optimizers(module)
        splits = [optimizer for optimizer in optimizers if isinstance(optimizer, SplitOptimizer)]
        if len(splits) < len(optimizers):
            raise ValueError(
                f"clip_grad_norm_: {type(module).__name__} updates its rows in backward, so their "
                "gradients are gone: construct it with split=True, or give its optimizer clip_norm"
            )
        for split in splits:
            split.check_unscaled("clip_grad_norm_", "call scaler.unscale_(optimizer) first")
        of_rows = local if rows is None else shared.setdefault(rows, {})
        of_rows |= {id(p): p for o in splits for p in o.stand_ins()}
        local |= {id(p): p for p in module.parameters(recurse=False) if p is not anchor}
    on_meshes = _by_mesh(local.values())
    if not shared and len(on_meshes) < 2:
        local_norm = nn.utils.clip_grad_norm_(
            local.values(), max_norm, norm_type, error_if_nonfinite
        )
        return whole(local_norm)
    norms = [_norm(of, norm_type) for of in on_meshes.values()]
    norms += [_norm_over(rows, list(of.values()), norm_type) for rows, of in shared.items()]
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([n.to(norms[-1].device) for n in norms]), norm_type
    )
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(norm)}, so "
            "they cannot be clipped; error_if_nonfinite=False scales them by it anyway"
        )
    for mesh, clipped in on_meshes.items():
        of_mesh = norm if mesh is None else replicated(norm, mesh)
        nn.utils.clip_grads_with_norm_(clipped, max_norm, of_mesh)
    rows_of_ranks = [p for of in shared.values() for p in of.values()]
    nn.utils.clip_grads_with_norm_(rows_of_ranks, max_norm, norm)
    return norm


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[DeviceMesh | None, list[nn.Parameter]]:
    """Return those with a gradient, DTensors by their mesh: torch multiplies only these at once."""
    found: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            mesh = gradient.device_mesh if is_dtensor(gradient) else None
            found.setdefault(mesh, []).append(parameter)
    return found


def _norm(parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    gradients = [grad for grad in (p.grad for p in parameters) if grad is not None]
    return whole(nn.utils.get_total_norm(gradients, norm_type)).to(torch.float32)


def _norm_over(rows: SharedRows, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    """Return the norm of gradients that are split over ranks."""
    norm = _norm(parameters, norm_type).to(rows.device)
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, rows.ranks)
        return norm
    total: Tensor = norm**norm_type
    dist.all_reduce(total, group=rows.ranks)
    return total ** (1.0 / norm_type)


__all__ = ["clip_grad_norm_"]
