"""DynamicEmb's functions that dump and load the tables of a model."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described, flag
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.files.locations import checked_path
from torch_dynemb.migrate.dynamicemb_dump import DumpSource
from torch_dynemb.migrate.dynamicemb_layout import COUNTER_ITEMS, ITEMS, files_of
from torch_dynemb.migrate.dynamicemb_writing import (
    DumpOptions,
    check_dumpable,
    dump_table,
    dumped_scores,
    unfinished,
    unfinished_of,
)
from torch_dynemb.migrate.load import load
from torch_dynemb.parts.table_parts import TablePart, end_steps, parts_of
from torch_dynemb.parts.whole_tables import check_whole
from torch_dynemb.policy.admission import AdmitFrequent
from torch_dynemb.process.torch_modes import plain_torch

TableNames = Mapping[str, Sequence[str]]
_ROOT = "model"  # DynamicEmb's name of the model itself


@plain_torch()
def DynamicEmbDump(  # noqa: N802
    path: str | PathLike[str],
    model: nn.Module,
    table_names: TableNames | None = None,
    optim: bool | None = False,
    counter: bool | None = False,
    pg: dist.ProcessGroup | None = None,
    allow_overwrite: bool = False,
    *,
    native_dtype: bool = False,
) -> None:
    """Dump the dynamic tables of a model in DynamicEmb's format; all ranks call it together.

    The arguments are those of DynamicEmb's function. DynamicEmb's own ``DynamicEmbLoad`` reads the
    files on any number of GPUs. All ranks write into one set of files, on a shared file system.
    The dump has these limits; :func:`torch_dynemb.checkpoint.save` keeps everything:

    * Rows and state become float32, which every version of DynamicEmb reads, or keep their dtype.
    * A table with several scores dumps the one that decides eviction. A table with times and
      frequencies dumps both.

    Files get their final names when all of them are complete.

    Args:
        path: the folder of the dump; it is created.
        model: with dynamic tables; they may be sharded.
        table_names: names of the tables to dump by path of their collection, such as
            ``{"model.sparse": ["users"]}``; default: all.
        optim: also dump optimizer state.
        counter: also dump counts of ids that wait for admission.
        pg: process group of the ranks that share the model; default: all.
        allow_overwrite: accept a folder with files; a dump of the same tables is replaced.
        native_dtype: keep the dtype of rows and state, as DynamicEmb does since September 2026. The
            files are half as large for rows of 16 bits; older versions misread them.

    Raises:
        TypeError: ``model`` is not a module, or another argument has a wrong type.
        FileExistsError: ``path`` is a file, or a folder that has files.
        ValueError: ``table_names`` has unknown tables, or a table has content that the format
            cannot express.
        OSError: the disk is full, or fails; existing files are not replaced. All ranks raise.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> from torch_dynemb.compat.dynamicemb import DynamicEmbDump, DynamicEmbLoad
        >>> users = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1))
        >>> users(torch.arange(5)).sum().backward()
        >>> users.optimizer.step()
        >>> folder = tempfile.TemporaryDirectory()
        >>> DynamicEmbDump(folder.name + "/dump", users, optim=True)
        >>> others = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1))
        >>> DynamicEmbLoad(folder.name + "/dump", others, optim=True)
        >>> torch.equal(others(torch.arange(5)), users(torch.arange(5)))
        True
        >>> folder.cleanup()
    """
    call, ranks = "DynamicEmbDump", ranks_of(pg)
    options = DumpOptions(bool(optim), bool(counter), bool(native_dtype))

    def prepare() -> tuple[Path, list[TablePart]]:
        parts = _parts_of(call, model)
        target = checked_path(call, path)
        flag(f"{call}: allow_overwrite", allow_overwrite)
        flag(f"{call}: native_dtype", native_dtype)
        try:
            os.fspath(target).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{call}: path is {os.fspath(target)!r}, which is not UTF-8, as torch needs to map "
                "its files: give another path"
            ) from error
        if target.exists() and not target.is_dir():
            raise FileExistsError(f"{call}: {target} is not a folder: give another path")
        if target.is_dir() and any(target.iterdir()) and not allow_overwrite:
            raise FileExistsError(
                f"{call}: {target} has files already: give another path, or allow_overwrite=True"
            )
        return target, parts

    target, parts = ranks.run(prepare)
    names = _wanted(ranks, call, parts, table_names)
    if not names:
        warnings.warn(f"{call}: the model has no dynamic tables", UserWarning, stacklevel=2)
        return

    def begin() -> None:
        for part in parts:
            if part.name in names:
                check_dumpable(call, part, options)
        end_steps(parts)
        for name in names if ranks.rank == 0 else ():
            _place(target, name)[0].mkdir(parents=True, exist_ok=True)

    ranks.run(begin)
    written: list[Path] = []
    try:
        for name in names:
            folder, table = _place(target, name)
            own = [part for part in parts if part.name == name]
            written += dump_table(ranks, folder, table, own, options)
        ranks.on_first(lambda: _rename(written, [_place(target, name) for name in names]))
    except BaseException:
        if ranks.rank == 0:
            for name in names:
                for left in unfinished_of(*_place(target, name)):
                    left.unlink(missing_ok=True)
        raise


@plain_torch()
def DynamicEmbLoad(  # noqa: N802
    path: str | PathLike[str],
    model: nn.Module,
    table_names: TableNames | None = None,
    optim: bool = False,
    counter: bool = False,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """Load tables dumped by DynamicEmb or :func:`DynamicEmbDump`; all ranks call it together.

    The arguments are those of DynamicEmb's function. The content of tables is replaced as a whole
    or not at all, see :func:`torch_dynemb.migrate.load`. The model keeps its learning rates and
    other hyper-parameters. The number of ranks and the sharding may differ from the dump's.

    Args:
        path: of the dump.
        model: with dynamic tables; they may be sharded.
        table_names: names of the tables to load by path of their collection, as in
            :func:`DynamicEmbDump`; default: all tables of the model.
        optim: also load optimizer state.
        counter: also load counts of ids that wait for admission, into tables that count them.
        pg: process group of the ranks that share the model; default: all.

    Raises:
        TypeError: ``model`` is not a module, or another argument has a wrong type.
        FileNotFoundError: the dump of a table, or the requested state or counts, are missing.
        ValueError: files are damaged or missing, or do not fit a table: other columns, another
            optimizer, other scores. Nothing has been changed then.
        RuntimeError: see :func:`torch_dynemb.migrate.load`. All ranks raise.

    Example:
        See :func:`DynamicEmbDump`.
    """
    call, ranks = "DynamicEmbLoad", ranks_of(pg)

    def prepare() -> tuple[Path, list[TablePart]]:
        target = checked_path(call, path)
        flag(f"{call}: optim", optim)
        flag(f"{call}: counter", counter)
        if not target.is_dir():
            raise FileNotFoundError(
                f"{call}: path {os.fspath(path)!r} is not a folder: give that of a dump"
            )
        return target, _parts_of(call, model)

    target, parts = ranks.run(prepare)
    names = _wanted(ranks, call, parts, table_names)
    if not names:
        warnings.warn(f"{call}: the model has no dynamic tables", UserWarning, stacklevel=2)
        return
    now = max(ranks.gather(int(time.time())))
    told = ranks.gather([_Kept.of(part) for part in parts])
    kept = {of.name: of for of_rank in told for of in of_rank}
    sources = ranks.run(
        lambda: {
            name: _source(target, kept[name], optim=optim, counter=counter, now=now)
            for name in names
        }
    )
    load(model, sources, replace=True, optimizer_state=optim, process_group=pg)


class _Kept(NamedTuple):
    """Settings of a table that all ranks exchange.

    Attributes:
        name: of the table.
        scores: names of scores in its dump.
        state: names of its optimizer's state.
        counts: whether admission counts ids exactly.
    """

    name: str
    scores: tuple[str, ...]
    state: tuple[str, ...]
    counts: bool

    @staticmethod
    def of(part: TablePart) -> _Kept:
        tensors = part.optimizer.state if part.optimizer is not None else ()
        counts = isinstance(part.config.policy.admission, AdmitFrequent)
        return _Kept(part.name, dumped_scores(part), tuple(of.name for of in tensors), counts)


def _source(path: Path, kept: _Kept, *, optim: bool, counter: bool, now: int) -> DumpSource:
    """Return the source of a table.

    Raises:
        FileNotFoundError, ValueError: see :func:`DynamicEmbLoad`.
    """
    name = kept.name
    folder, table = _place(path, name)

    def read(scores: tuple[str, ...] | None) -> DumpSource:
        return DumpSource(folder, table, scores=scores, now=now, counter=counter and kept.counts)

    source = read(kept.scores if len(kept.scores) > 1 else None)
    # older dumps do not name their scores: use the table's names
    alike = {source.scores, kept.scores} == {("step",), ("custom",)}
    if alike or (not source.scores and kept.scores and source.words == len(kept.scores)):
        source = read(kept.scores)
    where = f"DynamicEmbLoad: table {name!r}"
    strategy = source.options.get("evict_strategy")
    if source.scores and kept.scores and not set(source.scores) & set(kept.scores):
        raise ValueError(
            f"{where} keeps the score {kept.scores[0]!r}, but it was dumped with evict_strategy "
            f"{strategy!r}, scores {source.scores}: give it the score_strategy with which it was "
            "dumped"
        )
    if optim and kept.state and source.embedding_dim is not None:
        if not source.has_state_files:
            raise FileNotFoundError(
                f"{where}: {folder} has no files {table}_emb_opt_values.rank_*: give optim=False"
            )
        if set(source.state) != set(kept.state):
            raise ValueError(
                f"{where} has an optimizer with state {list(kept.state)}, but it was dumped with "
                f"{source.options.get('opt_type')!r}, state {list(source.state)}: give it this "
                "optimizer, or optim=False for rows alone"
            )
    return source


def _parts_of(call: str, model: object) -> list[TablePart]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{call}: model is {described(model)}, expected a torch.nn.Module")
    parts = parts_of(model)
    for part in parts:
        part.group.tables.check_own()
    return parts


def _place(path: Path, name: str) -> tuple[Path, str]:
    """Return the folder of a table's collection, and the table's name in it."""
    module, _, table = name.rpartition(".")
    return path / (f"{_ROOT}.{module}" if module else _ROOT), table


def _wanted(
    ranks: Ranks, call: str, parts: Sequence[TablePart], table_names: TableNames | None
) -> list[str]:
    """Return the names of the selected tables, on all ranks."""
    told = ranks.gather([(ranks.rank, part.shard) for part in parts])
    places = [place for of_rank in told for place in of_rank]
    if ranks.size > 1:
        check_whole(places)
    known = sorted({shard.name for _, shard in places})
    if table_names is None:
        return known
    if not isinstance(table_names, Mapping):
        raise TypeError(
            f"{call}: table_names is {described(table_names)}, expected a dict with lists of names "
            "of tables by path of the collection"
        )
    by_place = {_place(Path(), name): name for name in known}
    wanted = []
    for collection, tables in table_names.items():
        for table in tables:
            place = Path(collection), table
            if place not in by_place:
                have = sorted(f"{folder}: {name}" for folder, name in by_place)
                raise ValueError(
                    f"{call}: table_names has {table!r} of {collection!r}, but the model has {have}"
                )
            wanted.append(by_place[place])
    return wanted


def _rename(written: Sequence[Path], places: Sequence[tuple[Path, str]]) -> None:
    """Give files their final names, and remove files of an earlier dump."""
    for path in written:
        unfinished(path).replace(path)
    for folder, table in places:
        for item in (*ITEMS, *COUNTER_ITEMS):
            for old in set(files_of(folder, table, item).values()) - set(written):
                old.unlink()


__all__ = ["DynamicEmbDump", "DynamicEmbLoad"]
