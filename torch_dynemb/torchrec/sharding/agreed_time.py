"""Agreement of ranks on the time of dynamic tables, without a further collective.

If shards of one table read their own clocks, an id would get several times, and shards would evict
different ids. Instead, each rank proposes a time. TorchRec's exchange of ids asks the features for
the tensors to send, so the proposal travels as three more numbers beside the lengths.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.torchrec.sharding.tables import ShardTables

# A time is split into words of 21 bits, because lengths may be int32.
_WORD_BITS = 21
_WORDS = 3


@functools.cache  # avoids a copy to the device per batch, which would synchronize a GPU
def _shifts(device: torch.device) -> Tensor:
    return torch.tensor([_WORD_BITS * word for word in range(_WORDS)], device=device)


class TimedFeatures(KeyedJaggedTensor):  # type: ignore[misc]
    """Features with the time that each rank proposes.

    Attributes:
        proposals: int64 [ranks]; before the exchange [1], of this rank.
    """

    proposals: Tensor

    @classmethod
    def of(cls, features: KeyedJaggedTensor, proposals: Tensor) -> TimedFeatures:
        """Return the same features with times."""
        timed: Any = copy.copy(features)
        timed.__class__ = cls  # its constructor would compute lengths and offsets again
        timed.proposals = proposals
        result: TimedFeatures = timed
        return result

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        self.proposals.record_stream(stream)

    # TorchRec sends tensors in pieces per rank, and both sides must know the sizes of the pieces.
    # These are batch sizes if features share one, else numbers of features, sent as "strides".

    @property
    def _carrier(self) -> int:
        return 2 if self.variable_stride_per_key() else 0

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        splits: list[list[int]] = super().dist_splits(key_splits)
        sizes = splits[self._carrier]
        self._sizes = list(sizes)
        splits[self._carrier] = [size + _WORDS for size in sizes]
        return splits

    def dist_tensors(self) -> list[Tensor]:
        tensors: list[Tensor] = super().dist_tensors()
        carrier = tensors[self._carrier]
        words = self.proposals >> _shifts(self.proposals.device)
        words = (words & ((1 << _WORD_BITS) - 1)).to(carrier.dtype)
        pieces = [part for piece in carrier.split(self._sizes) for part in (piece, words)]
        tensors[self._carrier] = torch.cat(pieces)
        return tensors

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> KeyedJaggedTensor:
        carrier = 2 if variable_stride_per_key else 0
        strides = [1] * num_workers if stride_per_rank is None else stride_per_rank
        sizes = [size for stride in strides for size in (len(keys) * stride, _WORDS)]
        pieces = tensors[carrier].split(sizes)
        words = torch.stack(pieces[1::2]).to(torch.int64)
        received = KeyedJaggedTensor.dist_init(
            keys=keys,
            tensors=[*tensors[:carrier], torch.cat(pieces[::2]), *tensors[carrier + 1 :]],
            variable_stride_per_key=variable_stride_per_key,
            num_workers=num_workers,
            recat=recat,
            stride_per_rank=stride_per_rank,
            stagger=stagger,
        )
        return TimedFeatures.of(received, (words << _shifts(words.device)).sum(1))


class TimeOfSharding:
    """Forward pre-hook of an exchange that adds this rank's proposal for a sharding's tables."""

    def __init__(self) -> None:
        self._tables: list[ShardTables] = []

    def take(self, lookup: nn.Module) -> None:
        """Use the proposal of the tables of a lookup."""
        self._tables += [module for module in lookup.modules() if isinstance(module, ShardTables)]

    def _proposal(self, device: torch.device) -> Tensor:
        proposals = [tables.group.clock.proposed for tables in self._tables]
        times = [proposed for proposed in proposals if proposed is not None]
        if not times:
            return torch.zeros(1, dtype=torch.int64, device=device)  # the tables are on other ranks
        return times[0] if len(times) == 1 else torch.cat(times).max().view(1)

    def __call__(
        self, exchange: nn.Module, arguments: tuple[KeyedJaggedTensor]
    ) -> tuple[KeyedJaggedTensor]:
        (features,) = arguments
        return (TimedFeatures.of(features, self._proposal(features.device())),)


def agree_on_time(lookup: nn.Module, features: KeyedJaggedTensor) -> None:
    """Set the time of a lookup's tables in training, if the features bring times."""
    if isinstance(features, TimedFeatures):
        for module in lookup.modules():
            if isinstance(module, ShardTables):
                module.agree_on_now(features.proposals)


__all__ = ["TimeOfSharding", "TimedFeatures", "agree_on_time"]
