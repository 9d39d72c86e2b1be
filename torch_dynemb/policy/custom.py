"""Custom scores that lookups combine with those of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch_dynemb.ops.columns import Combine
from torch_dynemb.policy.half_life import check_half_lives

CombineName = Literal["last", "max", "sum", "decayed_sum"]
COMBINES = {
    "last": Combine.LAST,
    "max": Combine.MAX,
    "sum": Combine.SUM,
    "decayed_sum": Combine.DECAYED_SUM,
}
assert tuple(COMBINES) == get_args(CombineName)


@dataclass(frozen=True, kw_only=True)
class Custom:
    """A score that is given with the lookups, such as the worth of a click or a purchase.

    Args:
        combine: what becomes of the score that an id has. ``"last"``: the largest of the lookup's
            scores replaces it, as with ``score="custom"``. ``"max"``: the larger one stays.
            ``"sum"``: all are added, up to the limits of int64. ``"decayed_sum"``: all are added,
            and each counts half after a half-life.
        half_life: of ``"decayed_sum"``: seconds, or a text such as ``"7d"``.
        half_life_steps: the same in optimizer steps, in place of ``half_life``.

    Scores are int64; those of ``"decayed_sum"`` may be floats from 0 on. A decayed sum is the score
    ``"decayed"`` of its table: ``scores.get`` and ``remove`` give and take float64 sums as of now.

    Raises:
        TypeError, ValueError: a value is wrong, or a half-life is missing or not needed.

    Example:
        >>> import torch
        >>> import torch_dynemb as td
        >>> worth = td.Custom(combine="sum")
        >>> policy = td.Policy(score=worth, capacity=1_000_000)
        >>> users = td.DynamicEmbedding(4, name="users", policy=policy, optimizer=td.SGD(lr=1.0))
        >>> _ = users(torch.tensor([1, 2, 1]), scores=torch.tensor([5, 1, 1]))
        >>> users.group.scores.get(0, torch.tensor([1, 2])).scores
        tensor([6, 1])
    """

    combine: CombineName = "last"
    half_life: int | str | None = None
    half_life_steps: int | None = None

    def __post_init__(self) -> None:
        if self.combine not in COMBINES:
            raise ValueError(f"Custom: combine is {self.combine!r}, expected one of {(*COMBINES,)}")
        decays = self.combine == "decayed_sum"
        check_half_lives(
            "Custom",
            self.half_life,
            self.half_life_steps,
            decays,
            f"combine is {self.combine!r}",
            "combine='decayed_sum'",
        )

    @property
    def score(self) -> str:
        """Name of the score in the table."""
        return "decayed" if self.combine == "decayed_sum" else "custom"


__all__ = ["COMBINES", "CombineName", "Custom"]
