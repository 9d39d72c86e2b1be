"""Rules that choose which ids of a trained table are published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_dynemb.argument_checks import described, integer, number
from torch_dynemb.policy.policy import SCORES


@dataclass(frozen=True)
class Top:
    """Keep the ids of a table with the highest scores.

    If ranks share the table, these are the best ids of all ranks. Of ids with one score, the least
    come first.

    Args:
        count: number of ids, at least 1.
        by: a score that the table keeps: ``"step"``, ``"timestamp"``, ``"frequency"``,
            ``"custom"`` or ``"decayed"``.

    Raises:
        TypeError, ValueError: a wrong argument.

    Example:
        >>> import torch, torch_dynemb as td
        >>> policy = td.Policy(score="frequency")
        >>> table = td.DynamicEmbedding(4, name="ads", optimizer=td.SGD(lr=0.1), policy=policy)
        >>> _ = table(torch.tensor([1, 2, 2, 3, 3, 3]))
        >>> td.freeze(table, keep=td.Top(2, by="frequency")).sizes()
        {'ads': 2}
    """

    count: int
    by: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", integer("Top: count", self.count, least=1))
        _check_score("Top", self.by)


@dataclass(frozen=True)
class AtLeast:
    """Keep the ids of a table with a score of at least a value.

    Args:
        score: the value; of decayed counts a count of the present time.
        by: as in :class:`Top`.
        leave_below: only in a delta log: a kept id leaves if its score is below this value, at
            most ``score``. Ids with scores near the value then do not come and go with every
            commit. Default: ``score``.

    Raises:
        TypeError, ValueError: a wrong argument.

    Example:
        >>> import torch_dynemb as td
        >>> td.AtLeast(5, by="frequency", leave_below=3)
        AtLeast(score=5, by='frequency', leave_below=3)
    """

    score: float
    by: str
    leave_below: float | None = None

    def __post_init__(self) -> None:
        number("AtLeast: score", self.score)
        _check_score("AtLeast", self.by)
        if self.leave_below is not None:
            number("AtLeast: leave_below", self.leave_below)
            if self.leave_below > self.score:
                raise ValueError(
                    f"AtLeast: leave_below is {self.leave_below}, expected at most the score of "
                    f"{self.score}, from which on ids are kept"
                )


Rule = Top | AtLeast
Keep = Rule | Mapping[str, Rule]


def check_keep(owner: str, keep: object) -> None:
    """Raise TypeError unless a value is a rule, or a dict of rules by table name."""
    rules = list(keep.values()) if isinstance(keep, Mapping) else [keep]
    for rule in rules:
        if not isinstance(rule, Top | AtLeast):
            raise TypeError(
                f"{owner}: keep is {described(rule)}, expected torch_dynemb.Top, "
                "torch_dynemb.AtLeast, or a dict of them by table name"
            )


def _check_score(owner: str, by: object) -> None:
    if not isinstance(by, str):
        raise TypeError(f"{owner}: by is {described(by)}, expected the name of a score, a str")
    if by not in SCORES:
        raise ValueError(f"{owner}: by is {by!r}, expected one of {SCORES}")


__all__ = ["AtLeast", "Keep", "Rule", "Top", "check_keep"]
