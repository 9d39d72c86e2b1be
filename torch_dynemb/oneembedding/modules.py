"""OneEmbedding's modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torch_dynemb.argument_checks import integer, integers
from torch_dynemb.initializers import Initializer
from torch_dynemb.oneembedding.embedding import Embedding
from torch_dynemb.oneembedding.stores import StoreOptions
from torch_dynemb.oneembedding.tables import TableSpec
from torch_dynemb.optim import OptimizerConfig


class MultiTableEmbedding(Embedding):
    """Several tables with the same number of columns, each with its own ids.

    With a process group, each row lies on one rank. All ranks make the same calls, backward
    included. The gradient of an id is averaged over the ranks, as DistributedDataParallel averages
    those of parameters.

    Args:
        name: of the embedding. Together with ``seed`` it determines the initial rows; statistics
            use it to name tables.
        embedding_dim: columns of a row.
        dtype: of rows and of the output: float32, bfloat16 or float16.
        key_type: of ids: int64, int32, uint64 or uint32.
        tables: a list of :func:`make_table_options`; None: one table.
        store_options: where rows are stored, such as :func:`make_device_mem_store_options`.
        default_initializer: of rows if ``tables`` is None; default: normal(0, 0.05).
        padding_idx: an id that reads zeros in every table and is never trained.
        seed: of the initial rows, the same on all ranks.
        optimizer: config of the optimizer. Default: none until the embedding is given to an
            :class:`Optimizer` or ``set_optimizer`` is called.
        device: of the rows; default: torch's default device.
        pg: process group of the ranks that share the tables. Default: the default group, if it is
            initialized.

    Raises:
        TypeError, ValueError: a wrong value, or values that differ between ranks (all ranks raise).
        RuntimeError: the device does not support these store options.

    Example:
        >>> import tempfile, torch
        >>> from torch_dynemb import oneembedding
        >>> folder = tempfile.TemporaryDirectory()
        >>> tables = [
        ...     oneembedding.make_table_options(oneembedding.make_uniform_initializer(-s, s))
        ...     for s in (0.1, 0.05, 0.15)
        ... ]
        >>> embedding = oneembedding.MultiTableEmbedding(
        ...     "my_embedding", 4, torch.float32, torch.int64, tables,
        ...     oneembedding.make_device_mem_store_options(folder.name, capacity=1000),
        ... )
        >>> sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
        >>> optimizer = oneembedding.Optimizer(sgd, [embedding])
        >>> ids = torch.tensor([[7, 7, 9], [7, 8, 9]])
        >>> rows = embedding(ids)
        >>> rows.shape
        torch.Size([2, 3, 4])
        >>> rows.sum().backward()
        >>> optimizer.step()
        >>> embedding.sizes()
        {'my_embedding.0': 1, 'my_embedding.1': 2, 'my_embedding.2': 1}
        >>> embedding.save_snapshot("first")
        >>> folder.cleanup()
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[TableSpec] | None,
        store_options: StoreOptions,
        default_initializer: Initializer | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
        *,
        optimizer: OptimizerConfig | None = None,
        device: torch.device | str | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        dim = integer("MultiTableEmbedding: embedding_dim", embedding_dim, least=1)
        super().__init__(
            *(name, [dim], dtype, key_type, tables, store_options),
            *(default_initializer, padding_idx, seed),
            optimizer=optimizer,
            device=device,
            pg=pg,
        )


class MultiTableMultiColumnEmbedding(Embedding):
    """Tables with columns of several dims side by side; see :class:`MultiTableEmbedding`.

    Args:
        name: as for :class:`MultiTableEmbedding`.
        embedding_dim: a list of the numbers of columns, or one number. Each entry may have an
            initializer of its own, see :func:`make_column_options`.
        dtype, key_type, tables, store_options: as for :class:`MultiTableEmbedding`.
        default_initializer, padding_idx, seed: as for :class:`MultiTableEmbedding`.
        optimizer, device, pg: as for :class:`MultiTableEmbedding`.

    Raises:
        TypeError, ValueError, RuntimeError: as for :class:`MultiTableEmbedding`.
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int | Sequence[int],
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[TableSpec] | None,
        store_options: StoreOptions,
        default_initializer: Initializer | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
        *,
        optimizer: OptimizerConfig | None = None,
        device: torch.device | str | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        owner = "MultiTableMultiColumnEmbedding: embedding_dim"
        if isinstance(embedding_dim, list | tuple):
            dims = integers(owner, embedding_dim, least=1)
            if not dims:
                raise ValueError(f"{owner} is empty, expected at least one number of columns")
        else:
            dims = [integer(owner, embedding_dim, least=1)]
        super().__init__(
            *(name, dims, dtype, key_type, tables, store_options),
            *(default_initializer, padding_idx, seed),
            optimizer=optimizer,
            device=device,
            pg=pg,
        )


__all__ = ["MultiTableEmbedding", "MultiTableMultiColumnEmbedding"]
