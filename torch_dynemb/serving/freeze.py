"""Read-only copies of models, for export and serving.

A package registers how its modules are copied, by :func:`torch_dynemb.register_module`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

from torch import nn

from torch_dynemb.argument_checks import described, flag
from torch_dynemb.delta_log.redis.rows import RedisRows
from torch_dynemb.distributed.dtensors import is_dtensor
from torch_dynemb.nn.module_kinds import (
    RANK_CHOICES,
    Choices,
    KeptTables,
    RankChoice,
    frozen_of,
)
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.nn.wrappers import FSDP, wrapped_by
from torch_dynemb.parts.kept_ids import check_names, rules_of
from torch_dynemb.parts.table_parts import parts_of
from torch_dynemb.policy.keep import Keep, check_keep
from torch_dynemb.serving.file_tables import ROWS_IN, FileTables
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.serving.missing import CountedTables, CountsMissing
from torch_dynemb.serving.remote_tables import RemoteModel
from torch_dynemb.serving.row_files import RowFolder
from torch_dynemb.serving.row_formats import RowKind, check_rows
from torch_dynemb.storage.tiers.configs import SSDStore

Model = TypeVar("Model", bound=nn.Module)
Storage = SSDStore | RedisRows


@overload
def freeze(
    model: Model,
    *,
    ranks: RankChoice = ...,
    missing: Literal[False] = ...,
    rows: RowKind | None = ...,
    keep: Keep | None = ...,
    storage: Storage | None = ...,
) -> Model: ...


@overload
def freeze(
    model: nn.Module,
    *,
    ranks: RankChoice = ...,
    missing: bool,
    rows: RowKind | None = ...,
    keep: Keep | None = ...,
    storage: Storage | None = ...,
) -> nn.Module: ...


def freeze(
    model: nn.Module,
    *,
    ranks: RankChoice = "all",
    missing: bool = False,
    rows: RowKind | None = None,
    keep: Keep | None = None,
    storage: Storage | None = None,
) -> nn.Module:
    """Copy a model in eval mode, with read-only dynamic tables.

    Its tables are buffers of the size in use, so it can be exported with ``torch.export``, saved,
    and moved between threads. The model itself is not changed, and may itself be a table module.

    Several ranks may share tables: in a DistributedModelParallel, or in modules of
    ``torch_dynemb.recis`` and ``torch_dynemb.oneembedding`` over a process group. These become
    tables of one process, without a process group. The copy of a DistributedModelParallel is the
    unsharded model. All ranks then call this together, unless ``ranks`` is ``"own"``.

    The set of ids is fixed: ids that were not admitted have no row, expired ids are left out, and
    nothing is inserted or evicted. ``half()`` and ``to(dtype)`` of the copy convert the dense state
    and the outputs of lookups; rows keep their dtype.

    Args:
        model: any module; its dense state is deep-copied.
        ranks: if several ranks share tables: ``"all"``: every rank gets the rows of all.
            ``"first"``: rank 0 of their process group does, and the others get None. ``"own"``:
            every rank gets its own rows, and ids of other ranks read as missing ids.
        missing: True: the copy returns a pair: the model's output, and the number of missing ids in
            each table, see :class:`torch_dynemb.serving.CountsMissing`.
        rows: storage of rows of dynamic tables in the copy. None: as in the tables. ``"int8"`` and
            ``"int4"``: with scale and bias by row, in FBGEMM's bytes. ``"fp8"``: E4M3 with a scale
            by row. ``"fp16"``, ``"bf16"``: rounded. A row of D columns takes D + 8, D / 2 + 4, D +
            4 or 2 D bytes, in place of 4 D. Lookups compute in float32. Missing ids read the values
            of their initializer in float32, rounded for ``"fp16"`` and ``"bf16"``. See
            :func:`torch_dynemb.ops.quantize_rows`.
        keep: ids to copy: :class:`torch_dynemb.Top` or :class:`torch_dynemb.AtLeast`, for all
            dynamic tables, or a dict by table name, as in a checkpoint. Other ids read as missing
            ones; tables that the dict lacks are copied whole. None: all ids are copied. If ranks
            share tables, all of them call this together, and the best ids are those of all ranks.
        storage: where the rows of dynamic tables lie. None: in memory. A
            :class:`torch_dynemb.SSDStore`: in files of its ``path``, a new folder, with as many
            rows in memory as its ``cache`` says. ``disk`` and ``io`` mean what they mean there;
            ``segment`` means nothing. Rows are copied in pieces, so they need not fit in memory.
            The files belong to the copy and must stay where they are; a process opens them once. A
            :class:`torch_dynemb.delta_log.RedisRows`: rows are read from Redis, by the names of
            their tables in a checkpoint, and none is copied. The model needs none itself.

    Returns:
        A model of the same class, with read-only table modules. With ``missing``: a
        :class:`torch_dynemb.serving.CountsMissing` of it. None on ranks that get no copy. With rows
        in Redis: a :class:`torch_dynemb.serving.RemoteModel`.

    Raises:
        TypeError: ``model`` is not a module, has parameters that are DTensors, or has tables of a
            class without ``frozen`` (:func:`torch_dynemb.register_module`). Or ``missing`` is not a
            bool, or ``keep`` not a rule.
        ValueError: ``ranks`` or ``rows`` is unknown. ``ranks`` is ``"own"``, and this rank has only
            some columns of a table, or a part of a static one. ``missing`` is True, and the model
            has no dynamic tables. ``rows`` cannot hold the rows of a table: they have NaN, infinity
            or values beyond its range, or an odd number of columns with ``"int4"``. ``keep`` names
            an unknown table, or a score that a table does not keep. ``storage`` is given with a
            frozen model, or has rows in Redis of other tables, or ``rows``, ``keep`` or
            ``ranks="first"`` beside it.
        FileExistsError: the path of ``storage`` is not empty.
        DiskFullError: its disk is full; what was written is removed.
        HostMemoryError: rows of a table lie in a store or on other ranks, and the copy does not fit
            in memory.
        InUseError: another thread trains or changes the tables, so the copy would mix their steps.

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
    if ranks not in RANK_CHOICES:
        raise ValueError(f"freeze: ranks is {ranks!r}, expected one of {RANK_CHOICES}")
    flag("freeze: missing", missing)
    check_rows("freeze", rows)
    _check_storage(model, storage)
    if isinstance(storage, RedisRows):
        return _with_remote_rows(model, storage, ranks, missing, rows, keep)
    _check_rows_stay(model, rows)
    kept = None if keep is None else _kept_tables(model, keep)
    with _rows_in(None if storage is None else RowFolder(storage, rows)):
        frozen = frozen_by(Choices(ranks, kept), model)
        if kept is not None and isinstance(keep, Mapping):
            check_names("freeze", "keep", list(keep), sorted(kept.names))
        if frozen is None:
            return None  # type: ignore[return-value]
        for part in frozen.modules():
            if isinstance(part, FileTables):
                part.open()
            elif isinstance(part, FrozenTables) and rows is not None:
                part.store_rows(rows)
        return CountsMissing(frozen) if missing else frozen


def _check_storage(model: nn.Module, storage: object) -> None:
    if storage is None:
        return
    if not isinstance(storage, Storage):
        raise TypeError(
            f"freeze: storage is {described(storage)}, expected a torch_dynemb.SSDStore, a "
            "torch_dynemb.delta_log.RedisRows, or None for rows in memory"
        )
    if isinstance(storage, SSDStore) and storage.device_cache is not None:
        raise ValueError(
            f"freeze: storage has device_cache={storage.device_cache!r}, but the CPU serves rows "
            "of files: leave it out"
        )
    if any(isinstance(part, CountedTables) for part in model.modules()):
        raise ValueError(
            "freeze: storage is given, but the model is frozen already: give storage when it is "
            "frozen first"
        )


def _with_remote_rows(
    model: nn.Module,
    storage: RedisRows,
    ranks: RankChoice,
    missing: bool,
    rows: RowKind | None,
    keep: Keep | None,
) -> nn.Module:
    """Freeze a model without its rows, which lie in Redis; a rank needs none of another one."""
    for name, given in (("rows", rows), ("keep", keep)):
        if given is not None:
            raise ValueError(
                f"freeze: {name} is {given!r}, but storage has its rows and ids already: give it "
                "to the log that they follow, DeltaLog(...)"
            )
    if ranks == "first":
        raise ValueError(
            "freeze: ranks is 'first', but rows in storage come to no rank: leave ranks out"
        )
    token = ROWS_IN.set(storage)
    try:
        frozen = frozen_by(Choices("own"), model)
    finally:
        ROWS_IN.reset(token)
    assert frozen is not None
    return RemoteModel(CountsMissing(frozen) if missing else frozen, storage)


def _check_rows_stay(model: nn.Module, rows: RowKind | None) -> None:
    """Raise ValueError if the model has rows that cannot be stored in another format."""
    fixed = (
        part
        for part in model.modules()
        if isinstance(part, CountedTables) and not isinstance(part, FrozenTables)
    )
    if rows is not None and (part := next(fixed, None)) is not None:
        raise ValueError(
            f"freeze: rows is {rows!r}, but the model has {type(part).__name__}, with rows that "
            "keep their format: give rows when it is frozen first"
        )


@contextmanager
def _rows_in(folder: RowFolder | None) -> Iterator[None]:
    """Let copies of tables put their rows into a folder, which is removed after an error."""
    if folder is None:
        yield
        return
    token = ROWS_IN.set(folder)
    try:
        yield
        folder.finish()
    except BaseException:
        folder.remove()
        raise
    finally:
        ROWS_IN.reset(token)


def _kept_tables(model: nn.Module, keep: Keep) -> KeptTables:
    """Return the rule of each table of a model on this rank."""
    check_keep("freeze", keep)
    parts = parts_of(model)
    if not parts and any(isinstance(part, CountedTables) for part in model.modules()):
        raise ValueError(
            f"freeze: keep is {keep!r}, but the model is frozen already, without scores: give keep "
            "when it is frozen first"
        )
    rules = rules_of("freeze", keep, parts)
    return KeptTables(
        {
            (id(part.group), part.table): (part.name, rule)
            for part, rule in zip(parts, rules, strict=True)
        }
    )


def frozen_by(choices: Choices, model: Model) -> Model | None:
    """Freeze a model as :func:`freeze` does, also inside a registered wrapper.

    Args:
        choices: passed to the wrapper's ``frozen``.
        model: any module.

    Returns:
        The copy; None on a rank that gets no copy.
    """
    memo: dict[int, Any] = {}
    _freeze_parts(model, memo, choices)
    if any(part is None for part in memo.values()):
        return None
    return copy.deepcopy(model, memo).eval()


def _freeze_parts(module: nn.Module, memo: dict[int, Any], choices: Choices) -> None:
    """Put read-only copies of a module's parts where deepcopy looks for them."""
    if id(module) in memo:
        return
    make = frozen_of(module)
    if make is not None:
        memo[id(module)] = make(module, choices)
        return
    inner = wrapped_by(module)
    if inner is not None and inner != FSDP:  # which has parts of its parameters
        wrapped = module.get_submodule(inner)
        _freeze_parts(wrapped, memo, choices)
        memo[id(module)] = copy.deepcopy(wrapped, memo)  # other parts may share it
        return
    if isinstance(module, TableModule):
        raise TypeError(
            f"freeze: {type(module).__name__} is not a module that freeze() knows: register a "
            "function that makes a read-only copy, by torch_dynemb.register_module(..., frozen=)"
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


__all__ = ["freeze", "frozen_by"]
