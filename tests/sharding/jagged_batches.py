"""Batches of ragged ids, one per rank, by kind of feature: as TorchRec takes them and as lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from seeding import seeded
from torch import Tensor

BATCH = 5
EXTREMES = torch.tensor([-(2**63), 1 - 2**63, -(2**31) - 1, -1, 0, 1, 2**31, 2**63 - 2, 2**63 - 1])
KINDS = (
    "plain",
    "weighted",
    "int32",
    "offsets",
    "extremes",
    "variable_batch",
    "empty_rank",
    "empty_bags",
    "vbe",
    "weighted_vbe",
)
# a rank without samples; a batch size per feature from the second step on
OTHER_VBE = ("empty_vbe", "late_vbe")


@dataclass(frozen=True)
class Batch:
    """What one rank looks up in a step.

    Attributes:
        ids: the bags by feature.
        weights: of the ids.
        bag_of_sample: by feature, int64 (B,): with a batch size per feature, samples share bags.
    """

    ids: dict[str, list[Tensor]]
    weights: dict[str, list[Tensor]] | None = None
    bag_of_sample: dict[str, Tensor] | None = None

    def samples(self) -> int:
        return len(next(iter(self.expanded().ids.values())))

    def expanded(self) -> Batch:
        """The same with a bag per sample."""
        if self.bag_of_sample is None:
            return self
        inverse = self.bag_of_sample

        def of_samples(bags: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
            return {name: [of[bag] for bag in inverse[name].tolist()] for name, of in bags.items()}

        weights = None if self.weights is None else of_samples(self.weights)
        return Batch(of_samples(self.ids), weights)


def batches_of_ranks(
    kind: str, features: Sequence[str], ranks: int, step: int, vocabulary: int | None = None
) -> list[Batch]:
    """The batches of all ranks in a step.

    Args:
        kind: one of KINDS.
        vocabulary: ids are less than this; None: some of all int64.
    """
    random = seeded(step)
    if vocabulary is not None:
        known = torch.arange(vocabulary)
    elif kind == "extremes":
        known = EXTREMES
    elif kind == "int32":
        known = torch.randint(-(2**31), 2**31, (30,), generator=seeded(100))
    else:
        known = torch.randint(-(2**63), 2**63 - 1, (30,), generator=seeded(100))
    return [_batch(kind, features, rank, step, known, random) for rank in range(ranks)]


def _batch(
    kind: str,
    features: Sequence[str],
    rank: int,
    step: int,
    known: Tensor,
    random: torch.Generator,
) -> Batch:
    samples = BATCH
    if kind == "variable_batch":
        samples += 2 * rank + step
    elif kind in ("empty_rank", "empty_vbe") and rank == 1:
        samples = 0
    ids: dict[str, list[Tensor]] = {}
    variable = kind.endswith("vbe") and not (kind == "late_vbe" and step == 0)
    inverse: dict[str, Tensor] | None = {} if variable else None
    for f, feature in enumerate(features):
        bags = samples
        if inverse is not None:
            bags = min(samples, 1 + (rank + f + step) % BATCH)
            # every bag belongs to some sample
            others = torch.randint(0, max(bags, 1), (samples - bags,), generator=random)
            inverse[feature] = torch.cat([torch.arange(bags), others])
        lengths = torch.randint(0, 4, (bags,), generator=random).tolist()
        if kind == "empty_bags" and step == 1:
            lengths = [0] * bags
        ids[feature] = [
            known[torch.randint(0, len(known), (length,), generator=random)] for length in lengths
        ]
    weights = None
    if kind.startswith("weighted"):
        weights = {
            name: [torch.rand(len(bag), generator=random) + 0.1 for bag in bags]
            for name, bags in ids.items()
        }
    return Batch(ids, weights, inverse)


def keyed_jagged(batch: Batch, kind: str):  # type: ignore[no-untyped-def]
    """The KeyedJaggedTensor of a batch."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    integer = torch.int32 if kind == "int32" else torch.int64
    keys = list(batch.ids)
    bags = [bag for of in batch.ids.values() for bag in of]
    lengths = torch.tensor([len(bag) for bag in bags], dtype=integer)
    weights = None
    if batch.weights is not None:
        weights = _joined([bag for of in batch.weights.values() for bag in of], torch.float32)
    values = _joined(bags, integer)
    if batch.bag_of_sample is not None:
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths,
            stride_per_key_per_rank=[[len(of)] for of in batch.ids.values()],
            inverse_indices=(keys, torch.stack(list(batch.bag_of_sample.values()))),
        )
    if kind == "offsets":
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    stride = len(next(iter(batch.ids.values())))
    return KeyedJaggedTensor(keys, values, weights, lengths, stride=stride)


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *(part.to(dtype) for part in parts)])
