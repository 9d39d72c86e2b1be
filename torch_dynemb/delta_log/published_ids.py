"""Tables and ids of a model that a delta log publishes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.parts.kept_ids import (
    ScoredPart,
    check_names,
    kept_ids,
    rules_of,
    scored_part,
)
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.policy.keep import AtLeast, Keep, check_keep


class Filter(NamedTuple):
    """Arguments of a log that publishes a part of a model.

    Attributes:
        tables: names of tables; None: all.
        keep: rules for ids; None: all ids.
    """

    tables: tuple[str, ...] | None
    keep: Keep | None

    @staticmethod
    def of(tables: Collection[str] | None, keep: Keep | None) -> Filter:
        """Check the arguments.

        Raises:
            TypeError, ValueError: one of them is wrong.
        """
        if keep is not None:
            check_keep("DeltaLog", keep)
        if tables is None:
            return Filter(None, keep)
        if isinstance(tables, str) or not isinstance(tables, Collection):
            raise TypeError(f"DeltaLog: tables is {described(tables)}, expected names in a list")
        names = tuple(tables)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"DeltaLog: tables is {list(names)}, expected the name of at least one table"
            )
        return Filter(names, keep)

    @property
    def is_partial(self) -> bool:
        """Whether commits lack a part of the model."""
        return self.tables is not None or self.keep is not None

    def chosen(self, parts: Sequence[TablePart], known: Collection[str]) -> list[TablePart]:
        """Return the parts to publish.

        Args:
            parts: parts of a model on this rank.
            known: names of the tables on all ranks.

        Raises:
            ValueError: a name is unknown, or a rule is for a table that is not published.
        """
        check_names("DeltaLog", "tables", self.tables or (), list(known))
        published = list(known) if self.tables is None else list(self.tables)
        if isinstance(self.keep, Mapping):
            check_names("DeltaLog", "keep", list(self.keep), published)
        return [part for part in parts if part.name in published]


class PublishedIds:
    """Ids that followers have, for tables of which a log publishes some ids only.

    Args:
        parts: published parts of a model on this rank.
        keep: rules for their ids.
        ranks: ranks that share the model.

    Raises:
        ValueError: a table does not keep the score of its rule.
    """

    def __init__(self, parts: Sequence[TablePart], keep: Keep, ranks: Ranks) -> None:
        self._parts, self._ranks = list(parts), ranks
        self._rules = ranks.run(lambda: rules_of("DeltaLog", keep, parts))
        self._known: list[Tensor] = []  # that followers have
        self._others: list[
            Tensor
        ] = []  # that followers of a base may have; the next commit ends it
        self._next: list[Tensor] = []

    def begin(self) -> None:
        """Choose ids for followers that begin with the present content. All ranks call it.

        Such a follower has all ids, or those that ``keep=`` gives an exported package. After the
        next commit both have the same.
        """
        scored = self._scored()
        known = kept_ids(scored, self._names(), self._ranks)
        self._others = [_without(of.ids, ids) for of, ids in zip(scored, known, strict=True)]
        self._known = known

    def choose(self) -> None:
        """Choose the ids of the next commit. All ranks call it."""
        scored = self._scored()
        chosen = kept_ids(scored, self._names(), self._ranks)
        for number, (of, known) in enumerate(zip(scored, self._known, strict=True)):
            if isinstance(of.rule, AtLeast) and of.rule.leave_below is not None:
                stay = of.at_least(of.rule.leave_below)
                stay = stay[torch.isin(stay, known)]
                chosen[number] = torch.cat([chosen[number], stay]).unique()
        self._next = chosen

    def split(self, number: int, touched: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the ids of a part with rows in the next commit, and those that it removes.

        Args:
            number: number of the part.
            touched: int64 [n], new, changed and removed ids, and those to check.

        Returns:
            int64 [m] and [k]; None if the part has no rule.
        """
        if self._rules[number] is None:
            return None
        known, chosen = self._known[number], self._next[number]
        rows = torch.cat([touched, _without(chosen, known)]).unique()
        gone = torch.cat([known, self._others[number], touched]).unique()
        return rows[torch.isin(rows, chosen)], _without(gone, chosen)

    def taken(self) -> None:
        """Mark the chosen ids as those that followers have."""
        self._known = self._next
        self._others = [ids[:0] for ids in self._others]

    def _names(self) -> list[str]:
        return [part.name for part in self._parts]

    def _scored(self) -> list[ScoredPart]:
        return self._ranks.run(
            lambda: [
                scored_part("DeltaLog", part, rule)
                for part, rule in zip(self._parts, self._rules, strict=True)
            ]
        )


def _without(ids: Tensor, others: Tensor) -> Tensor:
    return ids[~torch.isin(ids, others)]


__all__ = ["Filter", "PublishedIds"]
