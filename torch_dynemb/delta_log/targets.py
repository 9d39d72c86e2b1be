"""Targets of a delta log: models that train, and followers that modules register."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torch_dynemb.changes.commits import Commit, TableDelta
from torch_dynemb.checkpoint.saving.dense_state import dense_state, load_dense_state
from torch_dynemb.errors import NoRoomError
from torch_dynemb.nn.module_kinds import registered_follower
from torch_dynemb.parts.table_parts import PACKED, TablePart, groups_of, parts_of
from torch_dynemb.rows.row_update import RowUpdate
from torch_dynemb.rows.whole_update import Call, apply_all
from torch_dynemb.table.content import score_names
from torch_dynemb.table.row_access import state_tensors

_CUSTOM = "custom"


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


class PartChange:
    """Change of a commit to a part of a table.

    Args:
        part: part of a model, on this rank.
        delta: change of the whole table in the commit.

    Attributes:
        update: applies the change.
    """

    def __init__(self, part: TablePart, delta: TableDelta) -> None:
        self._part, self._delta = part, delta
        tables, device = part.group.tables, part.group.device
        changed = delta.changed
        chosen = part.ids.owned(changed.ids)
        columns = slice(part.columns.start, part.columns.stop)
        tensors = state_tensors(tables, tables.config.slab_of(part.table))
        with_state = delta.optimizer is not None and delta.optimizer == _name_of(part)
        state = changed.state if with_state else {}
        state = {name: of for name, of in state.items() if name in tensors}
        per_row = (
            () if part.optimizer is None else [of.name for of in part.optimizer.state if of.per_row]
        )
        self._in_blocks: list[str] = []  # of the state, where the part has some columns
        if part.shard.split:
            for name, values in state.items():
                if tensors[name].dtype == torch.uint8:
                    self._in_blocks.append(name)
                elif name not in per_row:
                    state[name] = values[:, columns]
        # other scores are those of the follower's own clock
        kept = [name for name in score_names(tables, part.table) if name == _CUSTOM]
        own = changed._replace(
            rows=changed.rows[:, columns],
            state=state,
            scores={name: of for name, of in changed.scores.items() if name in kept},
        )
        self.update = RowUpdate(
            f"follow: table {part.name!r}",
            tables,
            part.table,
            (own if bool(chosen.all()) else own.picked(chosen)).to(device),
            gone=delta.removed[part.ids.owned(delta.removed)].to(device),
            steps=delta.optimizer_steps if with_state else None,
        )

    def check(self) -> None:
        """Check that the table can take the change. Changes nothing.

        Raises:
            ValueError: the commit has the padding id, lacks custom scores, or has 8-bit state of
                more columns than the part.
            NoRoomError: the table has too little room.
        """
        part, name = self._part, self._part.name
        padding = part.config.padding_idx
        if padding is not None and bool((self.update.ids == padding).any()):
            raise ValueError(
                f"follow: table {name!r} has the padding id {padding}, which has no row, but the "
                "commit has a row for it: follow with a model like the one that is published"
            )
        if self._in_blocks and self.update.ids.numel() > 0:
            raise ValueError(
                f"follow: table {name!r} has columns {part.columns} here, but the log has 8-bit "
                f"{self._in_blocks[0]} of whole rows: publish with optimizer_state=False, or shard "
                "the table by rows"
            )
        given = _CUSTOM in self._delta.changed.scores or self._delta.changed.ids.numel() == 0
        if _CUSTOM in part.config.policy.scores and not given:
            raise ValueError(
                f"follow: table {name!r} keeps custom scores, which the table in the log does not: "
                "follow with a model like the one that is published"
            )
        bound = part.group.config.capacity_bound(part.table)
        new = int(self.update.new.sum())
        size, gone = part.group.size(part.table), self.update.gone.numel()
        if bound is not None and new > 0 and size - gone + new > bound:
            raise NoRoomError(
                f"follow: table {name!r} has {size} ids and a capacity of {bound}, but the commit "
                f"removes {gone} of them and adds {new}: give it the capacity of the table "
                "that is published. Nothing of the commit has been applied",
                tables=[name],
            )


def _name_of(part: TablePart) -> str | None:
    return None if part.optimizer is None else str(part.optimizer.description()["name"])


__all__ = [
    "FollowTarget",
    "WholeTarget",
    "check_names",
    "checked_delta",
    "nothing",
    "target_of",
]
