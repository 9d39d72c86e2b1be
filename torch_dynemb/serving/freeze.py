"""Read-only copies of models: what is exported and served.

How a module is copied, its package says with :func:`torch_dynemb.register_module`.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, TypeVar, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_dynemb.argument_checks import described, flag
from torch_dynemb.distributed.dtensors import is_dtensor
from torch_dynemb.nn.module_kinds import RANKS, Choices, Ranks, frozen_of, register_module
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.serving.missing import CountsMissing
from torch_dynemb.serving.row_formats import RowKind, check_rows

Model = TypeVar("Model", bound=nn.Module)


@overload
def freeze(
    model: Model,
    *,
    ranks: Ranks = ...,
    missing: Literal[False] = ...,
    rows: RowKind | None = ...,
) -> Model: ...


@overload
def freeze(
    model: nn.Module, *, ranks: Ranks = ..., missing: bool, rows: RowKind | None = ...
) -> nn.Module: ...


def freeze(
    model: nn.Module,
    *,
    ranks: Ranks = "all",
    missing: bool = False,
    rows: RowKind | None = None,
) -> nn.Module:
    """A deep copy of a model in eval mode whose dynamic tables are read-only.

    Its tables are buffers of the size in use, so it can be exported with ``torch.export``, saved,
    and moved between threads. The model itself is not changed, and may be a table module itself.

    Tables that several ranks share, in a DistributedModelParallel or in modules of
    ``torch_dynemb.recis`` and ``torch_dynemb.oneembedding`` over a process group, become tables of
    one process, which needs no process group any more: the copy of a DistributedModelParallel is
    the model in it, unsharded. All ranks call it together then, unless ``ranks`` is ``"own"``.

    What policies decide is decided: ids that admission has refused have no row, ids that have
    expired are left out, and nobody comes or goes. ``half()`` and ``to(dtype)`` of the copy convert
    the dense part and what lookups return; rows keep their dtype.

    Args:
        model: any module; the dense part is deep-copied as it is.
        ranks: where several ranks share tables: ``"all"``: every rank gets the rows of all;
            ``"first"``: rank 0 of their process group does, and the others get None; ``"own"``:
            every rank gets the rows that it has, and ids of other ranks read as ids that are not
            there.
        missing: True: the copy returns a pair: what the model returns, and how many ids were not in
            each table, see :class:`torch_dynemb.serving.CountsMissing`.
        rows: how the copy stores rows of dynamic tables. None: as the tables do. ``"int8"`` and
            ``"int4"``: with scale and bias by row, in FBGEMM's bytes; ``"fp8"``: E4M3 with a scale
            by row; ``"fp16"``, ``"bf16"``: rounded. A row of D columns takes D + 8, D / 2 + 4,
            D + 4 or 2 D bytes, in place of 4 D. Lookups compute in float32. Ids that are not there
            read what their initializer gives, whichever it is, in float32, with ``"fp16"`` and
            ``"bf16"`` rounded to these. See :func:`torch_dynemb.ops.quantize_rows`.

    Returns:
        A model of the same class; table modules in it are replaced by read-only ones. With
        ``missing`` a :class:`torch_dynemb.serving.CountsMissing` that has it. None on ranks that
        get none.

    Raises:
        TypeError: ``model`` is no module, or has tables of a class that has no ``frozen``
            (:func:`torch_dynemb.register_module`), or parameters that are DTensors; ``missing`` is
            no bool.
        ValueError: ``ranks`` is none of its values; or it is ``"own"``, and this rank has some
            columns of a table only, or not all of a static one; or ``missing`` is True, and there
            are no dynamic tables; or ``rows`` is none of its values, or a table has rows that they
            do not hold: with NaN, infinity or values beyond their range, or of an odd number of
            columns with ``"int4"``.
        HostMemoryError: rows of a table lie in a store or on other ranks, and the copy does not fit
            in memory.

    Example:
        >>> import torch, torch_dynemb as td
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1))
        >>> model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1))
        >>> ids = torch.tensor([[1, 2], [3, 1]])
        >>> _ = model(ids)
        >>> program = torch.export.export(td.freeze(model), (ids,))
        >>> torch.equal(program.module()(ids), model.eval()(ids))
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze: model is {described(model)}, expected a torch.nn.Module")
    if ranks not in RANKS:
        raise ValueError(f"freeze: ranks is {ranks!r}, expected one of {RANKS}")
    flag("freeze: missing", missing)
    check_rows("freeze", rows)
    frozen = frozen_by(Choices(ranks), model)
    if frozen is None:
        return None  # type: ignore[return-value]
    if rows is not None:
        for part in frozen.modules():
            if isinstance(part, FrozenTables):
                part.store_rows(rows)
    return CountsMissing(frozen) if missing else frozen


def frozen_by(choices: Choices, model: Model) -> Model | None:
    """What :func:`freeze` gives, also for what is in a registered wrapper.

    Args:
        choices: that the wrapper's ``frozen`` was given.
        model: any module.

    Returns:
        The copy; None on a rank that gets none.
    """
    memo: dict[int, Any] = {}
    _freeze_parts(model, memo, choices)
    if any(part is None for part in memo.values()):
        return None
    return copy.deepcopy(model, memo).eval()


def _freeze_parts(module: nn.Module, memo: dict[int, Any], choices: Choices) -> None:
    """Puts read-only copies of a module's parts where deepcopy looks for them."""
    if id(module) in memo:
        return
    make = frozen_of(module)
    if make is not None:
        memo[id(module)] = make(module, choices)
        return
    if isinstance(module, TableModule):
        raise TypeError(
            f"freeze: {type(module).__name__} is not a module that freeze() knows: register what "
            "makes a read-only copy of it with torch_dynemb.register_module(..., frozen=)"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if is_dtensor(parameter):
            raise TypeError(
                f"freeze: parameter {name!r} of {type(module).__name__} is a DTensor, of which "
                "this rank has a part: save the model with torch_dynemb.checkpoint.save, load it "
                "into one that FSDP or tensor parallelism have not sharded, and freeze that"
            )
    for part in module.children():
        _freeze_parts(part, memo, choices)


def _replicated(source: DistributedDataParallel, choices: Choices) -> nn.Module | None:
    """What is in it, of which all ranks have the same."""
    return frozen_by(choices, source.module)


register_module(DistributedDataParallel, frozen=_replicated)

__all__ = ["freeze", "frozen_by"]
