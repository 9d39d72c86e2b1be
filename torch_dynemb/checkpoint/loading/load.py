"""Loading of a checkpoint into a model, on any number of ranks and in any sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described, flag
from torch_dynemb.checkpoint.loading.exact import ExactLoad, saved_group_of
from torch_dynemb.checkpoint.loading.group import GroupLoad, RowsLoad
from torch_dynemb.checkpoint.loading.later import LaterChanges
from torch_dynemb.checkpoint.loading.part import Stream
from torch_dynemb.checkpoint.loading.table_plan import (
    OnMissingState,
    TablePlan,
    plan_of,
    resumed_plan,
)
from torch_dynemb.checkpoint.manifest.file import check_full, is_replaced, read_manifest
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.checkpoint.reading.dense_files import read_dense, read_state
from torch_dynemb.checkpoint.saving.dense_state import dense_state
from torch_dynemb.checkpoint.saving.handle import check_none_running
from torch_dynemb.checkpoint.saving.increments import count_from
from torch_dynemb.checkpoint.saving.keep_last import continues_series
from torch_dynemb.console.progress import progress_bar
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.errors import ReplacedError
from torch_dynemb.files.checksummed_files import check_file
from torch_dynemb.files.locations import Location, checked_location
from torch_dynemb.parts.saved_tables import SavedTable
from torch_dynemb.parts.table_parts import TablePart, end_steps, groups_of, parts_of
from torch_dynemb.parts.whole_tables import check_whole
from torch_dynemb.process.torch_modes import one_thread, plain_torch
from torch_dynemb.rows.into_part import replace_content
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.sampling import list_again


class LoadedTable(NamedTuple):
    """Result of loading a table, over all ranks.

    Attributes:
        ids: number of loaded ids.
        evicted: number of ids that exceeded the capacity: those with the lowest scores.
        fresh: state that starts anew, because it was not saved or not requested.
        exact: whether every id and row is back in its place, so that training resumes bit for bit.
            Otherwise ids and values are the same, but their places differ, which may affect later
            evictions.
    """

    ids: int
    evicted: int
    fresh: tuple[str, ...]
    exact: bool


class LoadReport(NamedTuple):
    """Result of a load.

    Attributes:
        uuid: uuid of the checkpoint.
        tables: results by table name.
        state: the ``state`` that was given to :func:`save`.
        missing: tables of the model that were not saved, and are unchanged.
        unexpected: saved tables that the model lacks.
    """

    uuid: str
    tables: dict[str, LoadedTable]
    state: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __repr__(self) -> str:
        """Representation without the values in ``state``, which may be large tensors."""
        state = list(self.state) if isinstance(self.state, dict) else type(self.state).__name__
        return (
            f"LoadReport(uuid={self.uuid!r}, tables={self.tables}, state of {state}, "
            f"missing={self.missing}, unexpected={self.unexpected})"
        )


_NAMES = 8  # most names in an error
_ATTEMPTS = 10  # attempts to load a checkpoint that is replaced meanwhile


@plain_torch()
def load(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    on_missing_state: OnMissingState = "fresh",
    optimizer_state: bool = True,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Replace the content of a model by that of a checkpoint. All ranks call it together.

    The number of ranks, sharding, devices, capacities and row dtypes may differ from those of the
    save. Hyper-parameters of optimizers stay the model's.

    Args:
        path: path or URL of the checkpoint; see :func:`save`.
        model: model with tables of the saved names and columns.
        strict: whether checkpoint and model must have the same tables, parameters and buffers;
            False: load what both have.
        on_missing_state: what to do if the checkpoint lacks optimizer state, scores or counts of a
            table: ``"fresh"``: start them anew, or ``"error"``.
        optimizer_state: False: load rows alone and start optimizer state anew, so that the
            optimizer may be another one.
        process_group: ranks that load together; default: all.
        progress: show a progress bar; default: if the standard error is a terminal.

    Returns:
        What was loaded, and what was not.

    Raises:
        TypeError: a wrong argument.
        FileNotFoundError: ``path`` is not a checkpoint.
        DamagedFileError: a file is damaged or missing; it is a ValueError.
        UnsupportedFormatError: it has another format version; it is a ValueError, too.
        ValueError: the checkpoint does not fit the model; also without ``strict``, if they have no
            table and no entry in common. Or a finite value is infinite in a narrower dtype.
        NoRoomError: there is too little room or memory.
        InUseError: a save runs in the background.
        ReplacedError: other processes replace the checkpoint faster than it is read. In all these
            cases all ranks raise, and the model is unchanged. One exception: while rows are read,
            memory or the disk fails, or a value is infinite in a narrower dtype. Tables with ids
            are empty then if their rows lie in a store, or if memory cannot hold old and new rows
            together.
    """
    ranks = ranks_of(process_group)

    def prepare() -> tuple[Location, Manifest, list[TablePart]]:
        target = checked_location("checkpoint.load", path)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"checkpoint.load: model is {described(model)}, expected a torch.nn.Module"
            )
        flag("checkpoint.load: strict", strict)
        flag("checkpoint.load: optimizer_state", optimizer_state)
        if on_missing_state not in ("fresh", "error"):
            raise ValueError(
                f"checkpoint.load: on_missing_state is {on_missing_state!r}, expected 'fresh' or "
                "'error'"
            )
        check_none_running()
        manifest = read_manifest(target)
        check_full("checkpoint.load", target, manifest)
        return target, manifest, parts_of(model)

    def once() -> tuple[Manifest, list[TablePart], LoadReport]:
        folder, manifest, parts = ranks.run(prepare)
        ranks.agree(
            "checkpoint.load",
            path=str(path),
            uuid=manifest.uuid,
            strict=strict,
            optimizer_state=optimizer_state,
            on_missing_state=on_missing_state,
        )
        try:
            report = load_parts(
                ranks,
                "checkpoint.load",
                folder,
                manifest,
                parts,
                model,
                strict=strict,
                on_missing_state=on_missing_state,
                optimizer_state=optimizer_state,
                progress=progress,
            )
        except (ValueError, OSError, RuntimeError) as error:  # perhaps files of two checkpoints
            if is_replaced(folder, manifest.uuid):
                raise ReplacedError(
                    f"checkpoint.load: {folder} was replaced or removed while it was read: load "
                    "it again, or save less often",
                    path=folder,
                ) from error
            raise
        return manifest, parts, report

    for attempt in range(_ATTEMPTS):
        try:
            manifest, parts, report = once()
            break
        except ReplacedError:
            # ranks may have read different checkpoints, so the caller must retry
            if ranks.group is not None or attempt == _ATTEMPTS - 1:
                raise
    whole = not report.missing and not report.unexpected and optimizer_state
    whole = whole and not any(of.evicted or of.fresh for of in report.tables.values())
    saved = manifest.tables
    whole = whole and all(p.name not in saved or _as_saved(p, saved[p.name]) for p in parts)

    def loaded() -> None:
        count_from(groups_of(parts), manifest.uuid if whole else None)
        for group in groups_of(parts):
            list_again(group.tables)

    ranks.run(loaded)
    continues_series(model, checked_location("checkpoint.load", path), manifest.series)
    return report


def _as_saved(part: TablePart, saved: SavedTable) -> bool:
    """Return whether rows, scores and counts were loaded without a conversion."""
    own, logged = part.config.policy.description(), saved.policy
    half_lives = ("half_life", "admission_half_life")
    return part.dtype == saved.dtype and all(own.get(of) == logged.get(of) for of in half_lives)


def load_parts(
    ranks: Ranks,
    call: str,
    folder: Location,
    manifest: Manifest,
    parts: Sequence[TablePart],
    model: nn.Module,
    *,
    strict: bool,
    on_missing_state: OnMissingState = "fresh",
    optimizer_state: bool = True,
    progress: bool | None,
    later: LaterChanges | None = None,
    finish: Callable[[], object] = lambda: None,
) -> LoadReport:
    """Replace some tables of a model, and its dense state; see :func:`load`.

    Args:
        ranks: ranks that load together.
        call: prefix of errors.
        folder: folder of the checkpoint.
        manifest: its manifest.
        parts: tables on this rank.
        model: the model.
        strict, on_missing_state, optimizer_state, progress: see :func:`load`.
        later: changes after the checkpoint, to be loaded with it. The model must then be like the
            one that was saved; None: there are none.
        finish: called after the tables have been replaced, while signals are deferred; if it
            raises, the tables are cleared.

    Raises:
        Exception: as :func:`load`, and errors of ``finish``.
    """
    gathered = ranks.gather([(ranks.rank, part.shard) for part in parts])
    places = [place for of_rank in gathered for place in of_rank]
    if ranks.size > 1:  # a single process may have only some ids of a table
        check_whole(places)
    names = {shard.name for _, shard in places}
    ranks.run(lambda: _check_common(call, folder, manifest, names, model))
    missing = tuple(sorted(names - manifest.tables.keys()))
    unexpected = tuple(sorted(manifest.tables.keys() - names))
    if strict and (missing or unexpected):
        raise ValueError(
            f"{call}: {folder.name} lacks tables {list(missing)} of the model, "
            f"and the model lacks {list(unexpected)}: give strict=False to load the others"
        )

    def planned() -> list[TablePlan]:
        for group in groups_of(parts):
            group.tables.check_own()
        found = [part for part in parts if part.name in manifest.tables]
        if later is not None:
            return [
                resumed_plan(call, part, manifest.tables[part.name], later.tables.get(part.name))
                for part in found
            ]
        return [
            plan_of(
                part,
                manifest.tables[part.name],
                optimizer_state=optimizer_state,
                on_missing_state=on_missing_state,
            )
            for part in found
        ]

    plans = ranks.run(planned)
    dense = ranks.run(lambda: read_dense(folder, manifest.dense, model, strict=strict))
    if later is not None and later.sequence > 0:
        dense, state = ranks.run(lambda: dense.with_later(model, later.dense)), later.state
    else:
        state = ranks.run(lambda: read_state(folder, manifest.state))

    def finished() -> None:
        finish()
        dense.apply(model)

    loads = _load_tables(ranks, folder, manifest, plans, finished, progress)
    return LoadReport(manifest.uuid, _reported(ranks, plans, loads), state, missing, unexpected)


def _check_common(
    call: str, folder: Location, manifest: Manifest, tables: set[str], model: nn.Module
) -> None:
    """Raise ValueError if no table and no dense entry of a checkpoint is in the model."""
    own = {*tables, *dense_state(model)}
    saved = {*manifest.tables, *manifest.dense.entries, *(manifest.dense.values or {})}
    if own and saved and own.isdisjoint(saved):
        raise ValueError(
            f"{call}: {folder.name} has {sorted(saved)[:_NAMES]}, the model has "
            f"{sorted(own)[:_NAMES]}, and they have no name in common: load it into a model with "
            "the same paths; if it was saved as part 'net' of another model, into "
            "torch.nn.ModuleDict({'net': model})"
        )


def _load_tables(
    ranks: Ranks,
    folder: Location,
    manifest: Manifest,
    plans: Sequence[TablePlan],
    finish: Callable[[], None],
    progress: bool | None,
) -> list[GroupLoad]:
    """Load the tables of this rank, then the dense state."""
    groups = groups_of([plan.part for plan in plans])
    files = {
        file.path: file
        for plan in plans
        for part in (*plan.sources, *plan.id_sources)
        for file in part.files
    }
    total = sum(file.bytes for file in files.values())
    with progress_bar(f"loading {folder.name}", total, progress) as bar:
        stream = Stream(folder, bar.update)

        def chosen() -> list[GroupLoad]:
            loads = [
                _load_of(
                    group, [plan for plan in plans if plan.part.group is group], manifest, stream
                )
                for group in groups
            ]
            for load in loads:
                load.choose()
            if not all(load.loader.keeps for load in loads):
                # once, before anything is replaced
                for file in files.values():
                    check_file(folder / file.path, file.sums)
                stream.checked = False
                for load in loads:
                    load.check()
            return loads

        loads = ranks.run(chosen)
        ranks.run(lambda: end_steps([plan.part for plan in plans]))

        def write() -> None:
            with one_thread():
                ranks.run(lambda: _each(load.stream for load in loads))

        def publish() -> None:
            _each(load.publish for load in loads)

        # rows are streamed into unused rows first; only tables without room for both are cleared
        replace_content(ranks, [load.loader for load in loads], write, publish, finish)
    return loads


def _load_of(
    group: TableGroup, plans: Sequence[TablePlan], manifest: Manifest, stream: Stream
) -> GroupLoad:
    """Choose how a group is loaded.

    If a saved group has the same tables, shards and policies, every id and row gets its place back.
    Training then resumes bit for bit, evictions included.
    """
    changed = any(plan.later is not None for plan in plans)
    saved = None if changed else saved_group_of(group, plans, manifest)
    if saved is None:
        return RowsLoad(group, plans, stream)
    return ExactLoad(group, plans, manifest.groups[saved], stream)


def _each(steps: Iterable[Callable[[], None]]) -> None:
    for step in steps:
        step()


def _reported(
    ranks: Ranks, plans: Sequence[TablePlan], loads: Sequence[GroupLoad]
) -> dict[str, LoadedTable]:
    here: list[tuple[str, int, LoadedTable]] = []
    for load in loads:
        for plan, count, evicted in zip(load.plans, load.counts, load.evicted, strict=True):
            table = LoadedTable(count, evicted, plan.fresh, load.exact)
            here.append((plan.part.name, plan.part.first_column, table))
    result: dict[str, LoadedTable] = {}
    for of_rank in ranks.gather(here):
        for name, first_column, table in of_rank:
            known = result.setdefault(name, LoadedTable(0, 0, (), True))
            counted = first_column == 0
            result[name] = LoadedTable(
                known.ids + (table.ids if counted else 0),
                known.evicted + (table.evicted if counted else 0),
                tuple(sorted({*known.fresh, *table.fresh})),
                known.exact and table.exact,
            )
    return result


__all__ = ["LoadReport", "LoadedTable", "load", "load_parts"]
