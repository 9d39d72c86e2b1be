"""Live tables that follow a delta log; see :func:`torch_dynemb.delta_log.follow`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

from torch import Tensor, nn

from torch_dynemb.changes.commits import Commit
from torch_dynemb.checkpoint.saving.dense_state import dense_state
from torch_dynemb.delta_log.targets import (
    WholeTarget,
    check_known_tables,
    checked_delta,
    nothing,
)
from torch_dynemb.nn.module_kinds import register_module
from torch_dynemb.ops.columns import Meta
from torch_dynemb.serving.live_commits import TableChange
from torch_dynemb.serving.live_files import LiveFileTables
from torch_dynemb.serving.live_group import LiveTables
from torch_dynemb.serving.live_models import live_tables
from torch_dynemb.serving.table_names import ServedName, names_in_log, served_names
from torch_dynemb.serving.turns import Turns, turns_of
from torch_dynemb.serving.updated_tables import UpdatedTables
from torch_dynemb.serving.whole_commits import (
    DenseChange,
    check_changes,
    dense_changes,
    take_changes,
    with_room,
)


class _LiveModel(WholeTarget):
    """Follower that applies commits to the live tables of a model and to its dense state."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._turns: Turns | None = None

    def follow_dense(self) -> None:
        self._turns = turns_of(self._model)

    def check(self, commit: Commit) -> None:
        changes = dict(self._changes(commit))
        check_known_tables(commit, set(changes))
        check_changes(list(changes.values()), self._dense(commit))

    def apply(self, commit: Commit, taken: Callable[[], object] = nothing) -> None:
        changes = [change for _, change in self._changes(commit)]
        with (
            with_room(changes),  # files are written while the model runs
            nullcontext() if self._turns is None else self._turns.alone(),
        ):
            take_changes(changes, self._dense(commit), taken)

    def _dense(self, commit: Commit) -> list[DenseChange]:
        own = dense_state(self._model) if commit.dense else {}
        tensors = {name: of for name, of in own.items() if isinstance(of, Tensor)}
        return dense_changes("the model", commit.dense, tensors, set())

    def _changes(self, commit: Commit) -> Iterator[tuple[str, TableChange]]:
        """Return the changes of a commit to the known live tables."""
        found: list[tuple[UpdatedTables, str, int]] = []
        served: list[ServedName] = []
        for path, tables in live_tables(self._model).items():
            dims = tables.get_buffer("meta")[:, Meta.DIM].tolist()
            found += [(tables, name, dim) for name, dim in zip(tables.names, dims, strict=True)]
            served += served_names(path, tables)
        log_names = names_in_log("follow", served, commit.tables)
        for (tables, name, dim), log_name in zip(found, log_names, strict=True):
            if log_name is not None:
                delta = checked_delta(log_name, commit.tables, dim)
                assert delta is not None
                yield log_name, TableChange(tables.state(), name, delta)


register_module(LiveTables, follower=_LiveModel)
register_module(LiveFileTables, follower=_LiveModel)

__all__: list[str] = []
