"""``nn.Embedding`` without a vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer, tensor
from torch_dynemb.distributed.seed import drawn_seed
from torch_dynemb.initializers import Initializer
from torch_dynemb.nn.forwards import rows_in_shape
from torch_dynemb.nn.inputs import are_ready, flat_ids, flat_scores
from torch_dynemb.nn.static_arguments import ARGUMENTS, ClassAttribute, advises
from torch_dynemb.nn.table_module import ModuleOptions, TableModule
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.policy.policy import Policy
from torch_dynemb.storage.tiers import Storage
from torch_dynemb.table.config import EvalDefault, TableConfig

# Of a table without a name of its own: the path of its module tells it from others.
UNNAMED = "embedding"


class SingleTable(TableModule):
    """One table: what :class:`DynamicEmbedding` and :class:`DynamicEmbeddingBag` share."""

    def __init__(
        self,
        embedding_dim: int,
        *,
        name: str | None,
        padding_idx: int | None,
        initializer: Initializer | None,
        eval_default: EvalDefault,
        dtype: torch.dtype,
        policy: Policy | None,
        storage: Storage | None,
        **options: Unpack[ModuleOptions],
    ) -> None:
        table = TableConfig(
            name=UNNAMED if name is None else name,
            embedding_dim=embedding_dim,
            initializer=initializer,  # type: ignore[arg-type]  # None: by its dim
            padding_idx=padding_idx,
            eval_default=eval_default,
            policy=Policy() if policy is None else policy,
            dtype=dtype,
            storage=storage,
        )
        super().__init__([table], seed=drawn_seed() if name is None else None, **options)

    from_pretrained = ClassAttribute()

    @property
    def table(self) -> TableConfig:
        """The table's config."""
        return self._group.config.tables[0]

    @property
    def embedding_dim(self) -> int:
        """Columns of a row."""
        return self.table.embedding_dim

    @property
    def padding_idx(self) -> int | None:
        """The id that is looked up as zeros."""
        return self.table.padding_idx

    def __len__(self) -> int:
        return self._group.size(0)

    def __bool__(self) -> bool:
        return True  # an empty table is still a module

    def __contains__(self, id: int) -> bool:
        known = integer(f"{type(self).__name__}.__contains__: id", id)
        ids = torch.tensor([known], dtype=torch.int64, device=self._group.device)
        return bool(self._group.contains(0, ids))

    def ids(self) -> Tensor:
        """All ids, int64 [n], in the order of the index."""
        batches = [batch.ids for batch in self._group.export(0)]
        if not batches:
            return torch.empty(0, dtype=torch.int64, device=self._group.device)
        return torch.cat(batches)

    def _fill(self, weight: Tensor, ids: Tensor) -> None:
        self._group.reserve(0, ids.numel())
        self._group.insert_or_assign(0, ids, weight)

    def _exported(self) -> tuple[Tensor, Tensor]:
        batches = list(self._group.export(0))
        if not batches:
            device = self._group.device
            ids = torch.empty(0, dtype=torch.int64, device=device)
            return ids, torch.empty(0, self.embedding_dim, device=device)
        return torch.cat([b.ids for b in batches]), torch.cat([b.rows for b in batches])


class StaticRows(NamedTuple):
    """Rows of a static table.

    Attributes:
        weight: float [n, dim].
        ids: int64 [n], of the rows.
        padding_idx: an id whose row is left out, or None.
    """

    weight: Tensor
    ids: Tensor
    padding_idx: int | None


def static_rows(
    owner: str,
    given: Tensor | nn.Embedding | nn.EmbeddingBag,
    ids: Tensor | None,
    padding_idx: int | None,
) -> StaticRows:
    """What a dynamic table takes over of a static one.

    Args:
        owner: what errors begin with.
        given: a module, or its weight, float [n, dim].
        ids: int64 or int32 [n]; None: 0 to n - 1.
        padding_idx: None: that of a module whose rows have no other ids.

    Raises:
        TypeError: ``given`` is neither, or ``ids`` holds no integers.
        ValueError: shapes do not match, or a module has options that dynamic tables lack.
    """
    if isinstance(given, nn.Embedding | nn.EmbeddingBag):
        for option in ("max_norm", "scale_grad_by_freq"):
            value = getattr(given, option)
            if value is not None and value is not False:
                raise ValueError(
                    f"{owner}: weight is a module with {option} = {value}, which dynamic tables "
                    f"lack: {ARGUMENTS[option]}; give the module's weight to go on without"
                )
        if padding_idx is None and ids is None:
            padding_idx = given.padding_idx
        given = given.weight
    weight = tensor(f"{owner}: weight", given, "a Tensor or an nn.Embedding")
    if not weight.is_floating_point():
        raise TypeError(f"{owner}: weight has dtype {weight.dtype}, expected floats")
    if weight.dim() != 2:
        raise ValueError(f"{owner}: weight has shape {tuple(weight.shape)}, expected (n, dim)")
    if ids is None:
        return StaticRows(weight, torch.arange(weight.shape[0], device=weight.device), padding_idx)
    if tuple(tensor(f"{owner}: ids", ids).shape) != (weight.shape[0],):
        raise ValueError(
            f"{owner}: ids has shape {tuple(ids.shape)}, expected ({weight.shape[0]},), one id per "
            "row of weight"
        )
    return StaticRows(weight, flat_ids(f"{owner}: ids", ids), padding_idx)


class DynamicEmbedding(SingleTable):
    """A vector for every id: ``nn.Embedding`` without ``num_embeddings``.

    In training mode with grad enabled, an id that has not been seen gets a row, and backward
    updates the rows with the module's optimizer. Otherwise lookups only read.

    Args:
        embedding_dim: columns of a row, at least 1.
        name: names the table in state dicts and seeds its initial values, together with
            ``torch.initial_seed()``. Default: state dicts call it ``"embedding"``, and the seed of
            its initial values is drawn from torch's generator, as nn.Embedding draws its weight.
        padding_idx: an id that is looked up as zeros, never inserted and never trained.
        initializer: of new rows; default: uniform within 1 / sqrt(embedding_dim) of 0. The
            normal(0, 1) of nn.Embedding learns less from few sights of an id
            (``python -m tutorials.initial_rows``). By ``eval_default``, an id that was never
            trained reads such values, too.
        optimizer: config of the rows' optimizer, such as ``Adam(lr=1e-3)``; None only where
            ``trainable`` is False.
        trainable: False: insert nothing, train nothing.
        eval_default: what a read gives for an id that is not there: ``"initial"``, ``"zeros"``, a
            float tensor [embedding_dim] or an initializer.
        dtype: of the rows: float32, bfloat16 or float16; arithmetic is float32.
        output_dtype: of what a lookup returns: float32, bfloat16 or float16.
        split: backward only gathers gradients, and ``module.optimizer.step()`` applies them: for
            gradient accumulation, clipping by one norm, ``GradScaler``, and for several lookups in
            one forward.
        device: of the rows; default: torch's default device.
        policy: how ids come and go: scores, capacity and eviction, admission, ttl; default: every
            id gets a row and keeps it.
        max_rows: rows to reserve; default: the capacity, or what would fill the machine's memory.
        memory_budget: bytes that the table may take, such as ``"4GB"``, instead of a capacity.
        storage: where rows lie that are not in memory, such as :class:`torch_dynemb.SSDStore`;
            default: all rows are in memory.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of its range, arguments contradict each other, or a trainable
            module has no optimizer.
        RuntimeError: tables cannot lie on the device, or too little memory, or addresses.

    Example:
        >>> import torch, torch_dynemb as td
        >>> users = td.DynamicEmbedding(8, name="users", optimizer=td.SGD(lr=0.1))
        >>> users(torch.tensor([[7, -1], [2**62, 7]])).shape
        torch.Size([2, 2, 8])
        >>> len(users), 7 in users, 8 in users
        (3, True, False)
    """

    @advises("embedding_dim")
    def __init__(
        self,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        name: str | None = None,
        initializer: Initializer | None = None,
        optimizer: OptimizerConfig | None = None,
        trainable: bool = True,
        eval_default: EvalDefault = "initial",
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        split: bool = False,
        device: torch.device | str | None = None,
        policy: Policy | None = None,
        max_rows: int | None = None,
        memory_budget: int | str | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(
            embedding_dim,
            name=name,
            padding_idx=padding_idx,
            initializer=initializer,
            optimizer=optimizer,
            trainable=trainable,
            eval_default=eval_default,
            dtype=dtype,
            output_dtype=output_dtype,
            split=split,
            device=device,
            policy=policy,
            max_rows=max_rows,
            memory_budget=memory_budget,
            storage=storage,
        )

    def forward(self, input: Tensor, *, scores: Tensor | None = None) -> Tensor:
        """Looks up ids.

        Args:
            input: int64 or int32, any shape.
            scores: int64 of the shape of input; custom scores of the ids, for a table that keeps
                them; of several for one id the largest counts. Reads do not use them.

        Returns:
            ``output_dtype``, ``input.shape + (embedding_dim,)``.

        Raises:
            TypeError: input holds no integers, or scores are no int64.
            ValueError: scores have another shape or device than input, or the table keeps custom
                scores and has got none, or keeps none and has got some.
            NoRoomError: the table is full, or memory is short. No id has been inserted then.
            ForkedProcessError: in training, this process is a fork of the one that made the table.
            ReplicatedTableError: in training, each rank would train its own copy of the table.
        """
        if scores is None and are_ready(input):
            tables = self._tables_to_read()
            if tables is not None:  # nothing but the op: for few ids, more would take longer
                return self._as_output(
                    ops.find_and_read_rows(tables.index, tables.rows, input, tables.one_bag)
                )
        rows = self._lookup(
            self._batch(flat_ids("DynamicEmbedding", input)),
            scores=None if scores is None else flat_scores("DynamicEmbedding", scores, input),
        )
        return rows_in_shape(rows, input, self.embedding_dim)

    def prefetch(self, input: Tensor, *, ahead: int = 1) -> None:
        """Begins to bring rows into memory that a forward will want, and returns at once.

        Does nothing for a table without ``storage``. Nothing is inserted: ids that are new then
        need nothing from the disk. A prefetch whose forward never comes costs its reads only.

        Args:
            input: int64 or int32, any shape; what :meth:`forward` will be given.
            ahead: in how many training steps, at least 1: 1 for the batch after the one whose
                forward ran last.

        Raises:
            TypeError, ValueError: ``input`` holds no integers, or ``ahead`` is less than 1.
            RuntimeError: the storage has failed, or this process is a fork of the one that made
                the table.
        """
        self._prefetch(self._batch(flat_ids("DynamicEmbedding", input)), ahead)

    def _batch(self, ids: Tensor) -> LookupBatch:
        """Ask for a row for each id, int64 [n]."""
        one_bag = self._group.tables.one_bag
        # for few ids LookupBatch.of_rows() would take a measurable part of the call
        return LookupBatch(ids, one_bag, None, [0], [self.embedding_dim], Pooling.NONE)

    @classmethod
    @advises("weight", "ids")
    def from_embedding(
        cls,
        weight: Tensor | nn.Embedding,
        ids: Tensor | None = None,
        *,
        padding_idx: int | None = None,
        name: str | None = None,
        initializer: Initializer | None = None,
        optimizer: OptimizerConfig | None = None,
        trainable: bool = True,
        eval_default: EvalDefault = "initial",
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        split: bool = False,
        policy: Policy | None = None,
        memory_budget: int | str | None = None,
    ) -> DynamicEmbedding:
        """A dynamic table that starts with the rows of a static one, on its device.

        Args:
            weight: an ``nn.Embedding``, or a weight, float [n, dim]; rounded to ``dtype``.
            ids: int64 or int32 [n], distinct; default: 0 to n - 1.
            padding_idx: as in :class:`DynamicEmbedding`; its row is left out. Default: that of an
                ``nn.Embedding``, if ``ids`` is not given.
            name, initializer, optimizer, trainable, eval_default, dtype, output_dtype: as in
                :class:`DynamicEmbedding`.
            split, memory_budget: as in :class:`DynamicEmbedding`.
            policy: as in :class:`DynamicEmbedding`; admission does not apply to ``ids``.

        Raises:
            TypeError: ``weight`` is no dense tensor of floats, ``ids`` holds no integers, or
                another argument has a wrong type.
            ValueError: ``weight`` has another number of dimensions, or is a module with
                ``max_norm`` or ``scale_grad_by_freq``; ``ids`` has another shape than [n], or an id
                twice; or another argument is wrong.
            RuntimeError: tables cannot lie on the device of ``weight``, the policy leaves no room
                for all ids, or memory is short.
        """
        weight, ids, padding_idx = static_rows("from_embedding", weight, ids, padding_idx)
        module = cls(
            weight.shape[1],
            padding_idx=padding_idx,
            name=name,
            initializer=initializer,
            optimizer=optimizer,
            trainable=trainable,
            eval_default=eval_default,
            dtype=dtype,
            output_dtype=output_dtype,
            split=split,
            policy=policy,
            memory_budget=memory_budget,
            device=weight.device,
        )
        keep = ids != padding_idx if padding_idx is not None else torch.ones_like(ids).bool()
        module._fill(weight.detach()[keep], ids[keep])
        return module

    def to_embedding(self) -> tuple[torch.nn.Embedding, Tensor]:
        """A static table with the rows of this one, and its ids int64 [n]: row i is of ids[i]."""
        ids, rows = self._exported()
        return torch.nn.Embedding.from_pretrained(rows, freeze=False), ids
