"""Targets of a delta log: models that train, and followers that modules register."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from torch_dynemb.changes.commits import Commit, TableDelta
from torch_dynemb.checkpoint.saving.dense_state import dense_state, load_dense_state
from torch_dynemb.delta_log.applying import PartChange
from torch_dynemb.nn.module_kinds import registered_follower
from torch_dynemb.parts.table_parts import PACKED, TablePart, groups_of, parts_of
from torch_dynemb.rows.whole_update import Call, apply_all


@runtime_checkable
class FollowTarget(Protocol):
    """An object that takes commits in order; :func:`follow` takes one in place of a model."""

    def check(self, commit: Commit) -> None:
        """Check that it can take a whole commit. Changes nothing.

        Args:
            commit: the next commit.

        Raises:
            Exception: the reason why not; the next update tries again.
        """
        ...

    def apply(self, commit: Commit) -> None:
        """Apply a commit that was checked.

        Args:
            commit: the next commit.
        """
        ...


def target_of(model: object) -> FollowTarget:
    """Return the target for a model.

    Args:
        model: module with tables, or a target.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, FollowTarget):
        return model
    if isinstance(model, nn.Module):
        followers = (registered_follower(part) for part in model.modules())
        follower = next((found for found in followers if found is not None), None)
        if follower is not None:
            target: FollowTarget = follower(model)
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
    """Return a commit's change of a table of a model.

    Args:
        name: name of the table.
        tables: tables of the commit.
        embedding_dim: columns of the model's table.

    Returns:
        The change; None if the log lacks the table.

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
    """Raise ValueError if a commit changes tables that a model lacks.

    Args:
        commit: the next commit.
        known: tables of the model.
    """
    changed = {
        name
        for name, delta in commit.tables.items()
        if delta.changed.ids.numel() > 0 or delta.removed.numel() > 0
    }
    if not changed <= known:
        raise ValueError(
            f"follow: commit {commit.sequence} changes tables {sorted(changed - known)}, but the "
            f"model has {sorted(known)}: follow with a model like the one that is published"
        )


def nothing() -> None:
    """Do nothing: the default callback after a commit."""


class WholeTarget(ABC):
    """A target of this package: it takes a commit as a whole or not at all, with deferred
    signals.
    """

    @abstractmethod
    def check(self, commit: Commit) -> None:
        """Check a commit; see :meth:`FollowTarget.check`.

        Args:
            commit: the next commit.
        """

    @abstractmethod
    def apply(self, commit: Commit, taken: Callable[[], object] = nothing) -> None:
        """Apply a commit that was checked. An error leaves the target at the commit before.

        Args:
            commit: the next commit.
            taken: called once the commit is applied, before signals are delivered.
        """

    def follow_dense(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare for commits with a dense state, before the first one."""


class _TrainedModel(WholeTarget):
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
            PartChange(part, delta).check()
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

    def apply(self, commit: Commit, taken: Callable[[], object] = nothing) -> None:
        parts = [part for part in parts_of(self._model) if part.name in commit.tables]
        with ExitStack() as locks:
            for group in groups_of(parts):
                locks.enter_context(group.tables.changing())
            self._apply(parts, commit, taken)

    def _apply(
        self, parts: Sequence[TablePart], commit: Commit, taken: Callable[[], object]
    ) -> None:
        changes = [PartChange(part, commit.tables[part.name]).update for part in parts]
        for change in changes:
            change.prepare()
        own = dense_state(self._model) if commit.dense else {}
        before = {name: own[name].clone() for name in commit.dense}
        dense = Call(partial(self._load, commit.dense), partial(self._load, before))

        def finish() -> None:
            for change in changes:
                change.finish()
            taken()

        apply_all([*changes, dense], finish)

    def _load(self, dense: Mapping[str, Tensor]) -> None:
        if dense:
            load_dense_state(self._model, dense)


__all__ = [
    "FollowTarget",
    "WholeTarget",
    "check_names",
    "checked_delta",
    "nothing",
    "target_of",
]
