"""Life-cycle policies: what is kept about an id, when it gets a row, and when it loses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from torch_dynemb.argument_checks import described, flag, tensor
from torch_dynemb.initializers import Initializer
from torch_dynemb.policy.admission import AdmissionRule, AdmitFrequent, AdmitFrequentSketch

Score = Literal["none", "step", "timestamp", "frequency", "custom"]
OnFullName = Literal["evict", "grow", "default", "error"]
Check = Literal["ignore", "warning", "error"]
Default = Literal["initial", "zeros"] | Tensor | Initializer

SCORES = ("step", "timestamp", "frequency", "custom")
# names of eviction rules, and the scores that make them
_ACRONYMS = {"lru": "step", "lfu": "frequency"}


def check_default(owner: str, value: object) -> None:
    """Raises TypeError for a vector of default values that is no dense tensor of floats."""
    if isinstance(value, Tensor) and not tensor(owner, value).is_floating_point():
        raise TypeError(f"{owner} has dtype {value.dtype}, expected floats")


@dataclass(frozen=True, eq=False, kw_only=True)
class Policy:
    """How a table keeps its ids.

    Args:
        score: what is kept of an id and decides who is evicted, the least first (then the one seen
            longest ago, then the least id): ``"step"`` (the optimizer step at which training last
            saw it: LRU), ``"timestamp"`` (the same in seconds; see ``optimizer.step(now=...)``),
            ``"frequency"`` (occurrences in training: LFU), ``"custom"`` (given with the lookups),
            ``"none"``. Or several, such as ``("timestamp", "frequency")``: the first decides.
            Default: ``"step"`` if ids can be evicted, else ``"none"``.
        capacity: ids that the table may hold; None: as many as memory.
        on_full: what becomes of a new id for which there is no room. ``"evict"``: another one goes;
            tables of up to 89 ids look at all, larger ones at about 20 of them.
            ``"default"``: it gets no row and is looked up as ``refused``. ``"error"``: the lookup
            raises. ``"grow"``: the table exceeds its capacity. Default: ``"evict"``. What admission
            has counted of an id that gets no row is kept.
        protected_steps: ids that training saw in the last so many steps, the current one included,
            are not evicted. More than 1 where batches are looked up ahead of their backward.
        admission: which new ids get a row, such as ``AdmitFrequent(2)``; None: all.
        refused: what an id that was refused a row is looked up as in training: ``"initial"``,
            ``"zeros"``, a float tensor [embedding_dim], or an initializer: what a row of that id
            would begin with by it. Default: the table's ``eval_default``.
        ttl: seconds after its last training lookup from which on an id is looked up as if it were
            not there, until training sees it again or ``remove(expired=True)`` takes it out.
        check: what ``optimizer.step()`` does when ids found no place: ``"ignore"``, ``"warning"``
            or ``"error"``. They are counted as ``rejected`` in any case.

    Raises:
        TypeError, ValueError: a wrong value, or a contradiction.

    Example:
        >>> import torch_dynemb as td
        >>> lfu = td.Policy(score="frequency", capacity=1_000_000)
        >>> lru = td.Policy(score="timestamp", capacity=1_000_000, ttl=30 * 24 * 3600)
    """

    score: Score | tuple[Score, ...] | None = None
    capacity: int | None = None
    on_full: OnFullName | None = None
    protected_steps: int = 1
    admission: AdmissionRule | None = None
    refused: Default | None = None
    ttl: int | None = None
    check: Check = "ignore"

    def __post_init__(self) -> None:
        for name in ("capacity", "protected_steps", "ttl"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Policy: {name} is {value!r}, expected int")
            if value < 1:
                raise ValueError(f"Policy: {name} is {value}, expected at least 1")
        if self.score is not None and not isinstance(self.score, str | tuple | list):
            raise TypeError(
                f"Policy: score is {described(self.score)}, expected a name or a tuple of names"
            )
        for score in self.scores if self.score is not None else ():
            if isinstance(score, str) and score.lower() in _ACRONYMS:
                raise ValueError(
                    f"Policy: score is {score!r}, expected {_ACRONYMS[score.lower()]!r}: the id "
                    "of the least score is evicted first"
                )
            if score not in (*SCORES, "none"):
                raise ValueError(
                    f"Policy: score is {self.score!r}, expected 'none', one of {SCORES}, or a "
                    "tuple of them"
                )
        if "none" in self.scores and len(self.scores) > 1:
            raise ValueError(f"Policy: score is {self.score!r}: 'none' excludes others")
        if len(set(self.scores)) < len(self.scores) or not self.scores:
            raise ValueError(f"Policy: score is {self.score!r}, expected every score once")
        if self.on_full not in (None, "evict", "grow", "default", "error"):
            raise ValueError(
                f"Policy: on_full is {self.on_full!r}, expected 'evict', 'grow', 'default' or "
                "'error'"
            )
        if self.on_full == "evict" and self.score == "none":
            raise ValueError(
                "Policy: on_full='evict' needs a score to choose by, but score is 'none': choose "
                "score='step', or on_full='default'"
            )
        if self.capacity is not None and self.on_full is None and self.score == "none":
            raise ValueError(
                "Policy: a full table evicts by score, but score is 'none': choose score='step', "
                "or say what on_full should be"
            )
        if self.admission is not None and not isinstance(self.admission, AdmissionRule):
            raise TypeError(
                f"Policy: admission is {self.admission!r}, expected a rule such as "
                "torch_dynemb.AdmitFrequent(2)"
            )
        check_default("Policy: refused", self.refused)
        drawn = isinstance(self.refused, Tensor | Initializer)
        if not drawn and self.refused not in (None, "initial", "zeros"):
            raise ValueError(
                f"Policy: refused is {self.refused!r}, expected 'initial', 'zeros' or values: a "
                "tensor or an initializer"
            )
        if self.check not in ("ignore", "warning", "error"):
            raise ValueError(
                f"Policy: check is {self.check!r}, expected 'ignore', 'warning' or 'error'"
            )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores; the first decides who is evicted."""
        if self.score is None:
            return ("step" if self.capacity is not None and self.on_full != "grow" else "none",)
        return (self.score,) if isinstance(self.score, str) else tuple(self.score)

    def full(self, *, budget: bool) -> str:
        """What becomes of a new id without room, in a group with or without a memory budget.

        Args:
            budget: whether the group has one.

        Returns:
            ``"evict"``, ``"grow"``, ``"default"`` or ``"error"``.

        Raises:
            ValueError: it says what to do without anything that could be full, or contradicts.
        """
        bounded = budget or self.capacity is not None
        if not bounded and self.on_full not in (None, "grow"):
            raise ValueError(
                f"Policy: on_full is {self.on_full!r}, but the table has neither a capacity nor a "
                "memory budget: give one"
            )
        if budget and self.on_full == "grow":
            raise ValueError(
                "Policy: on_full is 'grow', but the group has a memory budget, which the table may "
                "not exceed"
            )
        if budget and self.on_full in (None, "evict") and self.score == "none":
            raise ValueError(
                "Policy: the group has a memory budget, and a full table evicts by score, but "
                "score is 'none': choose score='step', or on_full='default'"
            )
        return self.on_full or ("evict" if bounded else "grow")

    def __repr__(self) -> str:
        values = ((of.name, getattr(self, of.name), of.default) for of in fields(self))
        changed = (
            f"{name}={value!r}"
            for name, value, default in values
            if isinstance(value, Tensor) or value != default
        )
        return f"Policy({', '.join(changed)})"

    def description(self) -> dict[str, Any]:
        """What a checkpoint says about the policy, in plain values."""
        return {
            "score": "+".join(self.scores),
            "capacity": self.capacity,
            "on_full": self.on_full,
            "admission": None if self.admission is None else repr(self.admission),
            "ttl": self.ttl,
        }


@dataclass(frozen=True, kw_only=True)
class FeaturePolicy:
    """What a feature does otherwise than the policy of its table.

    Args:
        threshold: occurrences, at least 1, from which on an id that this feature brings gets a row;
            needs a table that admits frequent ids. Of several features that bring an id in one
            lookup, the least threshold counts. None: that of the table.
        ttl: seconds, at least 1; an id stays for the longest ttl of the features that looked it up.
            None: that of the table.
        updates_scores: False: lookups by this feature do not refresh timestamps, frequencies,
            custom scores and expiry, and do not count towards admission. A new id that only such
            features bring starts with all of them, but with a frequency of 0.

    Raises:
        TypeError: a value of another type.
        ValueError: ``threshold`` or ``ttl`` is less than 1.

    Example:
        >>> import torch_dynemb as td
        >>> config = td.TableConfig(
        ...     "ads", 16, ["clicked", "shown"],
        ...     policy=td.Policy(admission=td.AdmitFrequent(3)),
        ...     feature_policies={"clicked": td.FeaturePolicy(threshold=1)},
        ... )
    """

    threshold: int | None = None
    ttl: int | None = None
    updates_scores: bool = True

    def __post_init__(self) -> None:
        for name in ("threshold", "ttl"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"FeaturePolicy: {name} is {value!r}, expected int")
            if value is not None and value < 1:
                raise ValueError(f"FeaturePolicy: {name} is {value}, expected at least 1")
        flag("FeaturePolicy: updates_scores", self.updates_scores)


def check_feature_policies(
    owner: str, policy: Policy, features: tuple[str, ...], given: Mapping[str, FeaturePolicy]
) -> None:
    """Raises ValueError or TypeError for policies of features that do not fit their table."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{owner}: feature_policies is {described(given)}, expected a dict of FeaturePolicy by "
            "feature name"
        )
    for name, feature in given.items():
        if name not in features:
            raise ValueError(
                f"{owner}: feature_policies names {name!r}, but the features are {list(features)}"
            )
        if not isinstance(feature, FeaturePolicy):
            raise TypeError(
                f"{owner}: feature_policies[{name!r}] is {feature!r}, expected a FeaturePolicy"
            )
        if feature.threshold is not None and not isinstance(
            policy.admission, AdmitFrequent | AdmitFrequentSketch
        ):
            raise ValueError(
                f"{owner}: feature {name!r} has a threshold, but the table's admission is "
                f"{policy.admission!r}: choose AdmitFrequent or AdmitFrequentSketch"
            )


__all__ = ["SCORES", "Check", "FeaturePolicy", "Policy", "Score", "check_feature_policies"]
