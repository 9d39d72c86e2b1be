"""Divisor of means for bags that are summed over several ranks.

TorchRec's own divisor has four limits:

* it fails without samples;
* where it reorders a batch with a size per feature, it divides by bags of other features;
* it divides either all tables of a feature or none;
* it divides no table of ``grid_shard``, of which its kernels sum bags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torch_dynemb.torchrec.planning.options import TableOptions

# static tables, of which the kernels sum bags of means on any number of ranks
_SUM_IN_TORCHREC = (
    RwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
    GridPooledEmbeddingSharding,
)


class PooledOutput(NamedTuple):
    """Columns of one output of a collection.

    Attributes:
        feature: the feature of the bags.
        divided: whether they are a mean of parts from several ranks.
        padding_idx: an id that does not count.
    """

    feature: str
    divided: bool
    padding_idx: int | None


def pooled_outputs(
    configs: Sequence[EmbeddingBagConfig],
    shardings: Mapping[str, EmbeddingSharding[Any, Any, Any, Any]],
    options: Mapping[str, TableOptions],
) -> dict[str, PooledOutput]:
    """Return the outputs of a collection by name.

    Args:
        configs: of all tables.
        shardings: by table.
        options: of the dynamic tables, by name.
    """
    outputs = {}
    for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True):
        sharding, of_table = shardings[config.name], options.get(config.name)
        summed = isinstance(sharding, _SUM_IN_TORCHREC) if of_table is None else sharding.sums
        divided = summed and config.pooling == PoolingType.MEAN
        padding_idx = None if of_table is None else of_table.padding_idx
        for name, feature in zip(names, config.feature_names, strict=True):
            outputs[name] = PooledOutput(feature, divided, padding_idx)
    return outputs


def mean_divisor(
    features: KeyedJaggedTensor,
    outputs: Sequence[PooledOutput],
    dims: Sequence[int],
    *,
    weighted: bool,
) -> Tensor:
    """Return the divisor of the outputs: float32 (B, sum of dims).

    Args:
        features: the batch of this rank.
        outputs: adjacent columns, in the order of ``dims``.
        weighted: whether ids count by their weights.
    """
    samples: dict[str, Tensor] = {}
    batch = features.stride()
    if features.variable_stride_per_key():
        names, bag_of_sample = features.inverse_indices()
        samples = dict(zip(names, bag_of_sample, strict=True))
        batch = bag_of_sample.shape[1]
    if batch == 0:
        return torch.ones((0, sum(dims)), device=features.device())
    bags = features.to_dict()
    ones = torch.ones(batch, device=features.device())
    columns = []
    for output in outputs:
        if not output.divided:
            columns.append(ones)
            continue
        size = _sizes(bags[output.feature], output.padding_idx, weighted)
        columns.append(size[samples[output.feature]] if samples else size)
    repeats: Any = torch.tensor(dims, device=features.device())
    return torch.stack(columns, dim=1).repeat_interleave(repeats, dim=1, output_size=sum(dims))


def _sizes(bags: JaggedTensor, padding_idx: int | None, weighted: bool) -> Tensor:
    """Return the number of ids of each bag, or the sum of their weights; 1 instead of 0."""
    lengths = bags.lengths().to(torch.int64)
    if padding_idx is None and not weighted:
        sizes = lengths.to(torch.float32)
    else:
        ids = bags.values()
        counts = bags.weights().to(torch.float32) if weighted else torch.ones_like(ids).float()
        if padding_idx is not None:
            counts = counts * (ids != padding_idx)
        sizes = torch.segment_reduce(counts, "sum", lengths=lengths, unsafe=True)
    return torch.where(sizes == 0, 1, sizes)


__all__ = ["PooledOutput", "mean_divisor", "pooled_outputs"]
