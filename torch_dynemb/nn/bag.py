"""``nn.EmbeddingBag`` without a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torch_dynemb import ops
from torch_dynemb.nn.embedding import SingleTable, checked_static_rows
from torch_dynemb.nn.features import any_batch
from torch_dynemb.nn.inputs import (
    are_ready,
    as_ops_take_them,
    flat_weights,
    integer_ids,
    integer_offsets,
    pooling_of,
)
from torch_dynemb.nn.options import SingleTableOptions
from torch_dynemb.nn.static_arguments import advises
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.tensors import LookupBatch


def bag_batch(
    input: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    *,
    include_last_offset: bool,
    dim: int,
    pooling: Pooling,
) -> LookupBatch:
    """Check the arguments of a bag's forward and bring them into the form of the ops.

    Args:
        input, offsets, per_sample_weights: of :meth:`DynamicEmbeddingBag.forward`.
        include_last_offset: whether ``offsets`` has the number of ids at its end.
        dim: of the table.
        pooling: how the rows of a bag become one.

    Raises:
        TypeError, ValueError: dtypes or shapes do not match.
    """
    ids = integer_ids("DynamicEmbeddingBag", input)
    if per_sample_weights is not None:
        per_sample_weights = flat_weights(
            "DynamicEmbeddingBag: per_sample_weights", per_sample_weights, input.shape
        )
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError(
                "DynamicEmbeddingBag: offsets was given with a 2-D input, and its rows are the "
                "bags: leave it out"
            )
        ids, offsets = ops.ids_concat([ids], bags=input.shape[0])
        return LookupBatch(ids, offsets, per_sample_weights, [0], [dim], pooling)
    if input.dim() != 1:
        raise ValueError(
            f"DynamicEmbeddingBag: input has shape {tuple(input.shape)}, expected 1 or 2 dimensions"
        )
    if offsets is None:
        raise ValueError(
            "DynamicEmbeddingBag: offsets is None, expected where each bag of the 1-D input begins"
        )
    offsets = integer_offsets("DynamicEmbeddingBag", offsets)
    if include_last_offset and offsets.shape[0] == 0:
        raise ValueError(
            "DynamicEmbeddingBag: offsets is empty, but include_last_offset expects the number of "
            "ids at its end"
        )
    if include_last_offset:
        offsets = any_batch(offsets, 1).offsets
    ready = as_ops_take_them(ids, offsets)
    if ready and not include_last_offset and ids.is_cpu and not torch.compiler.is_compiling():
        offsets = torch.constant_pad_nd(offsets, (0, 1), ids.shape[0])
    elif not (ready and include_last_offset):
        bags = offsets.shape[0] - int(include_last_offset)
        ids, offsets = ops.ids_concat([ids], bags=bags, offsets=[offsets])
    return LookupBatch(ids, offsets, per_sample_weights, [0], [dim], pooling)


class DynamicEmbeddingBag(SingleTable):
    """Pooled vectors of bags of ids: ``nn.EmbeddingBag`` without ``num_embeddings``.

    Args:
        embedding_dim: columns of a row, at least 1.
        mode: ``"mean"``, the default as of ``nn.EmbeddingBag``, or ``"sum"``. With
            ``per_sample_weights`` the mean is sum(w_i e_i) / sum(w_i). An empty bag gives zeros.
        include_last_offset: offsets have one element per bag and the number of ids at the end, as
            those of collections and of KeyedJaggedTensors always have.
        **options: those of :class:`torch_dynemb.SingleTableOptions`.

    Raises:
        TypeError, ValueError, RuntimeError: as :class:`DynamicEmbedding`; also ValueError for
            another ``mode``.

    Example:
        >>> import torch, torch_dynemb as td
        >>> ads = td.DynamicEmbeddingBag(8, mode="mean", optimizer=td.RowWiseAdagrad(lr=0.1))
        >>> ads(torch.tensor([5, 6, 5]), torch.tensor([0, 2])).shape
        torch.Size([2, 8])
    """

    @advises("embedding_dim")
    def __init__(
        self,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Unpack[SingleTableOptions],
    ) -> None:
        pooling = pooling_of(mode)
        super().__init__(embedding_dim, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset
        self._pooling = pooling

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Look up and pool ids.

        Args:
            input: int64 or int32; (B, L): B bags of L ids, or (N,) with offsets.
            offsets: int64 or int32 (B,), where each bag begins; (B + 1,) with include_last_offset.
            per_sample_weights: float32, bfloat16 or float16 of the shape of input; gets a gradient.
            scores: int64 of the shape of input, as in :meth:`DynamicEmbedding.forward`.

        Returns:
            ``output_dtype`` (B, embedding_dim).

        Raises:
            TypeError, ValueError: dtypes or shapes do not match, offsets are missing, or given with
                a 2-D input, or scores are wrong as in :meth:`DynamicEmbedding.forward`.
            RuntimeError: offsets are not ascending from 0. No id has been inserted then.
            NoRoomError: the table is full or memory is short. No id has been inserted then.
            ForkedProcessError: in training, this process is a fork of the one that made the table.
            ReplicatedTableError: in training, each rank would train its own copy of the table.
        """
        if per_sample_weights is scores is None and are_ready(input) and are_ready(offsets):
            tables = self._tables_to_read()
            if tables is not None:  # nothing but the op: for few ids, more would take longer
                return self._as_output(
                    ops.find_and_read_bags(
                        tables.index,
                        tables.rows,
                        input,
                        offsets,
                        self._pooling,
                        include_last_offset=self.include_last_offset,
                    )
                )
        return self._lookup(
            self._requested(self._batch, input, offsets, per_sample_weights),
            scores=None if scores is None else self._scores_of(scores, input),
        )

    def prefetch(self, input: Tensor, offsets: Tensor | None = None, *, ahead: int = 1) -> None:
        """Begin to bring rows into memory; see :meth:`DynamicEmbedding.prefetch`.

        Args:
            input: int64 or int32; (B, L), or (N,) with offsets, as :meth:`forward` takes it.
            offsets: int64 or int32 (B,), where each bag begins, as :meth:`forward` takes it.
            ahead: in how many training steps, at least 1.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`forward`, and
                :meth:`DynamicEmbedding.prefetch`.
        """
        self._prefetch(self._batch(input, offsets, None), ahead)

    def _batch(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> LookupBatch:
        """Ask for a bag of each sample; see :meth:`forward`."""
        return bag_batch(
            input,
            offsets,
            per_sample_weights,
            include_last_offset=self.include_last_offset,
            dim=self.embedding_dim,
            pooling=self._pooling,
        )

    @classmethod
    @advises("weight", "ids")
    def from_embedding(
        cls,
        weight: Tensor | nn.EmbeddingBag,
        ids: Tensor | None = None,
        *,
        mode: str | None = None,
        include_last_offset: bool | None = None,
        **options: Unpack[SingleTableOptions],
    ) -> DynamicEmbeddingBag:
        """Make a dynamic table that starts with the rows of a static one, on its device.

        Args:
            weight: an ``nn.EmbeddingBag``, or a weight, float [n, dim]; rounded to ``dtype``.
            ids: int64 or int32 [n], distinct; default: 0 to n - 1.
            mode, include_last_offset: as in :class:`DynamicEmbeddingBag`; default: those of an
                ``nn.EmbeddingBag``.
            padding_idx: as in :class:`DynamicEmbeddingBag`; its row is left out. Default: that of
                an ``nn.EmbeddingBag``, if ``ids`` is not given.
            policy: as in :class:`DynamicEmbedding`; admission does not apply to ``ids``.
            device: of the rows; default: that of ``weight``.
            **options: those of :class:`torch_dynemb.SingleTableOptions`.

        Raises:
            TypeError: ``weight`` is not a dense tensor of floats, ``ids`` are not integers, or
                another argument has a wrong type.
            ValueError: ``weight`` has another number of dimensions, or is a module with
                ``max_norm`` or ``scale_grad_by_freq``. Or ``ids`` has another shape than [n], or an
                id twice. Or another argument is wrong, such as ``mode``.
            RuntimeError: tables cannot lie on the device of ``weight``, the policy leaves no room
                for all ids, or memory is short.
        """
        if isinstance(weight, nn.EmbeddingBag):
            mode = weight.mode if mode is None else mode
            if include_last_offset is None:
                include_last_offset = weight.include_last_offset
        static = checked_static_rows("from_embedding", weight, ids, options["padding_idx"])
        module = cls(
            static.weight.shape[1],
            mode="mean" if mode is None else mode,
            include_last_offset=bool(include_last_offset),
            **static.options(options),
        )
        module._fill(static)
        return module

    def to_embedding(self) -> tuple[torch.nn.EmbeddingBag, Tensor]:
        """Make a static table of the rows, and return ids int64 [n]: row i is of ids[i]."""
        ids, rows = self._exported()
        static = torch.nn.EmbeddingBag.from_pretrained(
            rows, freeze=False, mode=self.mode, include_last_offset=self.include_last_offset
        )
        return static, ids
