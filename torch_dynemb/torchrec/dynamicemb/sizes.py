"""DynamicEmb's sizes of a table: rows of a rank, and bytes of all rows and states."""

from __future__ import annotations

import math

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.torchrec.planning.fused_params import (
    DynamicEmbOptimType,
    OptimType,
    default_optimizer,
)

BUCKET_CAPACITY = 128
BUCKET_ALIGNMENT = 16
MAX_BUCKET_CAPACITY = 2**63 - 1  # a rank's part is one bucket


def row_values(dim: int, optimizer: OptimizerConfig) -> int:
    """Return how many values a row and its state have.

    Args:
        dim: of the row.
        optimizer: of the table.
    """
    return dim + sum(tensor.columns(dim) for tensor in optimizer.state)


def align_to_table_size(n: int, alignment: int = BUCKET_ALIGNMENT) -> int:
    """Return ``n`` rounded up to a multiple of ``alignment``, at least one of them.

    Args:
        n: rows.
        alignment: rows, at least 1.

    Raises:
        TypeError: an argument is not an int.
        ValueError: ``alignment`` is below 1.
    """
    owner = "align_to_table_size"
    rows = max(integer(f"{owner}: n", n), 1)
    step = integer(f"{owner}: alignment", alignment, least=1)
    return -(-rows // step) * step


def get_sharded_table_capacity(
    embedding_config: BaseEmbeddingConfig, world_size: int, bucket_capacity: int
) -> int:
    """Return the rows of a table that a rank of DynamicEmb has room for.

    Tables with DynamicEmbTableOptions have the same capacity here.

    Args:
        embedding_config: of the table; ranks share its num_embeddings.
        world_size: ranks.
        bucket_capacity: a rank's part is rounded up to a multiple of it. It is a multiple of
            BUCKET_ALIGNMENT, or MAX_BUCKET_CAPACITY, which rounds to BUCKET_ALIGNMENT.

    Raises:
        TypeError: ``embedding_config`` has another type, or a number is not an int.
        ValueError: a number is below 1, or ``bucket_capacity`` another number.

    Example:
        >>> from torchrec import EmbeddingConfig
        >>> from torch_dynemb.compat.dynamicemb import get_sharded_table_capacity
        >>> config = EmbeddingConfig(
        ...     name="users", embedding_dim=8, num_embeddings=1000, feature_names=["user"]
        ... )
        >>> get_sharded_table_capacity(config, world_size=2, bucket_capacity=128)
        512
    """
    owner = "get_sharded_table_capacity"
    if not isinstance(embedding_config, BaseEmbeddingConfig):
        raise TypeError(
            f"{owner}: embedding_config is {described(embedding_config)}, expected an "
            "EmbeddingConfig or EmbeddingBagConfig of TorchRec"
        )
    ranks = integer(f"{owner}: world_size", world_size, least=1)
    bucket = integer(f"{owner}: bucket_capacity", bucket_capacity, least=1)
    if bucket == MAX_BUCKET_CAPACITY:
        bucket = BUCKET_ALIGNMENT
    elif bucket % BUCKET_ALIGNMENT != 0:
        raise ValueError(
            f"{owner}: bucket_capacity is {bucket}, expected a multiple of BUCKET_ALIGNMENT, "
            f"{BUCKET_ALIGNMENT}, or MAX_BUCKET_CAPACITY"
        )
    return align_to_table_size(math.ceil(embedding_config.num_embeddings / ranks), bucket)


def get_table_value_bytes(
    embedding_config: BaseEmbeddingConfig,
    optimizer_type: OptimType,
    world_size: int,
    bucket_capacity: int = BUCKET_CAPACITY,
) -> int:
    """Return bytes of a table's rows and states for global_hbm_for_values; rounds as DynamicEmb.

    Args:
        embedding_config, world_size, bucket_capacity: as in :func:`get_sharded_table_capacity`.
        optimizer_type: of its sharder's fused_params.

    Raises:
        TypeError, ValueError: as :func:`get_sharded_table_capacity`.
        NotImplementedError: dynamic tables lack this optimizer.
    """
    rows = world_size * get_sharded_table_capacity(embedding_config, world_size, bucket_capacity)
    optimizer = default_optimizer("get_table_value_bytes", optimizer_type)
    values = row_values(embedding_config.embedding_dim, optimizer)
    return rows * values * int(data_type_to_dtype(embedding_config.data_type).itemsize)


def get_optimizer_state_dim(
    optimizer_type: OptimType, dim: int, dtype: torch.dtype | None = None
) -> int:
    """Return how many values of optimizer state DynamicEmb keeps beside a row.

    Args:
        optimizer_type: of its sharder's fused_params.
        dim: of the row.
        dtype: of the row. Only EXACT_ROWWISE_ADAGRAD needs it: DynamicEmb reserves 16 bytes for its
            one value.

    Raises:
        TypeError: ``dtype`` is missing, or an argument has another type.
        NotImplementedError: dynamic tables lack this optimizer.

    Example:
        >>> from torch_dynemb.compat.dynamicemb.optimizer import (
        ...     EmbOptimType, get_optimizer_state_dim,
        ... )
        >>> get_optimizer_state_dim(EmbOptimType.ADAM, 8)
        16
    """
    owner = "get_optimizer_state_dim"
    columns = integer(f"{owner}: dim", dim, least=1)
    optimizer = default_optimizer(owner, optimizer_type)
    if optimizer_type != EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        return row_values(columns, optimizer) - columns
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"{owner}: dtype is {described(dtype)}, expected the dtype of the rows, which "
            "EXACT_ROWWISE_ADAGRAD needs"
        )
    return 16 // dtype.itemsize


def convert_optimizer_type(optimizer: OptimType) -> OptimType:
    """Return the type itself, which :func:`get_optimizer_state_dim` takes.

    Programs for DynamicEmb of 2025 convert it for that function.

    Args:
        optimizer: of fused_params.

    Raises:
        TypeError: another type.
        NotImplementedError: dynamic tables lack this optimizer.
    """
    if not isinstance(optimizer, EmbOptimType | DynamicEmbOptimType):
        raise TypeError(
            f"convert_optimizer_type: optimizer is {described(optimizer)}, expected an EmbOptimType"
        )
    default_optimizer("convert_optimizer_type", optimizer)
    return optimizer


__all__ = [
    "BUCKET_ALIGNMENT",
    "BUCKET_CAPACITY",
    "MAX_BUCKET_CAPACITY",
    "align_to_table_size",
    "convert_optimizer_type",
    "get_optimizer_state_dim",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "row_values",
]
