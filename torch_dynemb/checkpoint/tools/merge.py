"""Merging of a whole checkpoint and its increments into one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from os import PathLike

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.checkpoint.file_names import DELTA
from torch_dynemb.checkpoint.manifest.file import check_full
from torch_dynemb.checkpoint.reading.reader import Checkpoint
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable
from torch_dynemb.checkpoint.tools.reshard import split_of, write_parts
from torch_dynemb.errors import NewBaseNeededError
from torch_dynemb.files.locations import checked_location
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.parts.merged_ids import outside
from torch_dynemb.parts.saved_tables import SavedPart, SavedTable
from torch_dynemb.process.torch_modes import plain_torch
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch

_IDS_AT_ONCE = 1 << 18
# fields that a table and its increments must have in common
_SAME = ("embedding_dim", "dtype", "seed", "optimizer", "scores", "padding_idx")


@plain_torch()
def merge(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    *,
    parts: int | None = None,
    progress: bool | None = None,
) -> None:
    """Merge a whole checkpoint and its increments into one whole checkpoint.

    The result has the content of a save without ``since=`` in place of the last increment. Every id
    has its row, state and scores from the last checkpoint that has it. Places of ids and rows are
    lost, as with :func:`reshard`. It takes some blocks of memory, and 8 bytes per id of the
    increments. Neither the model nor its ranks are needed.

    Args:
        paths: a whole checkpoint, then increments (:func:`save` with ``since=``), each of which
            continues the one before it.
        out: path or URL of the new checkpoint. It must not exist, and appears as a whole or not
            at all.
        parts: number of ranks that will load it; see :func:`reshard`. Default: as many as saved the
            last one.
        progress: show a progress bar; default: if the standard error is a terminal.

    Raises:
        TypeError, ValueError: a wrong argument, or checkpoints of other tables.
        NewBaseNeededError: an increment does not continue the one before it; it is a ValueError.
        FileNotFoundError: one of the paths is not a checkpoint.
        FileExistsError: ``out`` exists.
        DamagedFileError: a file is damaged or missing.
        OSError: the disk is full, or fails. In all cases nothing is left at ``out``.

    Example:
        See :func:`torch_dynemb.checkpoint.record_changes`.
    """
    if isinstance(paths, str | bytes) or not isinstance(paths, Sequence) or len(paths) == 0:
        raise TypeError(f"merge: paths is {described(paths)}, expected a list of paths")
    target = checked_location("merge", out)
    with ExitStack() as stack:
        chain = [stack.enter_context(open_checkpoint(path)) for path in paths]
        _check_chain(chain)
        last = chain[-1]
        ranks = last.ranks if parts is None else integer("merge: parts", parts, least=1)
        splits = {}
        for name, saved in last.manifest.tables.items():
            table = _MergedTable([of.tables[name] for of in chain])
            splits[name] = split_of(table, saved, ranks, None, None)
        write_parts("merging", last, target, splits, ranks, progress)


def _check_chain(chain: Sequence[Checkpoint]) -> None:
    """Raise NewBaseNeededError unless each increment continues the one before it."""
    check_full("merge: the first of paths", chain[0].folder, chain[0].manifest)
    for before, after in pairwise(chain):
        if after.kind != DELTA or after.parent != before.uuid:
            parent = after.parent
            continues = "it is a whole one" if parent is None else f"it continues {parent}"
            raise NewBaseNeededError(
                f"merge: {after.folder} does not continue {before.folder} (uuid "
                f"{before.uuid}): {continues}; give the increments in the order in which they were "
                "saved, without gaps",
                path=after.folder,
            )
        if after.tables.keys() != before.tables.keys():
            raise ValueError(
                f"merge: {after.folder} has tables {sorted(after.tables)}, but {before.folder} "
                f"has {sorted(before.tables)}"
            )
        for name, table in after.manifest.tables.items():
            _check_same(name, before, before.manifest.tables[name], after, table)


def _check_same(
    name: str, before: Checkpoint, old: SavedTable, after: Checkpoint, new: SavedTable
) -> None:
    for field in _SAME:
        one, other = getattr(old, field), getattr(new, field)
        if one != other:
            raise ValueError(
                f"merge: table {name!r} of {after.folder} has {field} {other!r}, but that of "
                f"{before.folder} has {one!r}"
            )
    blocks = new.optimizer is not None and any(of[2] == "uint8" for of in new.optimizer["state"])
    shards = [{(part.first_column, part.columns) for part in of.parts} for of in (old, new)]
    if blocks and shards[0] != shards[1]:
        raise ValueError(
            f"merge: table {name!r} has 8-bit state of columns {sorted(shards[1])} in "
            f"{after.folder}, but of {sorted(shards[0])} in {before.folder}, which cannot be "
            "combined: save without since after the column shards have changed"
        )


class _MergedTable(CheckpointTable):
    """A table of several checkpoints, of which later ones overrule earlier ones.

    Args:
        layers: the table in each of them.
    """

    def __init__(self, layers: Sequence[CheckpointTable]) -> None:
        *older, self._last = layers
        super().__init__(self._last.name, self._last._saved, self._last._files)
        overruled = torch.empty(0, dtype=torch.int64, device="cpu")
        self._layers = [(self._last, overruled)]
        for before, after in zip(reversed(older), reversed(layers), strict=False):
            changed = [*after.id_batches(_IDS_AT_ONCE), *after.removed_batches(_IDS_AT_ONCE)]
            overruled = torch.cat([overruled, *changed]).unique()
            self._layers.insert(0, (before, overruled))
        self.ids = sum(ids.numel() for ids in self.id_batches(_IDS_AT_ONCE))

    @property
    def counts_ids(self) -> bool:
        return self._last.counts_ids

    def id_batches(self, size: int) -> Iterator[Tensor]:
        for table, overruled in self._layers:
            for ids in table.id_batches(size):
                yield ids[outside(ids, overruled)]

    def counts(self, size: int) -> Iterator[CountedIds]:
        return self._last.counts(size)

    def sketches(self, parts: Sequence[SavedPart]) -> list[Tensor]:
        return self._last.sketches(parts)

    def _batches(
        self,
        size: int,
        state: Sequence[StateTensor],
        words: tuple[str, ...],
        columns: Sequence[range] | None = None,
    ) -> Iterator[RowBatch]:
        for table, overruled in self._layers:
            for batch in table._batches(size, state, words, columns):
                here = outside(batch.ids, overruled)
                if bool(here.all()):
                    yield batch
                elif bool(here.any()):
                    yield batch.picked(here)


__all__ = ["merge"]
