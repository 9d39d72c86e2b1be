"""Loading of the last commit of a log: its base and the commits since then, as one load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike

from torch import nn

from torch_dynemb.checkpoint.delta_log.folding import Folding
from torch_dynemb.checkpoint.delta_log.reader import LogReader
from torch_dynemb.checkpoint.delta_log.sink import DeltaSink
from torch_dynemb.checkpoint.loading.load import LoadReport, load_parts
from torch_dynemb.checkpoint.manifest.file import check_full, read_manifest
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.saving.dense_state import dense_state
from torch_dynemb.checkpoint.saving.handle import check_none_running
from torch_dynemb.checkpoint.saving.increments import count_from
from torch_dynemb.checkpoint.saving.save import check_saveable
from torch_dynemb.checkpoint.saving.source import next_now
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.files.locations import Location, checked_location
from torch_dynemb.parts.table_parts import TablePart, groups_of
from torch_dynemb.process.one_thread import one_thread

_CALL = "checkpoint.resume"


def load_commits(
    ranks: Ranks,
    base: str | PathLike[str],
    sinks: Callable[[], Sequence[DeltaSink]],
    model: nn.Module,
    parts: Sequence[TablePart],
    progress: bool | None,
) -> LoadReport:
    """Load a base and all whole commits after it. All ranks call it.

    Changed rows are folded in memory first, so each row is loaded once.

    Args:
        ranks: ranks that load together.
        base: path of the base.
        sinks: returns the sinks of all ranks that published.
        model: model to load.
        parts: its tables on this rank.
        progress: show a progress bar.

    Raises:
        Exception: as :func:`resume`. The model is unchanged then.
    """

    def prepare() -> tuple[Location, Manifest]:
        check_none_running()
        for group in groups_of(parts):
            check_saveable(_CALL, group)
        folder = checked_location(_CALL, base)
        manifest = read_manifest(folder)
        check_full(_CALL, folder, manifest)
        return folder, manifest

    folder, manifest = ranks.run(prepare)
    ranks.agree(_CALL, base=manifest.uuid)
    of_ranks = ranks.gather([part.name for part in parts])
    names = {name for of_rank in of_ranks for name in of_rank}
    ranks.run(lambda: _check_names(manifest, names, model))

    def folded(until: int | None) -> Folding:
        reader = LogReader(sinks, base=manifest.uuid, sequence=None)
        with open_checkpoint(str(folder)) as saved, one_thread():
            result = Folding(saved, parts)
            for batches in reader.read(until):
                result.add(batches)
                reader.taken(batches)
        return result

    folding = ranks.run(lambda: folded(None))
    # a trainer that still publishes: some ranks have read more commits than others
    last = min(ranks.gather(folding.sequence))
    if folding.sequence > last:
        folding = folded(last)
    later = ranks.run(folding.result)
    report = load_parts(
        ranks, _CALL, folder, manifest, parts, model, strict=True, progress=progress, later=later
    )

    def counted() -> None:
        count_from(groups_of(parts), None)
        for group in groups_of(parts):
            host = group.tables.host
            # times go on from those of the commit if this machine's clock is behind
            host.last_reading = max(host.last_reading, next_now(group.tables))

    ranks.run(counted)
    return report


def _check_names(manifest: Manifest, names: set[str], model: nn.Module) -> None:
    """Raise ValueError if a model has other tables or dense entries than the log."""
    of_dense = {*manifest.dense.entries, *(manifest.dense.values or {})}
    pairs = [
        ("tables", manifest.tables.keys(), names),
        ("dense entries", of_dense, dense_state(model).keys()),
    ]
    for what, logged, own in pairs:
        if logged != own:
            raise ValueError(
                f"{_CALL}: {what} {sorted(logged - own)} are only in the log, and "
                f"{sorted(own - logged)} only in the model: give the model that was published"
            )


__all__ = ["load_commits"]
