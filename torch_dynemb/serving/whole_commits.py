"""Commits of a delta log, applied to live tables and dense tensors as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.delta_log.targets import nothing
from torch_dynemb.rows.whole_update import Call, apply_all
from torch_dynemb.serving.live_commits import TableChange, check_room, check_values, take
from torch_dynemb.serving.live_state import FileState, MemoryState


class DenseChange(NamedTuple):
    """A dense tensor of a served model, and its value in a commit.

    Attributes:
        name: of the tensor in the log.
        tensor: of the model.
        values: of the commit.
    """

    name: str
    tensor: Tensor
    values: Tensor


def check_changes(tables: Sequence[TableChange], dense: Sequence[DenseChange]) -> None:
    """Raise if one of the tables or tensors cannot take a commit; nothing changes.

    Args:
        tables: changes of tables.
        dense: changes of the dense state.

    Raises:
        NoHeadroomError: a table lacks rows for new ids.
        ValueError: a dense tensor has another shape or kind, or the commit has a row for the
            padding id of a table.
        RuntimeError: rows cannot be stored in the format of a table.
    """
    for change in tables:
        _check_padding(change)
        check_room(change)
        check_values(change)
    for name, tensor, values in dense:
        floats = tensor.is_floating_point() and values.is_floating_point()
        if tensor.shape != values.shape or not (floats or tensor.dtype == values.dtype):
            raise ValueError(
                f"follow: the commit has a dense tensor {name!r} of {values.dtype} "
                f"{tuple(values.shape)}, and the model has one of {tensor.dtype} "
                f"{tuple(tensor.shape)}: serve a model like the one that is published, or give "
                "dense='keep'"
            )


@contextmanager
def with_room(tables: Sequence[TableChange]) -> Iterator[None]:
    """Keep other threads from tables with rows in files, and make room in memory for a commit.

    Nothing changes for readers. Afterwards such tables take the commit without an error.

    Args:
        tables: changes of tables.

    Raises:
        NoHeadroomError, DiskFullError, RuntimeError: one of them lacks room.
    """
    locks = {id(lock): lock for of in tables if (lock := _lock_of(of)) is not None}
    with ExitStack() as stack:
        for _, lock in sorted(locks.items()):  # all threads in the same order
            stack.enter_context(lock)
        for change in tables:
            if not change.empty:
                check_room(change, make=True)
        yield


def _lock_of(change: TableChange) -> AbstractContextManager[object] | None:
    return change.state.writing if isinstance(change.state, FileState) else None


def take_changes(
    tables: Sequence[TableChange],
    dense: Sequence[DenseChange],
    taken: Callable[[], object] = nothing,
) -> None:
    """Apply a checked commit within :func:`with_room`, with signals deferred.

    The table with the most changes comes last of those in memory. It takes them as a whole or not
    at all, so it needs no copy of its rows for an error. Then come the ones with rows in files,
    which have room.

    Args:
        tables: changes of tables.
        dense: changes of the dense state.
        taken: called after the commit is applied, before signals are delivered.

    Raises:
        Exception: raised by a table or tensor; all of them are as they were.
    """
    tables = sorted((change for change in tables if not change.empty), key=_size)
    files = [change for change in tables if isinstance(change.state, FileState)]
    memory = [change for change in tables if not isinstance(change.state, FileState)]
    old = [change._replace(values=change.tensor.clone()) for change in dense]
    updates = [Call(partial(_copy, dense), partial(_copy, old))]
    updates += [Call(partial(take, change), _undo_of(change)) for change in memory[:-1]]
    for change in memory[-1:]:
        updates.append(Call(partial(take, change), _undo_of(change) if files else nothing))
    updates += [Call(partial(take, change), nothing) for change in files]
    apply_all(updates, taken)


def dense_changes(
    owner: str, commit_dense: Mapping[str, Tensor], known: Mapping[str, Tensor], unused: set[str]
) -> list[DenseChange]:
    """Return the changes of a commit to tensors of a served model.

    Args:
        owner: name of the model in errors.
        commit_dense: dense tensors of the commit, by their names in the trained model.
        known: dense tensors of the served model. It may be a part of another module, so that names
            begin with the path of that.
        unused: names of tensors that the served model does not use.

    Raises:
        ValueError: the served model lacks a tensor, or has several of that name.
    """
    changes = []
    for name, values in commit_dense.items():
        found = [name] if name in known else [of for of in known if of.endswith(f".{name}")]
        if not found and any(of == name or of.endswith(f".{name}") for of in unused):
            continue
        if len(found) != 1:
            raise ValueError(
                f"follow: the commit changes the dense tensor {name!r}, of which {owner} has "
                f"{found or 'none'}: follow with a model like the one that is published, or give "
                "dense='keep' to serve its rows with the dense part that is here"
            )
        changes.append(DenseChange(name, known[found[0]], values))
    return changes


def _check_padding(change: TableChange) -> None:
    padding = change.state.padding_of(change.state.names.index(change.table))
    if padding is not None and bool((change.delta.changed.ids == padding).any()):
        raise ValueError(
            f"follow: table {change.table!r} has the padding id {padding}, which has no row, but "
            "the commit has one for it: serve a model like the one that is published"
        )


def _size(change: TableChange) -> int:
    return change.delta.changed.ids.numel() + change.delta.removed.numel()


def _undo_of(change: TableChange) -> Callable[[], object]:
    """Return a function that reverts a change: the earlier rows, to the bit, without new ids."""
    state = change.state
    number = state.names.index(change.table)
    padding = state.padding_of(number)
    ids = torch.cat([change.delta.changed.ids, change.delta.removed]).unique()
    ids = ids if padding is None else ids[ids != padding]
    assert isinstance(state, MemoryState)
    rows, found = state.stored_rows(number, ids)
    return partial(state.apply, number, ids[found], rows[found], ids[~found])


def _copy(dense: Sequence[DenseChange]) -> None:
    # tensors of a model may have been made in inference mode
    with torch.inference_mode():
        for _, tensor, values in dense:
            tensor.copy_(values)


__all__ = ["DenseChange", "check_changes", "dense_changes", "take_changes", "with_room"]
