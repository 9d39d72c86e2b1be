"""Entries of a module's ``state_dict`` for its tables, when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_dynemb.nn.rank_states import rank_entries_of
from torch_dynemb.table.state import GroupState


class EntryErrors(NamedTuple):
    """The lists in which ``Module.load_state_dict`` collects what is wrong.

    Attributes:
        missing, unexpected: names of entries; None: they are not looked for.
        errors: messages.
    """

    missing: list[str]
    unexpected: list[str] | None
    errors: list[str]


def load_entries(
    kind: str,
    state: GroupState,
    rank_prefix: str,
    saved: Mapping[str, Any],
    prefix: str,
    to: EntryErrors,
) -> None:
    """Load the tables of a module from a state dict.

    Args:
        kind: class of the module.
        state: of its tables; changes, unless an error is reported.
        own: of :func:`torch_dynemb.nn.rank_states.rank_entry`.
        saved: the whole state dict.
        prefix: of the module's entries.
        to: gets what is wrong.
    """
    entries = {k[len(prefix) :]: v for k, v in saved.items() if k.startswith(prefix)}
    owner = prefix.rstrip(".") or kind
    ranks = rank_entries_of(list(entries))
    if entries.keys() == {"weight"}:
        to.errors.append(
            f"{prefix}weight: the state is of a static table: make the module by "
            f"{kind}.from_embedding(weight), or insert the rows with "
            "module.group.insert_or_assign(0, ids, rows)"
        )
    elif entries and rank_prefix not in ranks:
        found_ranks = ", ".join(rank.rstrip(".") or "one process" for rank in ranks)
        to.errors.append(
            f"{owner}: the state is of {found_ranks}, expected "
            f"{rank_prefix.rstrip('.') or 'one process'}: load each rank's own, or use "
            "torch_dynemb.checkpoint, which loads on other numbers of ranks"
        )
        return
    if rank_prefix:
        if to.unexpected is not None:
            to.unexpected.extend(prefix + k for k in entries if not k.startswith(rank_prefix))
        entries = {
            k[len(rank_prefix) :]: v for k, v in entries.items() if k.startswith(rank_prefix)
        }
        prefix += rank_prefix
    if to.unexpected is not None:
        known = state.names()
        to.unexpected.extend(prefix + name for name in entries if name not in known)
    if "format" not in entries:
        to.missing.append(prefix + "format")
        return
    try:
        state.load(entries)
    except ValueError as error:
        to.errors.append(f"{prefix.rstrip('.') or kind}: {error}")


__all__ = ["EntryErrors", "load_entries"]
