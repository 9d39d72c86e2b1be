"""Sources of tensors, such as the weight of an ``nn.Embedding`` with the ids of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb.argument_checks import described, flat_int64, float_rows, tensor
from torch_dynemb.migrate.source import Source, SourceRows, with_columns
from torch_dynemb.table import RowBatch

_CPU = torch.device("cpu")


class TensorSource(Source):
    """Source of tensors in memory, see :func:`read_tensors`."""

    def __init__(
        self,
        name: str,
        ids: Tensor,
        rows: Tensor,
        state: Mapping[str, Tensor],
        scores: Mapping[str, Tensor],
        **told: Any,
    ) -> None:
        super().__init__(name, rows.shape[1], state=tuple(state), scores=tuple(scores), **told)
        self._ids, self._rows = ids, rows
        self._state = {name: with_columns(values) for name, values in state.items()}
        self._scores = scores

    def batches(self, size: int) -> Iterator[SourceRows]:
        for begin in range(0, self._ids.numel(), size):
            some = slice(begin, begin + size)
            batch = RowBatch(
                self._ids[some],
                self._rows[some].cpu(),
                {name: values[some].cpu() for name, values in self._state.items()},
                {name: values[some].cpu() for name, values in self._scores.items()},
            )
            yield SourceRows(batch, self.name, begin)


def read_tensors(
    ids: Tensor,
    rows: Tensor,
    *,
    state: Mapping[str, Tensor] | None = None,
    scores: Mapping[str, Tensor] | None = None,
    optimizer_steps: int | None = None,
    name: str = "read_tensors",
) -> TensorSource:
    """Return tensors in memory as a source for :func:`load`.

    Args:
        ids: int64 [n], every id once.
        rows: float [n, dim].
        state: optimizer state by the optimizer's name of it: [n, dim] each, or [n] if a row has
            one value, such as ``{"sum": accumulators}`` of Adagrad.
        scores: int64 [n] each, by name: ``step``, ``timestamp`` (seconds), ``frequency``,
            ``custom`` or ``expiry`` (seconds).
        optimizer_steps: number of updates of the optimizer, for Adam's bias correction.
        name: name in error messages.

    Returns:
        The source. The tensors are not copied.

    Raises:
        TypeError: an argument is not a tensor, or has a wrong dtype.
        ValueError: lengths differ.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> users = td.DynamicEmbedding(2, optimizer=td.RowWiseAdagrad(lr=0.1))
        >>> source = migrate.read_tensors(
        ...     torch.tensor([5, 6]), torch.ones(2, 2), state={"sum": torch.ones(2)}
        ... )
        >>> migrate.load(users, source)["embedding"].fresh
        ('optimizer steps',)
    """
    flat = flat_int64(f"{name}: ids", tensor(f"{name}: ids", ids).cpu(), _CPU)
    floats = float_rows(f"{name}: rows", tensor(f"{name}: rows", rows).detach().cpu(), _CPU)
    if floats.dim() != 2 or floats.shape[0] != flat.numel():
        raise ValueError(
            f"{name}: rows has shape {tuple(floats.shape)}, expected ({flat.numel()}, dim): a row "
            "for each of ids"
        )
    beside: dict[str, dict[str, Tensor]] = {"state": {}, "scores": {}}
    for what, given in (("state", state), ("scores", scores)):
        for key, values in (given or {}).items():
            of = tensor(f"{name}: {what}[{key!r}]", values).detach()
            if of.dim() == 0 or of.shape[0] != flat.numel():
                raise ValueError(
                    f"{name}: {what}[{key!r}] has shape {tuple(of.shape)}, expected "
                    f"{flat.numel()} rows, as many as there are ids"
                )
            beside[what][key] = of
    return TensorSource(
        name, flat, floats, beside["state"], beside["scores"], optimizer_steps=optimizer_steps
    )


def read_embedding(
    embedding: nn.Embedding | nn.EmbeddingBag | Tensor,
    ids: Tensor,
    *,
    state: Mapping[str, Tensor] | None = None,
    optimizer_steps: int | None = None,
) -> Source:
    """Return the rows of a static table with a known vocabulary, as a source for :func:`load`.

    ``ids[r]`` is the id of row r of the table: a lookup by id then returns what a lookup by row
    number returned. If ids were hashed into rows, pass the ids that occur, and
    ``table.weight[hashed(ids)]`` as ``embedding``. Every id then has a row of its own, which
    starts as a copy of the row that it shared.

    Args:
        embedding: the table, or its weight, float [n, dim].
        ids: int64 [n], every id once; negative ids are allowed. Leave rows that are never looked
            up, such as padding, out of both arguments.
        state: as in :func:`read_tensors`.
        optimizer_steps: as in :func:`read_tensors`.

    Returns:
        The source. The tensors are not copied.

    Raises:
        TypeError: an argument is not a tensor, or has a wrong dtype.
        ValueError: lengths differ.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> static, vocabulary = torch.nn.Embedding(3, 4), torch.tensor([70, 80, 90])
        >>> items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> report = migrate.load(items, migrate.read_embedding(static, vocabulary))
        >>> torch.equal(items(torch.tensor([90])), static(torch.tensor([2])))
        True
    """
    weight = (
        embedding.weight if isinstance(embedding, nn.Embedding | nn.EmbeddingBag) else embedding
    )
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"read_embedding: embedding is {described(embedding)}, expected an nn.Embedding, an "
            "nn.EmbeddingBag or a Tensor"
        )
    return read_tensors(
        ids, weight, state=state, optimizer_steps=optimizer_steps, name="read_embedding"
    )


__all__ = ["TensorSource", "read_embedding", "read_tensors"]
