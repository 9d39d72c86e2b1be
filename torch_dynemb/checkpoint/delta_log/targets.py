"""What takes the commits of a delta log: models that train, and others that packages register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from torch_dynemb.checkpoint.delta_log.commits import Commit, TableDelta
from torch_dynemb.checkpoint.entries import PACKED
from torch_dynemb.checkpoint.parts import TablePart, parts_of
from torch_dynemb.checkpoint.saving.rest import dense_state
from torch_dynemb.table.content import set_optimizer_steps
from torch_dynemb.table.dense_state import dense_only
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import state_tensors, write_rows
from torch_dynemb.table.tables import one_table


@runtime_checkable
class FollowTarget(Protocol):
    """Takes commits, in their order; :func:`follow` takes one in the place of a model."""

    def check(self, commit: Commit) -> None:
        """Refuses a commit that it cannot take as a whole; changes nothing.

        Args:
            commit: the next one.

        Raises:
            Exception: why it cannot; it is asked again when somebody updates again.
        """
        ...

    def apply(self, commit: Commit) -> None:
        """Takes a commit that it has checked.

        Args:
            commit: the next one.
        """
        ...


Finder = TypeVar("Finder", bound=Callable[[nn.Module], FollowTarget | None])

_finders: list[Callable[[nn.Module], FollowTarget | None]] = []


def follows(find_target: Finder) -> Finder:
    """Registers how models of a kind take commits: a decorator.

    Args:
        find_target: takes a model, and gives what takes commits for it; None: it is of another
            kind.

    Returns:
        ``find_target``.
    """
    _finders.append(find_target)
    return find_target


def target_of(model: object) -> FollowTarget:
    """What takes commits for a model.

    Args:
        model: a module with tables, or a target.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, FollowTarget):
        return model
    if isinstance(model, nn.Module):
        for find_target in reversed(_finders):
            target = find_target(model)
            if target is not None:
                return target
        if parts_of(model):
            return _TrainedModel(model)
    raise TypeError(
        f"follow: model is a {type(model).__name__}, expected a module with tables that train, one "
        "with live tables (torch_dynemb.serving.live), or an object with check and apply"
    )


def checked_delta(
    name: str, tables: dict[str, TableDelta], embedding_dim: int
) -> TableDelta | None:
    """What a commit has of a table of a model.

    Args:
        name: of the table.
        tables: of the commit.
        embedding_dim: of the model's table.

    Returns:
        None: the log has no such table.

    Raises:
        ValueError: it has other columns.
    """
    delta = tables.get(name)
    if delta is not None and delta.embedding_dim != embedding_dim:
        raise ValueError(
            f"follow: table {name!r} has {delta.embedding_dim} columns in the log, and "
            f"{embedding_dim} in the model: follow with a model like the one that is published"
        )
    return delta


def check_names(commit: Commit, known: set[str]) -> None:
    """Raises ValueError where a commit changes tables that a model has not got.

    Args:
        commit: the next one.
        known: tables of the model.
    """
    changed = {
        name
        for name, delta in commit.tables.items()
        if delta.ids.numel() > 0 or delta.removed.numel() > 0
    }
    if not changed <= known:
        raise ValueError(
            f"follow: commit {commit.sequence} changes tables {sorted(changed - known)}, but the "
            f"model has {sorted(known)}: follow with a model like the one that is published"
        )


class _TrainedModel:
    """A model with tables that train, such as another trainer's; see :func:`follow`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def check(self, commit: Commit) -> None:
        parts = parts_of(self._model)
        for part in parts:
            part.group.tables.check_own()
            delta = checked_delta(part.name, commit.tables, part.embedding_dim)
            if delta is None:
                continue
            if (delta.dtype == PACKED) != (part.dtype == PACKED):
                raise ValueError(
                    f"follow: table {part.name!r} has rows of {delta.dtype} in the log, and of "
                    f"{part.dtype} in the model: follow with a model like the one that is published"
                )
            _check_room(part, _Owned.of(part, delta))
        # a model on one of several ranks need not have a part of each table
        if all(part.ids.whole for part in parts):
            check_names(commit, {part.name for part in parts})
        own = dense_state(self._model)
        for name, values in commit.dense.items():
            mine = own.get(name)
            if not isinstance(mine, Tensor) or mine.shape != values.shape:
                has = "none" if not isinstance(mine, Tensor) else f"one of {tuple(mine.shape)}"
                raise ValueError(
                    f"follow: commit {commit.sequence} has a dense tensor {name!r} of shape "
                    f"{tuple(values.shape)}, and the model has {has}: follow with a model like the "
                    "one that is published, or publish with dense=False"
                )

    def apply(self, commit: Commit) -> None:
        for part in parts_of(self._model):
            delta = commit.tables.get(part.name)
            if delta is not None:
                _apply(part, delta)
        if commit.dense:
            with dense_only():
                self._model.load_state_dict(commit.dense, strict=False)


class _Owned:
    """What a commit does to the ids of a part.

    Attributes:
        ids: int64 [n].
        chosen: bool, which of those of the whole table they are.
        removed: int64 [m].
        handles: int64 [n]; negative: the id is not there yet.
    """

    def __init__(self, ids: Tensor, chosen: Tensor, removed: Tensor, handles: Tensor) -> None:
        self.ids, self.chosen, self.removed, self.handles = ids, chosen, removed, handles

    @staticmethod
    def of(part: TablePart, delta: TableDelta) -> _Owned:
        chosen = part.ids.owned(delta.ids)
        removed = delta.removed[part.ids.owned(delta.removed)].to(part.group.device)
        ids = delta.ids[chosen].to(part.group.device)
        tables = part.group.tables
        handles = find(tables, *one_table(tables, part.table, ids)).handles
        return _Owned(ids, chosen, removed, handles)


def _check_room(part: TablePart, owned: _Owned) -> None:
    """Raises RuntimeError where a table would evict ids that the published one has kept."""
    capacity = part.config.policy.capacity
    new = int((owned.handles < 0).sum())
    if capacity is None or new == 0:
        return
    gone = int(part.group.contains(part.table, owned.removed).sum())
    size = part.group.size(part.table)
    if size - gone + new > capacity:
        raise RuntimeError(
            f"follow: table {part.name!r} has {size} ids and a capacity of {capacity}, and the "
            f"commit takes {gone} of them away and brings {new}: give it the capacity of the table "
            "that is published. Nothing of the commit has been applied"
        )


def _apply(part: TablePart, delta: TableDelta) -> None:
    group, tables, table = part.group, part.group.tables, part.table
    owned = _Owned.of(part, delta)
    columns = slice(part.columns.start, part.columns.stop)
    if owned.removed.numel() > 0:
        group.erase(table, owned.removed)
    everything = bool(owned.chosen.all()) and part.columns == range(part.embedding_dim)
    rows = delta.rows if everything else delta.rows[owned.chosen][:, columns]
    rows = rows.to(group.device)
    new = owned.handles < 0
    if bool(new.any()):
        group.insert_or_assign(table, owned.ids[new], rows[new])
    own = state_tensors(tables, tables.config.slab_of(table))
    name = None if part.optimizer is None else part.optimizer.description()["name"]
    state: dict[str, Tensor] = {}
    handles, there = owned.handles, ~new
    if delta.optimizer is not None and delta.optimizer == name:
        state = {
            word: values[owned.chosen].to(group.device)
            for word, values in delta.state.items()
            if word in own
        }
        set_optimizer_steps(tables, table, delta.optimizer_steps)
        handles = find(tables, *one_table(tables, table, owned.ids)).handles
        there = torch.ones_like(new)
    if bool(there.any()):
        of_state = {word: values[there] for word, values in state.items()}
        write_rows(tables, table, owned.ids[there], handles[there], rows[there], of_state)


__all__ = ["FollowTarget", "check_names", "checked_delta", "follows", "target_of"]
