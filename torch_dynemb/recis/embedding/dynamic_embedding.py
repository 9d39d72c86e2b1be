"""RecIS's DynamicEmbedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.agreement import check_agreement
from torch_dynemb.distributed.ranks import process_group_of, rank_group
from torch_dynemb.recis.embedding.bags import Ids
from torch_dynemb.recis.embedding.insertion import insert_rows
from torch_dynemb.recis.embedding.joint_lookup import JointLookup, Runtime, fail_lookup
from torch_dynemb.recis.embedding.options import EmbeddingOption
from torch_dynemb.recis.embedding.physical_table import hash_table_of
from torch_dynemb.recis.embedding.prepared import PreparedLookup, finished
from torch_dynemb.recis.embedding.requests_of_children import requests_of
from torch_dynemb.recis.embedding.unreduced import NoReduceEmbedding


class DynamicEmbedding(nn.Module):
    """Embedding of one feature, on one process or over the ranks of a process group.

    Over several ranks, each row lies on one rank. A rank sends the distinct ids of its batch to
    their owners, gets rows, and combines them. All ranks of the group make the same calls,
    including backwards, even with an empty batch.

    Args:
        emb_opt: options of the embedding.
        pg: process group; default: the option's, else the default group if it is initialized.

    Raises:
        TypeError: ``emb_opt`` is not an EmbeddingOption.
        ValueError: this process is not a member of ``pg``, ranks were given different options (all
            of them raise), or the option has ``score_from``.

    Example:
        >>> import torch
        >>> from torch_dynemb.recis import RaggedTensor
        >>> option = EmbeddingOption(embedding_dim=4, shared_name="item", combiner="mean")
        >>> items = DynamicEmbedding(option)
        >>> items(torch.tensor([[1, 2, 3], [4, 5, 6]])).shape
        torch.Size([2, 4])
        >>> items(RaggedTensor(torch.tensor([1, 2, 9]), torch.tensor([0, 0, 3]))).shape
        torch.Size([2, 4])
    """

    def __init__(self, emb_opt: EmbeddingOption, pg: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not isinstance(emb_opt, EmbeddingOption):
            raise TypeError(
                f"DynamicEmbedding: emb_opt is {described(emb_opt)}, expected an EmbeddingOption"
            )
        if emb_opt.score_from is not None:
            raise ValueError(
                f"DynamicEmbedding: score_from is {emb_opt.score_from!r}, but the embedding has "
                "one feature: give the option to an EmbeddingEngine"
            )
        process_group = emb_opt.pg if pg is None else pg
        self._group = rank_group(process_group)  # the ranks that share the table
        described_option = emb_opt.described(emb_opt.shared_name)
        check_agreement("DynamicEmbedding", described_option, process_group_of(self._group))
        self.emb_opt = replace(emb_opt, pg=None)  # a process group cannot be copied or saved
        self.hashtable = hash_table_of(
            emb_opt.shared_name,
            emb_opt.children,
            {emb_opt.shared_name: emb_opt},
            self._group,
            coalesced=emb_opt.coalesced,
        )
        self._runtime = Runtime.of(emb_opt)

    def insert(self, input_ids: Tensor, input_emb: Tensor, child: str | None = None) -> None:
        """Set rows of ids; new ids get a row whatever the admission rule is.

        Over several ranks all make the call, each with rows of any ids, which go to their owners.
        All of the rows of all ranks are set, or none. See the FAQ for the other ways to insert.

        Args:
            input_ids: int64 or int32 of any shape, n in all, distinct over all ranks.
            input_emb: float [n, dim].
            child: name of the logical table; required if there are several.

        Raises:
            TypeError: dtypes do not match.
            ValueError: unknown child, shapes do not match, or an id is repeated. All ranks raise
                the error of one.
            RuntimeError: the table has storage and no optimizer yet.
            NoRoomError: the table is full, or memory is short.

        Example:
            >>> import torch
            >>> items = DynamicEmbedding(EmbeddingOption(embedding_dim=2, shared_name="item"))
            >>> items.insert(torch.tensor([7, 8]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            >>> items(torch.tensor([[7, 8]])).detach()
            tensor([[4., 6.]])
        """
        insert_rows("DynamicEmbedding.insert", self.hashtable, child, input_ids, input_emb)

    def exchange_ids(
        self, input_ids: Ids | Mapping[str, Ids], input_weights: Tensor | None = None
    ) -> PreparedLookup:
        """Send ids to the ranks that have their rows; pass the result to :meth:`forward`.

        Work between the two calls overlaps with the exchange.

        Args:
            input_ids: int64 or int32 [..., L], a RaggedTensor, or for several children a dict of
                them, as for :meth:`forward`.
            input_weights: float of the shape of dense ids, or [N] for the N values of a ragged
                tensor; default: those of a ragged tensor, else none.

        Raises:
            KeyError: names of a dict are not those of the children.
            TypeError, ValueError: dtypes, shapes or devices do not match, or weights are given
                beside a dict.
        """
        try:
            requests = requests_of("DynamicEmbedding", self.emb_opt, input_ids, input_weights)
        except Exception as error:
            fail_lookup(self.hashtable, self._group, error)
            raise
        lookup = JointLookup(self.hashtable, self._runtime, list(requests.values()), self._group)
        return PreparedLookup([(list(requests), lookup)], {})

    def prefetch(
        self,
        input_ids: Ids | Mapping[str, Ids] | PreparedLookup,
        input_weights: Tensor | None = None,
    ) -> PreparedLookup:
        """Start to load rows of the next batch into memory; see :meth:`EmbeddingEngine.prefetch`.

        Args:
            input_ids: the argument of the next :meth:`forward`.
            input_weights: as :meth:`forward` takes them.

        Returns:
            The argument to pass to :meth:`forward`.

        Raises:
            KeyError, TypeError, ValueError: as :meth:`exchange_ids`.
            RuntimeError: the storage has failed, or the table has storage and no optimizer yet.
        """
        if not isinstance(input_ids, PreparedLookup):
            input_ids = self.exchange_ids(input_ids, input_weights)
        for _, lookup in input_ids.lookups:
            lookup.prefetch()
        return input_ids

    def forward(
        self,
        input_ids: Ids | Mapping[str, Ids] | PreparedLookup,
        input_weights: Tensor | None = None,
    ) -> Tensor | NoReduceEmbedding | dict[str, Tensor]:
        """Look ids up and combine the rows of each sample.

        Args:
            input_ids: ids of samples, as int64 or int32 [..., L] or as innermost rows of a
                RaggedTensor. For several children a dict of them. Or the result of
                :meth:`exchange_ids`.
            input_weights: float of the shape of dense ids, or [N] for the N values of a ragged
                tensor; it may get a gradient.

        Returns:
            float32 (float16 with ``fp16_enabled``): the shape of the ids without the last dimension
            + (dim,), or (tile_len * dim,). For a ragged tensor, the shape of its dense form, with
            zeros for missing rows. For several children a dict of them. With ``no_reduce`` a
            :class:`NoReduceEmbedding`.

        Raises:
            TypeError, ValueError: dtypes, shapes or devices do not match.
        """
        if not isinstance(input_ids, PreparedLookup):
            input_ids = self.exchange_ids(input_ids, input_weights)
        elif input_weights is not None:
            raise ValueError(
                "DynamicEmbedding: input_weights is given with a result of exchange_ids(): give it "
                "to exchange_ids()"
            )
        results = finished(input_ids)
        if len(self.emb_opt.children) == 1:
            only: Tensor | NoReduceEmbedding = results[self.emb_opt.children[0]]
            return only
        return results


__all__ = ["DynamicEmbedding"]
