"""Loading of sources into the tables of a model: all rows, or no change."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described, flag, integer
from torch_dynemb.checkpoint.saving.handle import check_none_running
from torch_dynemb.checkpoint.saving.increments import count_from
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.migrate.source import Source
from torch_dynemb.migrate.target import Target
from torch_dynemb.parts.table_parts import TablePart, end_steps, groups_of, parts_of
from torch_dynemb.parts.whole_tables import check_whole
from torch_dynemb.process.torch_modes import plain_torch
from torch_dynemb.rows.into_part import loaders_of, publish_all, replace_content

NonFinite = Literal["error", "keep"]
Sources = Source | Mapping[str, Source]


class MigratedTable(NamedTuple):
    """Result for a table, over all ranks.

    Attributes:
        ids: number of ids in the table.
        fresh: content that starts with initial values, because the source lacks it, or an option
            excludes it.
        left_out: content of the source that the table does not keep.
    """

    ids: int
    fresh: tuple[str, ...]
    left_out: tuple[str, ...]


@plain_torch()
def load(
    model: nn.Module,
    source: Sources,
    *,
    replace: bool = False,
    optimizer_state: bool = True,
    scores: bool = True,
    non_finite: NonFinite = "error",
    batch_size: int = 1 << 16,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, MigratedTable]:
    """Load rows of sources into tables; all ranks that share the tables call it together.

    Every source is read twice: a first pass checks all rows, a second one writes them. Memory
    holds one batch and the ids, 8 bytes each. Each rank reads everything and keeps the ids and
    columns that it owns. Rows are converted to the dtype of the table. Admission does not apply
    to them. Optimizers keep the model's hyper-parameters.

    Args:
        model: a module of this library, a model with such modules, or a
            DistributedModelParallel.
        source: a source, for a model with one table; or sources by name of the table. Other
            tables do not change.
        replace: remove the ids that tables have; False: tables must be empty.
        optimizer_state: load the source's optimizer state; False: the state is initialized, so
            the optimizer may be another one.
        scores: load scores that the source has and the table keeps.
        non_finite: ``"error"`` refuses NaN and infinity in rows and state; ``"keep"`` loads them.
        batch_size: rows of a batch, at least 1.
        process_group: of the ranks that load together; default: all.

    Returns:
        Loaded and omitted content, by table.

    Raises:
        TypeError: an argument has a wrong type, or a source returns tensors of a wrong type.
        FileNotFoundError: a file is missing.
        ValueError: a source is damaged, has an id twice, or does not fit its table, or the table
            has ids. Or a finite value is infinite in a narrower dtype of the table.
        NoRoomError: memory is short.
        InUseError, BackgroundError: a background save is running, or has failed.
        ForkedProcessError: this process is a fork of the one that made the tables.
        ReplacedError: a source has changed while it was read.

    In all cases all ranks raise, and the tables do not change. One exception: a failed write
    empties tables that had ids if their rows are in a store, or if memory has no room for old and
    new rows together.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> ids = torch.tensor([10, -3, 2**40])
        >>> old = torch.nn.Embedding(3, 4)
        >>> items = td.DynamicEmbedding(4, optimizer=td.Adagrad(lr=0.1))
        >>> migrate.load(items, migrate.read_embedding(old, ids))
        {'embedding': MigratedTable(ids=3, fresh=('optimizer state',), left_out=())}
        >>> torch.equal(items(ids), old.weight)
        True
    """
    ranks = ranks_of(process_group)

    def prepare() -> tuple[list[TablePart], dict[str, Source] | Source]:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"migrate.load: model is {described(model)}, expected a torch.nn.Module"
            )
        for name, value in (
            ("replace", replace),
            ("optimizer_state", optimizer_state),
            ("scores", scores),
        ):
            flag(f"migrate.load: {name}", value)
        if non_finite not in ("error", "keep"):
            raise ValueError(
                f"migrate.load: non_finite is {non_finite!r}, expected 'error' or 'keep'"
            )
        integer("migrate.load: batch_size", batch_size, least=1)
        check_none_running()
        return parts_of(model), _checked_sources(source)

    parts, given = ranks.run(prepare)
    names = _tables_of(ranks, parts)
    sources = ranks.run(lambda: _by_table(given, names))
    ranks.agree(
        "migrate.load",
        source=sorted(sources),
        replace=replace,
        optimizer_state=optimizer_state,
        scores=scores,
        non_finite=non_finite,
    )

    def checked() -> list[Target]:
        targets = []
        for part in parts:
            if part.name not in sources:
                continue
            part.group.tables.check_own()
            target = Target(
                part, sources[part.name], optimizer_state=optimizer_state, scores=scores
            )
            target.check_empty(replace)
            target.read(batch_size, finite=non_finite == "error")
            targets.append(target)
        return targets

    targets = ranks.run(checked)
    found, into = [target.part for target in targets], [target.into for target in targets]
    gathered = ranks.gather([(of.step, of.now) for of in into])
    latest = [max(every) for every in zip((0, 0), *chain(*gathered), strict=True)]
    for of in into:
        of.step, of.now = latest

    def write() -> None:
        for target in targets:
            target.write(batch_size)

    ranks.run(lambda: end_steps(found))
    replace_content(
        ranks, loaders_of(into), lambda: ranks.run(write), lambda: publish_all(into, forward=True)
    )
    ranks.run(lambda: count_from(groups_of(found), None))
    return _told(ranks, targets)


def _checked_sources(source: object) -> dict[str, Source] | Source:
    if isinstance(source, Source):
        return source
    if not isinstance(source, Mapping):
        raise TypeError(
            f"migrate.load: source is {described(source)}, expected a Source or a dict of them by "
            "table: see the functions torch_dynemb.migrate.read_..."
        )
    for name, one in source.items():
        if not isinstance(name, str) or not isinstance(one, Source):
            raise TypeError(
                f"migrate.load: source has {described(name)}: {described(one)}, expected the name "
                "of a table and a Source"
            )
    return dict(source)


def _tables_of(ranks: Ranks, parts: list[TablePart]) -> list[str]:
    told = ranks.gather([(ranks.rank, part.shard) for part in parts])
    places = [place for of_rank in told for place in of_rank]
    if ranks.size > 1:  # a process on its own may have some ids of a table
        check_whole(places)
    return sorted({shard.name for _, shard in places})


def _by_table(given: dict[str, Source] | Source, names: list[str]) -> dict[str, Source]:
    if isinstance(given, Source):
        if len(names) != 1:
            raise ValueError(
                f"migrate.load: the model has tables {names}: give a dict with the source of each "
                "table that is to be loaded"
            )
        return {names[0]: given}
    unknown = sorted(given.keys() - set(names))
    if unknown:
        raise ValueError(
            f"migrate.load: source has table {unknown[0]!r}, but the model has {names}"
        )
    return given


def _told(ranks: Ranks, targets: list[Target]) -> dict[str, MigratedTable]:
    here = [
        (of.part.name, of.part.first_column, MigratedTable(of.into.count, of.fresh, of.left_out))
        for of in targets
    ]
    result: dict[str, MigratedTable] = {}
    for of_rank in ranks.gather(here):
        for name, first_column, table in of_rank:
            known = result.get(name, table._replace(ids=0))
            result[name] = known._replace(ids=known.ids + (table.ids if first_column == 0 else 0))
    return dict(sorted(result.items()))


__all__ = ["MigratedTable", "NonFinite", "Sources", "load"]
