"""``nn.Embedding`` without a vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer, tensor
from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.distributed.seed import drawn_seed
from torch_dynemb.keyword_options import options_for
from torch_dynemb.nn.forwards import rows_in_shape
from torch_dynemb.nn.inputs import are_ready, flat_ids, flat_scores
from torch_dynemb.nn.options import ModuleOptions, RowOptions, SingleTableOptions
from torch_dynemb.nn.shared_rows import are_own, ranks_of_option
from torch_dynemb.nn.static_arguments import ARGUMENTS, ClassAttribute, advises
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.policy.policy import Policy
from torch_dynemb.table.config import TableConfig

# Of a table without a name of its own: the path of its module names it.
UNNAMED = "embedding"


class SingleTable(TableModule):
    """One table: what :class:`DynamicEmbedding` and :class:`DynamicEmbeddingBag` share."""

    def __init__(self, embedding_dim: int, **options: Unpack[SingleTableOptions]) -> None:
        rows = options_for(RowOptions, options)
        seed = None
        if rows["name"] is None:
            ranks = ranks_of_option(type(self).__name__, options["process_group"])
            rows["name"], seed = UNNAMED, drawn_seed(process_group_of(ranks))
        if rows["policy"] is None:
            rows["policy"] = Policy()
        table = TableConfig(embedding_dim=embedding_dim, **rows)  # type: ignore[arg-type]  # None
        super().__init__([table], seed=seed, **options_for(ModuleOptions, options))

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
        """Return all ids, int64 [n], in the order of the index."""
        batches = [batch.ids for batch in self._group.export(0)]
        if not batches:
            return torch.empty(0, dtype=torch.int64, device=self._group.device)
        return torch.cat(batches)

    def _fill(self, static: StaticRows) -> None:
        """Insert rows of a static table, from whichever device."""
        device, padding_idx = self._group.device, self.padding_idx
        ids, weight = static.ids.to(device), static.weight.detach().to(device)
        if padding_idx is not None:
            ids, weight = ids[ids != padding_idx], weight[ids != padding_idx]
        if self._ranks is not None:
            owned = are_own(ids, self._ranks)
            ids, weight = ids[owned], weight[owned]
        self._group.reserve(0, ids.numel())
        self._group.insert_or_assign(0, ids, weight)

    def _scores_of(self, scores: Tensor, input: Tensor) -> Tensor:
        """Check the custom scores of the ids of a lookup; return them as a vector."""
        owner = type(self).__name__
        if process_group_of(self._ranks) is not None:
            self._fail_lookup(
                ValueError(
                    f"{owner}: scores are given, but lookups of a table with process_group do not "
                    "send them to other ranks: leave scores out"
                )
            )
        return flat_scores(owner, scores, input, self.table.policy.combine)

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
        padding_idx: an id without a row here, or None.
    """

    weight: Tensor
    ids: Tensor
    padding_idx: int | None

    def options(self, given: SingleTableOptions) -> SingleTableOptions:
        """Return the options of a table that starts with these rows, on their device by default."""
        device = self.weight.device if given["device"] is None else given["device"]
        return {**given, "padding_idx": self.padding_idx, "device": device}


def checked_static_rows(
    owner: str,
    given: Tensor | nn.Embedding | nn.EmbeddingBag,
    ids: Tensor | None,
    padding_idx: int | None,
) -> StaticRows:
    """Read what a dynamic table takes over of a static one.

    Args:
        owner: what errors begin with.
        given: a module, or its weight, float [n, dim].
        ids: int64 or int32 [n]; None: 0 to n - 1.
        padding_idx: None: that of a module, if ``ids`` is None.

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
        **options: those of :class:`torch_dynemb.SingleTableOptions`.

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
    def __init__(self, embedding_dim: int, **options: Unpack[SingleTableOptions]) -> None:
        super().__init__(embedding_dim, **options)

    def forward(self, input: Tensor, *, scores: Tensor | None = None) -> Tensor:
        """Look up ids.

        Args:
            input: int64 or int32, any shape.
            scores: int64 of the shape of input; custom scores of the ids, for a table that keeps
                them; of several for one id the largest counts. Reads do not use them.

        Returns:
            ``output_dtype``, ``input.shape + (embedding_dim,)``.

        Raises:
            TypeError: input is not of integers, or scores are not int64.
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
            trained = self._train_rows(input)
            if trained is not None:
                return trained
        rows = self._lookup(
            self._requested(self._batch_of, input),
            scores=None if scores is None else self._scores_of(scores, input),
        )
        return rows_in_shape(rows, input, self.embedding_dim)

    def prefetch(self, input: Tensor, *, ahead: int = 1) -> None:
        """Begin to bring rows into memory that a forward will want, and return at once.

        Does nothing for a table without ``storage``. Nothing is inserted: ids that are new then
        need nothing from the disk. A prefetch without its forward costs its reads only.

        On a GPU it runs on a stream of its own, which waits for the work so far. The next lookup
        waits for it: call it between the forward and the backward. In the capture of a graph it
        runs on the current stream.

        Args:
            input: int64 or int32, any shape; what :meth:`forward` will be given.
            ahead: in how many training steps, at least 1: 1 for the batch after that of the
                last forward.

        Raises:
            TypeError, ValueError: ``input`` holds no integers, or ``ahead`` is less than 1.
            RuntimeError: the storage has failed, or this process is a fork of the one that made
                the table.
        """
        self._prefetch(self._batch_of(input), ahead)

    def _batch_of(self, input: Tensor) -> LookupBatch:
        """Ask for a row for each id."""
        ids = flat_ids("DynamicEmbedding", input)
        one_bag = self._group.tables.one_bag
        # for few ids LookupBatch.of_rows() would take a measurable part of the call
        return LookupBatch(ids, one_bag, None, [0], [self.embedding_dim], Pooling.NONE)

    @classmethod
    @advises("weight", "ids")
    def from_embedding(
        cls,
        weight: Tensor | nn.Embedding,
        ids: Tensor | None = None,
        **options: Unpack[SingleTableOptions],
    ) -> DynamicEmbedding:
        """Make a dynamic table that starts with the rows of a static one, on its device.

        Args:
            weight: an ``nn.Embedding``, or a weight, float [n, dim]; rounded to ``dtype``.
            ids: int64 or int32 [n], distinct; default: 0 to n - 1.
            padding_idx: as in :class:`DynamicEmbedding`; its row is left out. Default: that of an
                ``nn.Embedding``, if ``ids`` is not given.
            policy: as in :class:`DynamicEmbedding`; admission does not apply to ``ids``.
            device: of the rows; default: that of ``weight``.
            **options: those of :class:`torch_dynemb.SingleTableOptions`.

        Raises:
            TypeError: ``weight`` is not a dense tensor of floats, ``ids`` are not integers, or
                another argument has a wrong type.
            ValueError: ``weight`` has another number of dimensions, or is a module with
                ``max_norm`` or ``scale_grad_by_freq``; ``ids`` has another shape than [n], or an id
                twice; or another argument is wrong.
            RuntimeError: tables cannot lie on the device of ``weight``, the policy leaves no room
                for all ids, or memory is short.
        """
        static = checked_static_rows("from_embedding", weight, ids, options["padding_idx"])
        module = cls(static.weight.shape[1], **static.options(options))
        module._fill(static)
        return module

    def to_embedding(self) -> tuple[torch.nn.Embedding, Tensor]:
        """Make a static table of the rows, and return ids int64 [n]: row i is of ids[i]."""
        ids, rows = self._exported()
        return torch.nn.Embedding.from_pretrained(rows, freeze=False), ids
