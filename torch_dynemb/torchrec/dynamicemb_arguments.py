"""Small arguments of DynamicEmb's options: modes, strategies, initializers, admission.

Names, values and defaults are those of NVIDIA's DynamicEmb, so that its users keep their code.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

import torch

from torch_dynemb.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform
from torch_dynemb.policy import Check, Score


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


def scores_of(strategy: object) -> tuple[Score, ...]:
    """The scores of a strategy, or of a tuple of them; the first decides who is evicted.

    Of the compound of TIMESTAMP and LFU, in any order, the frequency decides: the timestamp tells
    which ids have been trained since the last dump.

    Raises:
        TypeError, NotImplementedError: another value, or another compound.
    """
    strategies = strategy if isinstance(strategy, tuple) else (strategy,)
    known: list[DynamicEmbScoreStrategy] = []
    for one in strategies:
        if not isinstance(one, DynamicEmbScoreStrategy):
            raise TypeError(
                f"DynamicEmbTableOptions: score_strategy is {strategy!r}, expected a "
                "DynamicEmbScoreStrategy or a tuple of them"
            )
        known.append(one)
    if len(known) == 1:
        return (_SCORES[known[0]],)
    compound = {DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU}
    if len(known) != 2 or set(known) != compound:
        raise NotImplementedError(
            f"DynamicEmbTableOptions: score_strategy is {strategy!r}, expected one strategy or "
            "(TIMESTAMP, LFU): for other compounds give TableOptions(policy=Policy(score=(...)))"
        )
    return ("frequency", "timestamp")


class DynamicEmbInitializerMode(enum.Enum):
    """Distribution of initial values."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


@dataclass(frozen=True)
class DynamicEmbInitializerArgs:
    """Initial values of rows.

    Args:
        mode: distribution.
        mean: of NORMAL and TRUNCATED_NORMAL.
        std_dev: of NORMAL and TRUNCATED_NORMAL.
        lower: least value of UNIFORM (default: -sqrt(1 / num_embeddings)) and TRUNCATED_NORMAL.
        upper: largest value of UNIFORM (default: sqrt(1 / num_embeddings)) and TRUNCATED_NORMAL.
        value: of CONSTANT.

    Raises:
        NotImplementedError: mode DEBUG, or TRUNCATED_NORMAL without bounds.
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
        """The same for a table with this config entry."""
        mode = self.mode
        if mode == DynamicEmbInitializerMode.CONSTANT:
            return Constant(self.value)
        if mode == DynamicEmbInitializerMode.NORMAL:
            return Normal(self.mean, self.std_dev)
        if mode == DynamicEmbInitializerMode.UNIFORM:
            bound = math.sqrt(1 / num_embeddings)
            return Uniform(
                -bound if self.lower is None else self.lower,
                bound if self.upper is None else self.upper,
            )
        if mode == DynamicEmbInitializerMode.TRUNCATED_NORMAL:
            if self.lower is None or self.upper is None:
                raise NotImplementedError(
                    f"DynamicEmbInitializerArgs: lower is {self.lower} and upper {self.upper} for "
                    "TRUNCATED_NORMAL: DynamicEmb documents other defaults than it takes, so there "
                    "are none here: give both, as values"
                )
            return TruncatedNormal(self.mean, self.std_dev, self.lower, self.upper)
        if mode == DynamicEmbInitializerMode.DEBUG:
            raise NotImplementedError(
                "DynamicEmbInitializerArgs: mode is DEBUG, which is for DynamicEmb's own tests: "
                "choose CONSTANT or UNIFORM; initial values are functions of seed and id in any "
                "case"
            )
        raise TypeError(
            f"DynamicEmbInitializerArgs: mode is {mode!r}, expected a DynamicEmbInitializerMode"
        )


def constant_of(
    owner: str, arguments: DynamicEmbInitializerArgs, dim: int
) -> Literal["zeros"] | torch.Tensor:
    """The vector of a constant initializer.

    Raises:
        NotImplementedError: it is not constant.
    """
    if arguments.mode != DynamicEmbInitializerMode.CONSTANT:
        raise NotImplementedError(
            f"{owner} is {arguments!r}, expected mode CONSTANT: other values than those of a new "
            "row are not drawn"
        )
    if arguments.value == 0:
        return "zeros"
    return torch.full((dim,), arguments.value, device="cpu")


@dataclass(frozen=True)
class FrequencyAdmissionStrategy:
    """An id gets a row with its ``threshold``-th occurrence in training.

    Args:
        threshold: occurrences; 0 and 1 admit every id.
        initializer_args: what an id without a row is looked up as in training: a constant, or the
            same as a new row. Default: as a new row.
    """

    threshold: int
    initializer_args: DynamicEmbInitializerArgs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int):
            raise TypeError(
                f"FrequencyAdmissionStrategy: threshold is {self.threshold!r}, expected int"
            )
        if self.threshold < 0:
            raise ValueError(
                f"FrequencyAdmissionStrategy: threshold is {self.threshold}, expected at least 0"
            )


@dataclass(frozen=True)
class KVCounter:
    """DynamicEmb's bounded table of counts, which a FrequencyAdmissionStrategy needs there.

    Counts are exact here and take about 23 bytes for every id that is still without a row, so
    these sizes bound nothing; options that have a counter warn of it.
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
    "constant_of",
    "scores_of",
]
