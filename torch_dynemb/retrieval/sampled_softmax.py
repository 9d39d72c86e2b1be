"""Losses against sampled negatives, with a correction for how often each is sampled."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from torch_dynemb.argument_checks import described, flag, tensor
from torch_dynemb.nn.embedding import DynamicEmbedding
from torch_dynemb.nn.inputs import flat_ids
from torch_dynemb.ops.columns import PADDING_HANDLE
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.retrieval.beside import look_up_beside
from torch_dynemb.retrieval.item_loss import ItemLoss, Losses
from torch_dynemb.retrieval.items import (
    Items,
    check_not_empty,
    checked_positives,
    checked_query,
    checked_temperature,
    checked_weights,
    weighted_mean,
)
from torch_dynemb.retrieval.negatives import (
    Drawn,
    InBatchNegatives,
    Negatives,
    UniformNegatives,
    check_counted,
    drawn_from,
    list_counts,
    log_expected,
    sources_of,
)
from torch_dynemb.retrieval.softmax_forms import FORMS, Form, Scored, losses_of, masked_pairs

Correction = Literal["logq"]


class SampledSoftmaxLoss(ItemLoss):
    """Loss of queries against the rows of a table that has no vocabulary.

    A query is scored by products with the row of its positive and with rows of negatives, which all
    queries of a batch share. One lookup reads them all, and its backward updates them once, by the
    optimizer of the table. In training new positives get a row; negatives are only found, and their
    scores stay as they are. In eval mode nothing changes.

    With ``correction="logq"``, log(expected) is subtracted from the score of a negative, where
    expected is how often the id is expected among the negatives of a query. So the sum over the
    negatives estimates the sum over all ids but the positive, and the loss that of a full softmax
    (Bengio and Senecal, 2008). Negatives of the batch are expected in proportion to their counts,
    which Yi et al. (2019) estimate by a sketch; several sources add up (Yang et al., 2020). With
    ``form="bce"`` the positive is corrected, too: that is noise contrastive estimation (Gutmann and
    Hyvarinen, 2010).

    The module has no parameters, and is not the owner of ``items``: give optimizers and checkpoints
    the model that has it.

    Args:
        items: module with the table, in memory: :class:`torch_dynemb.DynamicEmbedding`, a
            collection, or a table of RecIS.
        table: name or number of the table, if ``items`` has several.
        negatives: :class:`torch_dynemb.InBatchNegatives`, the default,
            :class:`torch_dynemb.UniformNegatives`, :class:`torch_dynemb.FrequencyNegatives`, or a
            tuple of them. A table that ranks share takes those of the batch without correction.
        temperature: divisor of the scores, more than 0.
        correction: ``"logq"``, for which in-batch negatives need a table that keeps counts; or
            None: all negatives count alike. ``form="bpr"`` takes None only.
        remove_accidental_hits: whether negatives with the id of the positive are left out.
        form: ``"softmax"``; ``"bce"``: binary cross entropy, summed over the negatives; ``"bpr"``:
            -log sigmoid(positive - negative), the mean over the negatives (Rendle et al., 2009).

    Raises:
        TypeError: an argument has a wrong type, or ``items`` has no dynamic table.
        ValueError: an argument is out of its range, arguments contradict each other, or the table
            keeps no counts.

    Example:
        >>> import torch, torch_dynemb as td
        >>> items = td.DynamicEmbedding(8, name="items", optimizer=td.Adam(lr=0.01))
        >>> loss = td.SampledSoftmaxLoss(items, negatives=td.UniformNegatives(16))
        >>> query = torch.randn(4, 8, requires_grad=True)
        >>> loss(query, torch.tensor([1, 2**60, -7, 1])).backward()
        >>> items.optimizer.step()
        >>> len(items), query.grad.shape
        (3, torch.Size([4, 8]))
    """

    def __init__(
        self,
        items: nn.Module,
        *,
        table: int | str | None = None,
        negatives: Negatives | tuple[Negatives, ...] | None = None,
        temperature: float = 0.05,
        correction: Correction | None = "logq",
        remove_accidental_hits: bool = True,
        form: Form = "softmax",
    ) -> None:
        super().__init__(items, table, temperature)
        owner, of = type(self).__name__, self._now()
        if form not in FORMS:
            raise ValueError(f"{owner}: form is {described(form)}, expected one of {FORMS}")
        if correction not in ("logq", None):
            raise ValueError(
                f"{owner}: correction is {described(correction)}, expected 'logq' or None"
            )
        if correction == "logq" and form == "bpr":
            raise ValueError(
                f"{owner}: correction is 'logq', but form 'bpr' compares scores pair by pair, "
                "which has not been given a correction: give correction=None"
            )
        self.negatives = sources_of(owner, InBatchNegatives() if negatives is None else negatives)
        self.corrects = correction == "logq"
        self.remove_accidental_hits = flag(
            f"{owner}: remove_accidental_hits", remove_accidental_hits
        )
        self.form: Form = form
        config = of.tables.config.tables[of.table]
        if of.tables.stored(of.tables.config.slab_of(of.table)) is not None:
            raise ValueError(
                f"{owner}: the rows of table {config.name!r} are in a store, which is not built "
                "for negatives: leave storage out"
            )
        exchanges = isinstance(of.module, DynamicEmbedding)  # by a call with ids alone
        plain = self.negatives == (InBatchNegatives(),) and not self.corrects
        if of.shared and not (exchanges and plain):
            remedy = "give negatives=InBatchNegatives() and correction=None"
            if not exchanges:
                remedy = "look rows up by the module that exchanges them: in_batch_softmax_loss"
            raise ValueError(
                f"{owner}: ranks share table {config.name!r}, for which negatives are those of the "
                f"batch: {remedy}"
            )
        check_counted(owner, of, self.negatives, corrects=self.corrects)

    def _losses(self, items: Items, query: Tensor, positive_ids: Tensor) -> Losses:
        scored, counted = self._scored(items, query / self.temperature, positive_ids)
        return Losses(losses_of(self.form, scored), counted)

    def _scored(
        self, items: Items, query: Tensor, positive_ids: Tensor
    ) -> tuple[Scored, Tensor | None]:
        """Look up positives and negatives; also return which positives count, or None: all do."""
        n = query.shape[0]
        drawn: list[Drawn] = []
        list_counts(items, self.negatives, corrects=self.corrects)

        def draw() -> Tensor:
            if self.negatives != (InBatchNegatives(),):
                check_not_empty(type(self).__name__, items)
            drawn.extend(drawn_from(items, self.negatives))
            return torch.cat([part.ids for part in drawn]) if drawn else positive_ids[:0]

        if items.shared:
            rows, ids = items.module(positive_ids), positive_ids
            left_out = torch.zeros_like(ids, dtype=torch.bool)
        else:
            one_bag = items.tables.one_bag
            batch = LookupBatch.of_rows(positive_ids, one_bag, [items.table], items.dim)
            rows, ids, handles = look_up_beside(items.module, batch, draw)
            # padding ids, and ids drawn from a list that have been removed since
            left_out = handles == PADDING_HANDLE
            left_out = torch.cat([left_out[:n], handles[n:] < 0])
        padded = items.tables.config.tables[items.table].padding_idx is not None
        counted = ~left_out[:n] if padded else None
        in_batch = any(isinstance(source, InBatchNegatives) for source in self.negatives)
        first = 0 if in_batch else n
        expected = positive_expected = None
        if self.corrects:
            positives = query.new_tensor(n) if counted is None else counted.sum()
            every = log_expected(items, self.negatives, drawn, ids, positives)
            shared = all(isinstance(source, UniformNegatives) for source in self.negatives)
            expected, positive_expected = (every, every) if shared else (every[first:], every[:n])
        masked = masked_pairs(
            ids[:n],
            ids[first:],
            left_out[first:],
            in_batch=in_batch,
            hits=self.remove_accidental_hits,
        )
        scored = Scored(query, rows[:n], rows[first:], masked, expected, positive_expected)
        return scored, counted

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, negatives={self.negatives}, form={self.form!r}"


def in_batch_softmax_loss(
    query: Tensor,
    rows: Tensor,
    ids: Tensor,
    *,
    weights: Tensor | None = None,
    log_probabilities: Tensor | None = None,
    temperature: float = 0.05,
    remove_accidental_hits: bool = True,
    form: Form = "softmax",
) -> Tensor:
    """Return the loss of queries against the rows of the positives of their batch.

    It is for rows that another module has looked up, such as TorchRec's EmbeddingCollection over
    several ranks. Gradients of the rows go back to that module. See
    :class:`torch_dynemb.SampledSoftmaxLoss`, which looks rows up itself and knows counts.

    Args:
        query: float [n, dim], n at least 1.
        rows: float [n, dim], rows of the positives.
        ids: int64 or int32 [n], ids of the positives.
        weights: float [n], factors of the losses, which are divided by their sum; default: 1.
        log_probabilities: float [n], logarithm of the share of each id among positives, to correct
            scores by; None: they are not corrected.
        temperature: divisor of the scores, more than 0.
        remove_accidental_hits: whether negatives with the id of the positive are left out.
        form: as in :class:`torch_dynemb.SampledSoftmaxLoss`.

    Returns:
        float32 [].

    Raises:
        TypeError: dtype of an argument.
        ValueError: shape, device or range of an argument, or NaN in ``query``.

    Example:
        >>> import torch, torch_dynemb as td
        >>> query, rows = torch.eye(3), torch.eye(3)
        >>> td.in_batch_softmax_loss(query, rows, torch.arange(3), temperature=1.0)
        tensor(0.5514)
    """
    owner = "in_batch_softmax_loss"
    rows = tensor(f"{owner}: rows", rows)
    if not rows.is_floating_point() or rows.dim() != 2:
        raise ValueError(
            f"{owner}: rows has dtype {rows.dtype} and shape {tuple(rows.shape)}, expected floats "
            "(n, dim)"
        )
    query = checked_query(owner, query, rows.shape[1], rows.device)
    flat = flat_ids(f"{owner}: ids", ids)
    if rows.shape[0] != query.shape[0]:
        raise ValueError(
            f"{owner}: rows has {rows.shape[0]} rows, expected one for each of the "
            f"{query.shape[0]} queries"
        )
    checked_positives(owner, ids, query)
    weights = checked_weights(owner, weights, query)
    given = checked_weights(owner, log_probabilities, query)
    if form not in FORMS:
        raise ValueError(f"{owner}: form is {described(form)}, expected one of {FORMS}")
    hits = flag(f"{owner}: remove_accidental_hits", remove_accidental_hits)
    left_out = torch.zeros_like(flat, dtype=torch.bool)
    masked = masked_pairs(flat, flat, left_out, in_batch=True, hits=hits)
    expected = None if given is None else given.float() + math.log(max(1, query.shape[0] - 1))
    scaled = query / checked_temperature(owner, temperature)
    losses = losses_of(form, Scored(scaled, rows, rows, masked, expected, expected))
    return weighted_mean(losses, weights, None)


__all__ = ["Correction", "SampledSoftmaxLoss", "in_batch_softmax_loss"]
