"""Base of OneEmbedding's modules: several tables with the same columns, shared by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, integer, text
from torch_dynemb.checkpoint import LoadReport
from torch_dynemb.distributed.agreement import Described, Option, check_agreement, comparable
from torch_dynemb.distributed.owners import share_of, slots_of
from torch_dynemb.distributed.ranks import RankGroup, process_group_of, rank_group
from torch_dynemb.initializers import Initializer
from torch_dynemb.nn.id_exchange import IdExchange, fail_exchange
from torch_dynemb.nn.optimized_later import OptimizedLater
from torch_dynemb.oneembedding.ids_by_table import IdsByTable, keys_by_table
from torch_dynemb.oneembedding.initializers import DEFAULT_INITIALIZER
from torch_dynemb.oneembedding.keys import id_of, key_type_of
from torch_dynemb.oneembedding.snapshots import load_embedding, save_embedding
from torch_dynemb.oneembedding.stores import StoreOptions
from torch_dynemb.oneembedding.tables import TableSpec
from torch_dynemb.ops import LookupBatch
from torch_dynemb.optim import FusedOptimizer, OptimizerConfig
from torch_dynemb.policy import Policy
from torch_dynemb.storage.device import device_of
from torch_dynemb.table import TableConfig
from torch_dynemb.table.config import ROW_DTYPES

_SLOTS = 65536  # number of hash slots that ids are distributed to; each rank owns a range


class Embedding(OptimizedLater):
    """Base of :class:`MultiTableEmbedding` and :class:`MultiTableMultiColumnEmbedding`."""

    grad_reduce_by = "worker"
    how_to_optimize = (
        "wrap the optimizer of its parameters, oneembedding.Optimizer(optimizer, [embedding]), or "
        "call embedding.set_optimizer(torch_dynemb.Adam(lr=1e-3))"
    )

    def __init__(
        self,
        name: str,
        dims: Sequence[int],
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[TableSpec] | None,
        store_options: StoreOptions,
        default_initializer: Initializer | None,
        padding_idx: int | None,
        seed: int,
        *,
        optimizer: OptimizerConfig | None,
        device: torch.device | str | None,
        pg: dist.ProcessGroup | None,
    ) -> None:
        owner = type(self).__name__
        text(f"{owner}: name", name)
        if dtype not in ROW_DTYPES:
            raise TypeError(f"{owner}: dtype is {described(dtype)}, expected one of {ROW_DTYPES}")
        key_type_of(f"{owner}: key_type", key_type)
        options = _table_options(owner, tables, default_initializer)
        if not isinstance(store_options, StoreOptions):
            raise TypeError(
                f"{owner}: store_options is {described(store_options)}, expected one such as "
                "make_device_mem_store_options(path, capacity)"
            )
        padding = None
        if padding_idx is not None:
            padding = id_of(f"{owner}: padding_idx", padding_idx, key_type)
        seed = integer(f"{owner}: seed", seed, least=0, most=(1 << 64) - 1)
        on = torch.get_default_device() if device is None else device_of(owner, device)
        ranks = rank_group(pg)
        size = 1 if ranks is None else ranks.size
        store_options.check_ranks(owner, size)
        storage = store_options.storage(0 if ranks is None else ranks.rank, size, on)
        configs = []
        for t, table in enumerate(options):
            capacity = table.capacity or store_options.capacity
            configs.append(
                TableConfig(
                    name=f"{name}.{t}",
                    embedding_dim=sum(dims),
                    initializer=table.initializer(f"{owner}: tables[{t}]", dims),
                    padding_idx=padding,
                    policy=Policy(capacity=None if capacity is None else share_of(capacity, size)),
                    dtype=dtype,
                )
            )
        alike = _alike(dims, dtype, key_type, options, store_options, padding, seed)
        check_agreement(owner, alike, process_group_of(ranks))
        super().__init__(
            name, configs, trainable=True, device=on, max_rows=None, seed=seed, storage=storage
        )
        self.dtype, self.key_type = dtype, key_type
        self.embedding_dim, self.column_dims = sum(dims), list(dims)
        self.num_tables = len(options)
        self.padding_idx, self.seed = padding_idx, seed
        self.store_options = store_options
        self.storage_dim = store_options.stored_dim(self.embedding_dim)
        self.rank_id, self.world_size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self.rank_group = ranks
        if optimizer is not None:
            self.set_optimizer(optimizer)

    # -- lookup ----------------------------------------------------------------------------------

    def forward(self, ids: Tensor, table_ids: Tensor | None = None) -> Tensor:
        """Look up rows of ids; in training a new id gets a row.

        With several ranks, every rank must call it, also without ids.

        Args:
            ids: of the embedding's key type. Shape (batch, tables): column t has the ids of table
                t. Any shape if ``table_ids`` is given or if there is one table.
            table_ids: integers of the shape of ``ids``: the table number of each id.

        Returns:
            Rows of the embedding's dtype, of shape ``ids.shape`` + (sum of the dims,).

        Raises:
            TypeError: a dtype does not match.
            ValueError: shapes do not match, or the table does not exist.
            RuntimeError: the embedding has no optimizer, and either gradients of an earlier lookup
                are pending or its rows are on SSD.
        """
        given, exchange = self._sent(type(self).__name__, "lookup", ids, table_ids)
        if exchange is None:
            rows = self.lookup(given.batch(self.embedding_dim))
        else:
            distinct = exchange.rows(lambda received: self.lookup(received.batch))
            each = torch.arange(given.ids.shape[0] + 1, device=given.ids.device)
            rows = ops.pool_rows(distinct, exchange.inverse, each, features=1)
        return given.in_order(rows, ids.shape).to(self.dtype)

    def prefetch(self, ids: Tensor, table_ids: Tensor | None = None) -> None:
        """Start bringing the rows of a later forward into memory, and return at once.

        Call it between one forward and the next. Rows in memory are skipped, and no id is inserted.
        With several ranks, every rank must call it; it waits for the ids of the others.

        Args:
            ids, table_ids: as in the later :meth:`forward`, of the same shapes.

        Raises:
            TypeError, ValueError: as :meth:`forward`.
            RuntimeError: the store has failed, the embedding has no optimizer yet, or this process
                is a fork of the one that created the tables.
        """
        owner = f"{type(self).__name__}.prefetch"
        given, exchange = self._sent(owner, "prefetch", ids, table_ids)
        if exchange is None:
            self.prefetch_lookup(given.batch(self.embedding_dim))
        else:
            exchange.prefetch()

    def _sent(
        self, owner: str, call: str, ids: Tensor, table_ids: Tensor | None
    ) -> tuple[IdsByTable, IdExchange | None]:
        """Send ids to the ranks that own them; if the ids of one rank are wrong, all ranks raise.

        Args:
            owner: prefix of errors.
            call: ``"lookup"`` or ``"prefetch"``.
            ids, table_ids: of :meth:`forward`.

        Returns:
            The ids, and their exchange; None if this process owns all.
        """
        several = process_group_of(self.rank_group) is not None
        trains = call == "lookup"
        try:
            given = keys_by_table(owner, ids, table_ids, self.key_type, self.num_tables)
            if trains:
                self._check_optimized()
        except Exception as error:
            if not several or torch.compiler.is_compiling():
                raise
            assert self.rank_group is not None
            fail_exchange(self.group.device, self.rank_group, error)
        if not several:
            return given, None
        assert self.rank_group is not None
        children = list(range(self.num_tables))
        exchange = IdExchange(
            self, given.ids, given.offsets, children, self.rank_group, call=call, trains=trains
        )
        return given, exchange

    def lookup(
        self,
        batch: LookupBatch,
        *,
        reads_only: bool = False,
        trains: bool = True,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Look up rows of ids that this rank owns, in one call for all tables.

        Args:
            batch: one row for each id, ordered by table.
            reads_only: if True, new ids get no row.
            trains: if False, look up as in evaluation.
            counts: int64 [n], how often each id occurs; default: once.

        Returns:
            float32 [n, columns].
        """
        self._check_stored("lookup")
        return self._lookup(batch, counts=counts, inserts=not reads_only, trains=trains)

    @property
    def id_slots(self) -> int:
        """Number of hash slots that ids are distributed to."""
        return _SLOTS

    @property
    def own_slots(self) -> range:
        """Hash slots owned by this rank."""
        return slots_of(self.rank_id, self.world_size, _SLOTS)

    @property
    def counts_occurrences(self) -> bool:
        """Whether lookups need the number of occurrences of each id: always False."""
        return False

    def _check_stored(self, call: str) -> None:
        if self._storage_to_come is not None:
            raise RuntimeError(
                f"{type(self).__name__} {self.name!r}.{call}: rows beneath a cache are stored "
                "with the state of their optimizer, which is not set yet: "
                f"{self.how_to_optimize} first"
            )

    def _check_optimized(self) -> None:
        if self._has_optimizer or self._optimizer is None or not self.learns():
            return
        if torch.compiler.is_compiling() or self._group.device.type != "cpu":
            return  # checking would wait for the GPU
        if self._optimizer.updates_since_step() > 0:
            raise RuntimeError(
                f"{type(self).__name__} {self.name!r}: gradients are pending, but no optimizer "
                f"will apply them: {self.how_to_optimize}"
            )

    # -- optimizer -------------------------------------------------------------------------------

    @property
    def _sharing_ranks(self) -> RankGroup | None:
        """The ranks that share the rows; None: they are of this process alone."""
        return self.rank_group

    def _is_shared(self) -> bool:
        return self.rank_group is not None

    def check_optimizer(self, config: OptimizerConfig) -> None:
        """Check that the store options leave enough room for the optimizer state of a row.

        Args:
            config: of the optimizer.

        Raises:
            ValueError: ``size_factor`` or ``storage_dim`` is too small.
        """
        dim = self.embedding_dim
        state = sum(
            tensor.columns(dim) if tensor.dtype != torch.uint8 else -(-tensor.row_bytes(dim) // 4)
            for tensor in config.state
        )
        owner = f"{type(self).__name__} {self.name!r}"
        self.store_options.check_state(owner, dim, config.name, dim + state)

    def set_optimizer(self, config: OptimizerConfig) -> FusedOptimizer:
        """Set the optimizer of the rows; pending gradients stay.

        Args:
            config: such as ``torch_dynemb.Adam(lr=1e-3)``.

        Returns:
            The new ``optimizer``. Using the old one raises an error.

        Raises:
            TypeError: ``config`` is not an optimizer config.
            ValueError: the store options leave too little room for the optimizer state.
        """
        if isinstance(config, OptimizerConfig):
            self.check_optimizer(config)
        return super().set_optimizer(config)

    # -- snapshots and state ---------------------------------------------------------------------

    def save_snapshot(self, snapshot_name: str) -> None:
        """Save rows, optimizer state and clocks as ``<persistent_path>/snapshots/<name>``.

        The snapshot is a checkpoint (:func:`torch_dynemb.checkpoint.save`) of all ranks, with
        checksums.
        All ranks call this together between two steps. A failed save leaves no partial snapshot.

        Args:
            snapshot_name: name of a folder. An existing snapshot of this name is replaced.

        Raises:
            TypeError, ValueError: ``snapshot_name`` is not a valid folder name.
            RuntimeError: gradients are pending.
            OSError: the disk is full or fails.
        """
        save_embedding(self, self.store_options.root(), snapshot_name)

    def load_snapshot(self, snapshot_name: str, *, optimizer_state: bool = True) -> LoadReport:
        """Replace the rows by those of a snapshot; all ranks call it together.

        The number of ranks may differ from that of the save. If the snapshot has optimizer state,
        set
        the optimizer of the embedding first.

        Args:
            snapshot_name: a snapshot below the ``persistent_path``.
            optimizer_state: if False, optimizer state starts anew.

        Returns:
            What was loaded.

        Raises:
            TypeError, ValueError: ``snapshot_name`` is not a valid folder name, or the snapshot
                does
                not fit.
            FileNotFoundError: the snapshot does not exist.
            RuntimeError: rows are on SSD, and the embedding has no optimizer yet.
        """
        self._check_stored("load_snapshot")
        return load_embedding(
            self, self.store_options.root(), snapshot_name, optimizer_state=optimizer_state
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Embedding:
        probe = fn(torch.zeros(1, device=self._group.device))
        owner = f"{type(self).__name__}.to()"
        self.store_options.check_move(owner, self._group.device, probe.device)
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        config = self._group.config.optimizer if self._has_optimizer else None
        return f"{self.name!r}, {self._group.sizes()}, dims={self.column_dims}, optimizer={config}"


def _table_options(
    owner: str, tables: object, default_initializer: Initializer | None
) -> list[TableSpec]:
    if default_initializer is not None and not isinstance(default_initializer, Initializer):
        raise TypeError(
            f"{owner}: default_initializer is {described(default_initializer)}, expected one such "
            "as make_normal_initializer(0, 0.05)"
        )
    if tables is None:
        return [TableSpec(default_initializer or DEFAULT_INITIALIZER)]
    if not isinstance(tables, list | tuple) or not tables:
        raise TypeError(
            f"{owner}: tables is {described(tables)}, expected None, or a list of "
            "make_table_options(...)"
        )
    for t, table in enumerate(tables):
        if not isinstance(table, TableSpec):
            raise TypeError(
                f"{owner}: tables[{t}] is {described(table)}, expected make_table_options(...)"
            )
    return list(tables)


def _alike(*values: Any) -> Described:
    """Collect the values that all ranks must agree on."""
    names = ("dims", "dtype", "key_type", "tables", "store_options", "padding_idx", "seed")
    return {Option("", name): comparable(value) for name, value in zip(names, values, strict=True)}


__all__ = ["Embedding"]
