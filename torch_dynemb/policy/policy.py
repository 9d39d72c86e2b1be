"""Life-cycle policies: scores of ids, admission, eviction and expiry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from torch_dynemb.argument_checks import described, flag, integer, seconds, tensor
from torch_dynemb.initializers import Initializer
from torch_dynemb.policy.admission import AdmissionRule, AdmitFrequent, AdmitFrequentSketch
from torch_dynemb.policy.custom import Custom
from torch_dynemb.policy.half_life import check_half_lives, ticks_of

Score = Literal["none", "step", "timestamp", "frequency", "custom", "decayed"]
OnFullName = Literal["evict", "grow", "default", "error"]
Check = Literal["ignore", "warning", "error"]
Default = Literal["initial", "zeros"] | Tensor | Initializer

SCORES = ("step", "timestamp", "frequency", "custom", "decayed")
# usual names of eviction rules, and the scores to write instead
_ACRONYMS = {"lru": "step", "lfu": "frequency"}


def check_default(owner: str, value: object) -> None:
    """Raise TypeError unless a vector of default values is a dense tensor of floats."""
    if isinstance(value, Tensor) and not tensor(owner, value).is_floating_point():
        raise TypeError(f"{owner} has dtype {value.dtype}, expected floats")


@dataclass(frozen=True, eq=False, kw_only=True)
class Policy:
    """Rules for the ids of a table: scores, capacity, admission, eviction and expiry.

    Args:
        score: values stored for an id. The id with the least score is evicted first; ties go by the
            oldest lookup, then by the least id. ``"step"``: the optimizer step of the last training
            lookup (LRU). ``"timestamp"``: the same in seconds; see ``optimizer.step(now=...)``.
            ``"frequency"``: occurrences in training (LFU). ``"custom"``: given with the lookups.
            ``"decayed"``: occurrences in training, of which each counts half after a half-life, as
            a base-2 logarithm; ``scores.get`` and ``remove`` give and take counts.
            :class:`Custom`: custom scores that lookups add up, or keep the largest of.
            ``"none"``: nothing. Or several, such as ``("timestamp", "frequency")``: the first
            decides. Default: ``"step"`` if ids can be evicted, else ``"none"``.
        half_life: of score ``"decayed"``: seconds, or a text such as ``"7d"`` or ``"12h"``. Time is
            that of ``"timestamp"``.
        half_life_steps: the same in optimizer steps, in place of ``half_life``.
        capacity: maximal number of ids; None: limited by memory alone.
        on_full: what happens to a new id if the table is full. ``"evict"``: another id is evicted;
            tables of up to 89 ids compare all ids, larger ones a sample of about 20. ``"default"``:
            it gets no row and reads as ``refused`` says. ``"error"``: the lookup raises.
            ``"grow"``: the table exceeds its capacity. Default: ``"evict"``. An id without a row
            keeps its count of admission.
        protected_steps: ids are safe from eviction for so many steps after a training lookup,
            counting the current one. Use more than 1 if batches are looked up ahead of their
            backward.
        admission: rule for new ids, such as ``AdmitFrequent(2)``; None: all get a row.
        refused: value in training of an id that got no row: ``"initial"``, ``"zeros"``, a float
            tensor [embedding_dim], or an initializer, by which a row of that id would begin.
            Default: the table's ``eval_default``.
        ttl: time after its last training lookup until an id expires: seconds, or a text such as
            ``"7d"``. An expired id reads as unknown until training looks it up again;
            ``remove(expired=True)`` removes it.
        keep_at_least: number of ids that stay although their ttl has passed, for tables that get
            few lookups. If a table has more ids, those seen least recently expire first; ids seen
            in one second expire together. Each of several ranks keeps its share. Needs ``ttl``.
            The first eager lookup for inference after a step scans the index.
        check: what ``optimizer.step()`` does if ids found no room: ``"ignore"``, ``"warning"`` or
            ``"error"``. They are counted as ``rejected`` in any case.

    Raises:
        TypeError, ValueError: a value is wrong, or values contradict each other.

    Example:
        >>> import torch_dynemb as td
        >>> lfu = td.Policy(score="frequency", capacity=1_000_000)
        >>> lru = td.Policy(score="timestamp", capacity=1_000_000, ttl="30d")
        >>> both = td.Policy(score="decayed", half_life="7d", capacity=1_000_000)
    """

    score: Score | Custom | tuple[Score | Custom, ...] | None = None
    half_life: int | str | None = None
    half_life_steps: int | None = None
    capacity: int | None = None
    on_full: OnFullName | None = None
    protected_steps: int = 1
    admission: AdmissionRule | None = None
    refused: Default | None = None
    ttl: int | str | None = None
    keep_at_least: int | None = None
    check: Check = "ignore"

    def __post_init__(self) -> None:
        for name in ("capacity", "protected_steps", "ttl", "keep_at_least"):
            value = getattr(self, name)
            if value is not None:
                whole = seconds if name == "ttl" else integer
                object.__setattr__(self, name, whole(f"Policy: {name}", value, least=1))
        if self.keep_at_least is not None and self.ttl is None:
            raise ValueError(
                f"Policy: keep_at_least is {self.keep_at_least}, but without a ttl no id expires: "
                "give one, such as ttl='7d'"
            )
        if self.score is not None and not isinstance(self.score, str | Custom | tuple | list):
            raise TypeError(
                f"Policy: score is {described(self.score)}, expected a name, a "
                "Custom, or a tuple of them"
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
        self._check_half_life()
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

    def _check_half_life(self) -> None:
        check_half_lives(
            "Policy",
            self.half_life,
            self.half_life_steps,
            "decayed" in self.scores and self.combine != "decayed_sum",
            f"score is {self.score!r}",
            "score='decayed'",
        )

    @property
    def half_life_ticks(self) -> int:
        """Half-life of decayed counts in seconds; below 0: in steps; 0: there are none."""
        owner = self if self.custom is None or self.combine != "decayed_sum" else self.custom
        return ticks_of("Policy", owner.half_life, owner.half_life_steps)

    @property
    def admission_ticks(self) -> int:
        """Half-life of counts of admission, as :attr:`half_life_ticks`."""
        rule = self.admission
        return rule.half_life_ticks if isinstance(rule, AdmitFrequent) else 0

    @property
    def custom(self) -> Custom | None:
        """The score that is given with lookups; None: there is none."""
        for score in self._given_scores():
            if isinstance(score, Custom):
                return score
        return Custom() if "custom" in self.scores else None

    @property
    def combine(self) -> str | None:
        """How custom scores are combined, as :class:`Custom` says; None: there are none."""
        return None if self.custom is None else self.custom.combine

    def _given_scores(self) -> tuple[object, ...]:
        return tuple(self.score) if isinstance(self.score, tuple | list) else (self.score,)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores; eviction goes by the first."""
        if self.score is None:
            return ("step" if self.capacity is not None and self.on_full != "grow" else "none",)
        return tuple(of.score if isinstance(of, Custom) else of for of in self._given_scores())  # type: ignore[misc]  # checked

    def full(self, *, budget: bool) -> str:
        """Return what happens to a new id without room, in a group with or without a memory budget.

        Args:
            budget: whether the group has one.

        Returns:
            ``"evict"``, ``"grow"``, ``"default"`` or ``"error"``.

        Raises:
            ValueError: ``on_full`` is given, but the table cannot be full; or it contradicts the
                budget or the score.
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
        """Return the policy in plain values, for a checkpoint."""
        decays = {"half_life": self.half_life_ticks} if self.half_life_ticks else {}
        if self.admission_ticks:
            decays["admission_half_life"] = self.admission_ticks
        kept = {} if self.keep_at_least is None else {"keep_at_least": self.keep_at_least}
        return {
            **decays,
            **kept,
            "score": "+".join(self.scores),
            **({} if self.combine in (None, "last") else {"combine": self.combine}),
            "capacity": self.capacity,
            "on_full": self.on_full,
            "admission": None if self.admission is None else repr(self.admission),
            "ttl": self.ttl,
        }


@dataclass(frozen=True, kw_only=True)
class FeaturePolicy:
    """Settings of a feature that differ from the policy of its table.

    Args:
        threshold: occurrences, at least 1, from which on an id of this feature gets a row. The
            table's admission must be by frequency. If several features of a lookup have the id, the
            least threshold counts. None: that of the table.
        ttl: as of :class:`Policy`; an id stays for the longest ttl of the features that looked it
            up. None: that of the table.
        updates_scores: False: lookups by this feature do not refresh timestamps, frequencies,
            custom scores and expiry, and do not count towards admission. A new id with such
            features alone starts with all scores, but with a frequency of 0.

    Raises:
        TypeError: a value has the wrong type.
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
    ttl: int | str | None = None
    updates_scores: bool = True

    def __post_init__(self) -> None:
        for name in ("threshold", "ttl"):
            value = getattr(self, name)
            if value is not None:
                whole = seconds if name == "ttl" else integer
                object.__setattr__(self, name, whole(f"FeaturePolicy: {name}", value, least=1))
        flag("FeaturePolicy: updates_scores", self.updates_scores)


def check_feature_policies(
    owner: str, policy: Policy, features: tuple[str, ...], given: Mapping[str, FeaturePolicy]
) -> None:
    """Raise ValueError or TypeError if policies of features do not fit their table."""
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
