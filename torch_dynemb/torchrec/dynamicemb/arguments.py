"""Small arguments of DynamicEmb's options: modes, strategies, initializers, admission.

Names, values and defaults are those of NVIDIA's DynamicEmb, so that its users keep their code.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from torch_dynemb.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform
from torch_dynemb.policy.policy import Check, Score


class DynamicEmbCheckMode(enum.IntEnum):
    """What happens when ids find no place: ``Policy(check=...)``, told by ``optimizer.step()``."""

    ERROR = 0
    WARNING = 1
    IGNORE = 2

    @property
    def check(self) -> Check:
        """The same for a Policy."""
        checks: dict[str, Check] = {"ERROR": "error", "WARNING": "warning", "IGNORE": "ignore"}
        return checks[self.name]


class DynamicEmbScoreStrategy(enum.IntEnum):
    """What is kept of an id and decides who is evicted.

    Attributes:
        TIMESTAMP: when training last saw it, in seconds, then in steps.
        STEP: the step at which training last saw it.
        CUSTOMIZED: what the user sets before each forward.
        LFU: how often training saw it; every occurrence counts.
        NO_EVICTION: nothing: nobody is evicted, and the table grows beyond its capacity for as long
            as there is memory.
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


_SCORES: dict[DynamicEmbScoreStrategy, Score] = {
    DynamicEmbScoreStrategy.TIMESTAMP: "timestamp",
    DynamicEmbScoreStrategy.STEP: "step",
    DynamicEmbScoreStrategy.CUSTOMIZED: "custom",
    DynamicEmbScoreStrategy.LFU: "frequency",
    DynamicEmbScoreStrategy.NO_EVICTION: "none",
}


class Kept(NamedTuple):
    """What a strategy stands for.

    Attributes:
        score: of a Policy; the first decides who is evicted.
        evicts: False: nobody is evicted.
    """

    score: tuple[Score, ...] | None
    evicts: bool


def scores_of(strategy: object) -> Kept:
    """The scores of a strategy, or of a tuple of them.

    Of a compound the first decides who is evicted, but for TIMESTAMP: as in DynamicEmb it tells
    which ids have been trained since the last dump, and another one decides. NO_EVICTION beside
    others keeps their scores and evicts nobody. None leaves the choice to Policy.

    Raises:
        TypeError: another value.
        ValueError: a compound of none, or one that names a strategy twice.
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
    """Initial values of rows. Fields can be set, as in DynamicEmb; the hash is that of the values.

    Args:
        mode: distribution.
        mean: of NORMAL and TRUNCATED_NORMAL.
        std_dev: of NORMAL and TRUNCATED_NORMAL.
        lower: least value of UNIFORM and TRUNCATED_NORMAL; default: -sqrt(1 / num_embeddings).
        upper: largest value of UNIFORM and TRUNCATED_NORMAL; default: sqrt(1 / num_embeddings).
        value: of CONSTANT.

    Raises:
        NotImplementedError: mode DEBUG.
        TypeError: another mode.
        ValueError: numbers that no initializer takes.
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
        """The same for a table.

        Args:
            num_embeddings: of the table's config, at least 1: says what bounds that are None are.

        Raises:
            NotImplementedError, TypeError, ValueError: as the constructor, for what has been set;
                ValueError also where bounds of this table do not fit the other numbers.
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
                "DynamicEmbInitializerArgs: mode is DEBUG, which is for DynamicEmb's own tests: "
                "choose CONSTANT or UNIFORM; initial values are functions of seed and id in any "
                "case"
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
    """What ids without a row are looked up as, for a Policy or TableOptions."""
    initializer = arguments.initializer(num_embeddings)
    if not isinstance(initializer, Constant):
        return initializer
    if initializer.value == 0:
        return "zeros"
    return torch.full((dim,), initializer.value, device="cpu")


@dataclass(unsafe_hash=True)
class FrequencyAdmissionStrategy:
    """An id gets a row with its ``threshold``-th occurrence in training.

    Fields can be set, as in DynamicEmb; the hash is that of the values.

    Args:
        threshold: occurrences; 0 and 1 admit every id.
        initializer_args: what an id without a row is looked up as in training; values that are
            drawn are a function of seed and id. Default: as a new row.

    Raises:
        TypeError, ValueError: ``threshold`` is no number of at least 0, or ``initializer_args``
            something else.
    """

    threshold: int
    initializer_args: DynamicEmbInitializerArgs | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises what the constructor does, for values that have been set since.

        Raises:
            TypeError, ValueError: ``threshold`` is no number of at least 0, or ``initializer_args``
                something else.
        """
        if not isinstance(self.initializer_args, DynamicEmbInitializerArgs | None):
            raise TypeError(
                f"FrequencyAdmissionStrategy: initializer_args is {self.initializer_args!r}, "
                "expected DynamicEmbInitializerArgs"
            )
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int):
            raise TypeError(
                f"FrequencyAdmissionStrategy: threshold is {self.threshold!r}, expected int"
            )
        if self.threshold < 0:
            raise ValueError(
                f"FrequencyAdmissionStrategy: threshold is {self.threshold}, expected at least 0"
            )


@dataclass(unsafe_hash=True)
class KVCounter:
    """DynamicEmb's bounded table of counts, which a FrequencyAdmissionStrategy needs there.

    Counts are exact here and take about 23 bytes for every id that is still without a row, so
    these sizes bound nothing; options that have a counter warn of it.

    Args:
        capacity: ids that DynamicEmb's table counts.
        bucket_capacity: ids of one of its buckets.
        key_type: dtype of its ids.
    """

    capacity: int
    bucket_capacity: int = 1024
    key_type: torch.dtype = torch.int64


__all__ = [
    "DynamicEmbCheckMode",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbScoreStrategy",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "default_of",
    "scores_of",
]
