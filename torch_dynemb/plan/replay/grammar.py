"""Options of a replay as texts: policies and capacities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_dynemb.policy import AdmitByChance, AdmitFrequent, Policy
from torch_dynemb.policy.admission import AdmissionRule
from torch_dynemb.policy.half_life import check_half_life, parse_half_life

DEFAULT_POLICIES = "lru,lfu,decayed:33%"
DEFAULT_CAPACITIES = "0.05,0.1,0.2,0.5"
GRAMMAR = (
    "lru, lfu or decayed:HALF_LIFE, with admit:N+ or chance:P+ before it; a half-life is a time "
    "such as 7d, steps such as 20000steps, or a share of the replay such as 33%"
)
_SCORES = {"lru": "step", "lfu": "frequency"}
_STEPS = re.compile(r"(\d+)steps?")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True)
class PolicyText:
    """A policy as an option names it.

    Attributes:
        name: the text.
        score: of :class:`torch_dynemb.Policy`.
        admission: rule for new ids; None: all get a row.
        half_life: seconds, or None.
        half_life_steps: steps, or None.
        half_life_share: share of the steps of the replay, or None.
    """

    name: str
    score: str
    admission: AdmissionRule | None = None
    half_life: int | None = None
    half_life_steps: int | None = None
    half_life_share: float | None = None

    def policy(self, capacity: int | None, steps: int) -> Policy:
        """Return the policy of a table.

        Args:
            capacity: of the table; None: unlimited.
            steps: of the whole replay.
        """
        half_life_steps = self.half_life_steps
        if self.half_life_share is not None:
            half_life_steps = max(1, round(self.half_life_share * steps))
        return Policy(
            score=self.score,  # type: ignore[arg-type]
            half_life=self.half_life,
            half_life_steps=half_life_steps,
            capacity=capacity,
            admission=self.admission,
        )


def parse_policies(text: str) -> list[PolicyText]:
    """Parse a list such as ``"lru,decayed:7d,admit:2+lfu"``.

    Raises:
        ValueError: a policy is unknown, given twice, or has a number out of its range.
    """
    policies = [_parse_policy(name.strip()) for name in text.split(",")]
    if len({policy.name for policy in policies}) < len(policies):
        raise ValueError(f"--policies is {text!r}: name every policy once")
    return policies


def _parse_policy(name: str) -> PolicyText:
    *before, score = name.split("+")
    admission: AdmissionRule | None = None
    if len(before) > 1:
        raise ValueError(f"--policies names {name!r}, expected one admission rule: {GRAMMAR}")
    for rule in before:
        kind, _, number = rule.partition(":")
        if kind == "admit" and number.isdecimal() and int(number) >= 1:
            admission = AdmitFrequent(int(number))
        elif kind == "chance" and _is_share(number):
            admission = AdmitByChance(float(number))
        else:
            raise ValueError(
                f"--policies names {name!r}, and {rule!r} is not an admission rule: write admit:N "
                "with N from 1 on, or chance:P with P above 0 and at most 1"
            )
    if score in _SCORES:
        return PolicyText(name, _SCORES[score], admission)
    kind, _, half_life = score.partition(":")
    if kind != "decayed" or not half_life:
        raise ValueError(f"--policies names {name!r}, expected {GRAMMAR}")
    owner = f"--policies: the half-life of {name!r}"
    if share := _SHARE.fullmatch(half_life):
        if not 0 < float(share[1]) <= 100:
            raise ValueError(f"{owner} is {half_life!r}, expected above 0 % and at most 100 %")
        return PolicyText(name, "decayed", admission, half_life_share=float(share[1]) / 100)
    if steps := _STEPS.fullmatch(half_life):
        check_half_life(owner, half_life, int(steps[1]))
        return PolicyText(name, "decayed", admission, half_life_steps=int(steps[1]))
    return PolicyText(name, "decayed", admission, half_life=parse_half_life(owner, half_life))


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def parse_capacities(text: str) -> list[float | int]:
    """Parse a list such as ``"0.05,0.5,100000"``: shares of the distinct ids (float), or numbers.

    Raises:
        ValueError: a capacity is neither above 0 and at most 1 nor a whole number, or given twice.
    """
    capacities: list[float | int] = []
    for entry in (entry.strip() for entry in text.split(",")):
        if _is_share(entry):
            capacities.append(float(entry))
        elif entry.isdecimal() and int(entry) > 1:
            capacities.append(int(entry))
        else:
            raise ValueError(
                f"--capacities has {entry!r}, expected a share of the distinct ids, above 0 and at "
                "most 1, or a whole number of ids"
            )
    if len(set(capacities)) < len(capacities):
        raise ValueError(f"--capacities is {text!r}: give every capacity once")
    return capacities


def parse_share(option: str, text: str) -> float:
    """Parse a share above 0 and at most 1.

    Raises:
        ValueError: it is something else.
    """
    if not _is_share(text):
        raise ValueError(f"{option} is {text!r}, expected a share above 0 and at most 1")
    return float(text)


def needs_time(policies: Sequence[PolicyText]) -> str | None:
    """Return the first policy with a half-life in seconds; None: there is none."""
    return next((policy.name for policy in policies if policy.half_life is not None), None)


__all__ = [
    "DEFAULT_CAPACITIES",
    "DEFAULT_POLICIES",
    "GRAMMAR",
    "PolicyText",
    "needs_time",
    "parse_capacities",
    "parse_policies",
    "parse_share",
]
