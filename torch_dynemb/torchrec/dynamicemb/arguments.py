"""Small arguments of DynamicEmb's options: modes, strategies, initializers, admission.

Names, values and defaults are those of NVIDIA's DynamicEmb, so existing code keeps working.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from torch_dynemb.argument_checks import integer, number
from torch_dynemb.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform
from torch_dynemb.policy.admission import (
    AdmissionRule,
    AdmitByChance,
    AdmitFrequent,
    AdmitNone,
)
from torch_dynemb.policy.policy import Check, Score


class DynamicEmbCheckMode(enum.IntEnum):
    """Reaction to ids without room: ``Policy(check=...)``, applied by ``optimizer.step()``."""

    ERROR = 0
    WARNING = 1
    IGNORE = 2

    @property
    def check(self) -> Check:
        """The equivalent argument of a Policy."""
        checks: dict[str, Check] = {"ERROR": "error", "WARNING": "warning", "IGNORE": "ignore"}
        return checks[self.name]


class DynamicEmbScoreStrategy(enum.IntEnum):
    """Score of an id, by which ids are evicted.

    Attributes:
        TIMESTAMP: time of the last training lookup, in seconds, then in steps.
        STEP: step of the last training lookup.
        CUSTOMIZED: set by the user before each forward.
        LFU: number of occurrences in training.
        NO_EVICTION: no score and no eviction; the table grows beyond its capacity until memory is
            full.
        LFU_DECAY: occurrences in training, of which each counts half after the ``half_life`` of
            the options. DynamicEmb has no such name: it stands for ``LFU`` with a
            ``score_function`` that decays.
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4
    LFU_DECAY = 5


_SCORES: dict[DynamicEmbScoreStrategy, Score] = {
    DynamicEmbScoreStrategy.TIMESTAMP: "timestamp",
    DynamicEmbScoreStrategy.STEP: "step",
    DynamicEmbScoreStrategy.CUSTOMIZED: "custom",
    DynamicEmbScoreStrategy.LFU: "frequency",
    DynamicEmbScoreStrategy.NO_EVICTION: "none",
    DynamicEmbScoreStrategy.LFU_DECAY: "decayed",
}


class EvictedItemMode(enum.Flag):
    """Record of the ids that a table evicts.

    Attributes:
        DISCARD: nothing.
        RETAIN_KEY: the ids, until ``pop_evicted_keys`` takes them.
    """

    DISCARD = 0
    RETAIN_KEY = 1

    def __repr__(self) -> str:
        return str(self)  # code, so that signatures in the documentation can be read


class Kept(NamedTuple):
    """Policy arguments that a strategy stands for.

    Attributes:
        score: of a Policy; the first one decides which ids are evicted.
        evicts: False: no id is evicted.
    """

    score: tuple[Score, ...] | None
    evicts: bool


def kept_scores(strategy: object) -> Kept:
    """Return the scores of a strategy, or of a tuple of strategies.

    The first strategy of a tuple decides which ids are evicted. TIMESTAMP is an exception, as in
    DynamicEmb: it marks ids trained since the last dump, and the next strategy decides. NO_EVICTION
    beside others keeps their scores and evicts no id. None leaves the choice to Policy.

    Raises:
        TypeError: another value.
        ValueError: an empty tuple, or one that names a strategy twice.
    """
    if strategy is None:
        return Kept(None, True)
    strategies = strategy if isinstance(strategy, tuple) else (strategy,)
    known: list[DynamicEmbScoreStrategy] = []
    for one in strategies:
        if not isinstance(one, DynamicEmbScoreStrategy):
            raise TypeError(
                f"DynamicEmbTableOptions: score_strategy is {strategy!r}, expected a "
                "DynamicEmbScoreStrategy or a tuple of them"
            )
        known.append(one)
    if not known or len(set(known)) < len(known):
        raise ValueError(
            f"DynamicEmbTableOptions: score_strategy is {strategy!r}, expected at least one "
            "strategy, and each once"
        )
    evicts = DynamicEmbScoreStrategy.NO_EVICTION not in known
    scores = [_SCORES[one] for one in known if one != DynamicEmbScoreStrategy.NO_EVICTION]
    scores.sort(key=lambda score: score == "timestamp")  # the others keep their order
    return Kept(tuple(scores) or ("none",), evicts)


class DynamicEmbInitializerMode(enum.Enum):
    """Distribution of initial values."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


@dataclass(unsafe_hash=True)
class DynamicEmbInitializerArgs:
    """Initial values of rows.

    Fields can be assigned, as in DynamicEmb; the hash follows their current values.

    Args:
        mode: distribution.
        mean: of NORMAL and TRUNCATED_NORMAL.
        std_dev: of NORMAL and TRUNCATED_NORMAL.
        lower: lower bound of UNIFORM and TRUNCATED_NORMAL; default: -sqrt(1 / num_embeddings).
        upper: upper bound of UNIFORM and TRUNCATED_NORMAL; default: sqrt(1 / num_embeddings).
        value: of CONSTANT.

    Raises:
        NotImplementedError: mode DEBUG.
        TypeError: another mode.
        ValueError: numbers outside the range of the initializer.
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0

    def __post_init__(self) -> None:
        self.initializer(1)

    def initializer(self, num_embeddings: int) -> Initializer:
        """Return the equivalent initializer of torch_dynemb for a table.

        Args:
            num_embeddings: of the table's config, at least 1; bounds that are None are computed
                from it.

        Raises:
            NotImplementedError, TypeError, ValueError: as the constructor, for assigned fields.
                ValueError also if the computed bounds do not fit the other numbers.
        """
        mode = self.mode
        if mode == DynamicEmbInitializerMode.CONSTANT:
            return Constant(self.value)
        if mode == DynamicEmbInitializerMode.NORMAL:
            return Normal(self.mean, self.std_dev)
        bound = math.sqrt(1 / num_embeddings)
        lower = -bound if self.lower is None else self.lower
        upper = bound if self.upper is None else self.upper
        if mode == DynamicEmbInitializerMode.UNIFORM:
            return Uniform(lower, upper)
        if mode == DynamicEmbInitializerMode.TRUNCATED_NORMAL:
            return self._truncated_normal(lower, upper, num_embeddings)
        if mode == DynamicEmbInitializerMode.DEBUG:
            raise NotImplementedError(
                "DynamicEmbInitializerArgs: mode is DEBUG, which only DynamicEmb's tests use: "
                "choose CONSTANT or UNIFORM; initial values always depend on seed and id "
                "alone"
            )
        raise TypeError(
            f"DynamicEmbInitializerArgs: mode is {mode!r}, expected a DynamicEmbInitializerMode"
        )

    def _truncated_normal(self, lower: float, upper: float, num_embeddings: int) -> Initializer:
        try:
            return TruncatedNormal(self.mean, self.std_dev, lower, upper)
        except ValueError as error:
            if self.lower is not None and self.upper is not None:
                raise
            raise ValueError(
                f"DynamicEmbInitializerArgs: lower is {self.lower} and upper {self.upper} for "
                f"TRUNCATED_NORMAL, so that the bounds for num_embeddings={num_embeddings} are "
                f"{lower} and {upper}: {error}, or give both bounds"
            ) from error


def default_of(
    arguments: DynamicEmbInitializerArgs, num_embeddings: int, dim: int
) -> Literal["zeros"] | torch.Tensor | Initializer:
    """Return the value that lookups give ids without a row, for a Policy or TableOptions."""
    initializer = arguments.initializer(num_embeddings)
    if not isinstance(initializer, Constant):
        return initializer
    if initializer.value == 0:
        return "zeros"
    return torch.full((dim,), initializer.value, device="cpu")


@dataclass(unsafe_hash=True)
class KVCounter:
    """DynamicEmb's table of counts for FrequencyAdmissionStrategy; its sizes are unused here.

    Counts are exact here and take about 23 bytes for each id without a row. Options with a counter
    warn about it.

    Args:
        capacity: ids that DynamicEmb's table counts, at least 1.
        bucket_capacity: ids per bucket, at least 1.
        key_type: dtype of ids, torch.int64.

    Raises:
        TypeError, ValueError: an argument has another type or value.
    """

    capacity: int
    bucket_capacity: int = 1024
    key_type: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        self.capacity = integer("KVCounter: capacity", self.capacity, least=1)
        self.bucket_capacity = integer("KVCounter: bucket_capacity", self.bucket_capacity, least=1)
        if self.key_type != torch.int64:
            raise ValueError(
                f"KVCounter: key_type is {self.key_type}, expected torch.int64, the dtype of ids"
            )


@dataclass(unsafe_hash=True)
class FrequencyAdmissionStrategy:
    """Admission rule: an id gets a row with its ``threshold``-th occurrence in training.

    Fields can be assigned, as in DynamicEmb; the hash follows their current values.

    Args:
        threshold: occurrences; 0 and 1 admit every id.
        counter: sizes of DynamicEmb's counts; unused here, see :class:`KVCounter`. Strategies that
            differ in it are equal.
        initializer_args: values that training lookups give ids without a row. Random values depend
            on seed and id alone. Default: the initial values of the row.

    Raises:
        TypeError, ValueError: ``threshold`` is not an int of at least 0, or another argument has
            another type.
    """

    threshold: int
    counter: KVCounter | None = field(default=None, compare=False)
    initializer_args: DynamicEmbInitializerArgs | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check fields that were assigned after construction.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        owner = type(self).__name__
        _check_initializer(owner, self.initializer_args)
        if not isinstance(self.counter, KVCounter | None):
            raise TypeError(
                f"{owner}: counter is {self.counter!r}, expected KVCounter(capacity=...); give "
                "initializer_args by name"
            )
        self.threshold = integer(f"{owner}: threshold", self.threshold, least=0)

    def rule(self) -> AdmissionRule | None:
        """Return the equivalent argument of a Policy; None: every id gets a row."""
        return AdmitFrequent(self.threshold) if self.threshold > 1 else None


@dataclass(unsafe_hash=True)
class ProbabilisticAdmissionStrategy:
    """Admission rule: each step that looks up an id without a row gives it one by chance.

    An id takes ``1 / probability`` such steps on average, and nothing is counted. The draw is a
    function of seed, table, id and step, see :class:`torch_dynemb.AdmitByChance`. DynamicEmb draws
    from ``torch.rand``. Where its table counts occurrences for LFU, it draws once for each
    occurrence in a batch; here an id has one draw in a step in any case.

    Fields can be assigned, as in DynamicEmb; the hash follows their current values.

    Args:
        probability: from 0 to 1. 0: no id gets a row in training.
        initializer_args: as in :class:`FrequencyAdmissionStrategy`.

    Raises:
        TypeError, ValueError: an argument has another type, or ``probability`` is out of its range.
    """

    probability: float
    initializer_args: DynamicEmbInitializerArgs | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check fields that were assigned after construction.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        owner = type(self).__name__
        _check_initializer(owner, self.initializer_args)
        self.probability = number(f"{owner}: probability", self.probability)
        if not 0 <= self.probability <= 1:
            raise ValueError(
                f"{owner}: probability is {self.probability}, expected a number from 0 to 1"
            )

    def rule(self) -> AdmissionRule | None:
        """Return the equivalent argument of a Policy; None: every id gets a row."""
        if self.probability == 0:
            return AdmitNone()
        return AdmitByChance(self.probability) if self.probability < 1 else None


AdmissionStrategy = FrequencyAdmissionStrategy | ProbabilisticAdmissionStrategy


def _check_initializer(owner: str, given: object) -> None:
    if not isinstance(given, DynamicEmbInitializerArgs | None):
        raise TypeError(
            f"{owner}: initializer_args is {given!r}, expected DynamicEmbInitializerArgs"
        )


__all__ = [
    "AdmissionStrategy",
    "DynamicEmbCheckMode",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbScoreStrategy",
    "EvictedItemMode",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "ProbabilisticAdmissionStrategy",
    "default_of",
    "kept_scores",
]
