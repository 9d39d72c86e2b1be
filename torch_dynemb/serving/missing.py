"""Counts of ids that a frozen model lacks, as an output beside that of the model."""

from __future__ import annotations

import threading
import uuid
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb._library.error_names import name_tables
from torch_dynemb.nn.features import begins_of_features
from torch_dynemb.nn.pooled_rows import RowsOfIds, pooled_rows
from torch_dynemb.ops.autograd import needs_grad
from torch_dynemb.ops.columns import Meta
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.parts.table_parts import table_name


class _Note(NamedTuple):
    """Missing ids of one lookup.

    Attributes:
        place: of its tables, see :class:`CountedTables`.
        missing: int64 [tables].
    """

    place: int
    missing: Tensor


class _Notes(threading.local):
    """Stack of notes of a thread's running forwards, the innermost one last."""

    def __init__(self) -> None:
        self.open: list[list[_Note]] = []


_eager = _Notes()
_traced: list[list[_Note]] = []  # torch traces one program at a time, across threads


def _open_notes() -> list[list[_Note]]:
    return _traced if torch.compiler.is_compiling() else _eager.open


def note_missing(place: int, missing: Tensor) -> None:
    """Report missing ids to the running forwards of each :class:`CountsMissing`, if any.

    Args:
        place: of the tables.
        missing: int64 [tables], number of ids that a lookup has not found.
    """
    for notes in _open_notes():
        notes.append(_Note(place, missing))


class CountsMissing(nn.Module):
    """A frozen model that also returns the number of missing ids.

    Args:
        model: made by :func:`torch_dynemb.freeze`.

    Attributes:
        table_names: names of the counted tables, preceded by the paths of their modules in the
            model.

    Raises:
        ValueError: the model has no frozen tables.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.table_names: list[str] = []
        self._paths: list[str] = []
        places = {0}
        for path, module in model.named_modules():
            if not isinstance(module, CountedTables):
                continue
            # else it stays: another model may have the tables, too. A copy has that of its source.
            if module.place in places:
                module.place = uuid.uuid4().int >> 66
            places.add(module.place)
            self._paths.append(path)
            owner = module.owner(path)
            self.table_names += [table_name(owner, name) for name in module.names]
        if not self._paths:
            raise ValueError(
                f"freeze: missing is True, but the model, a {type(model).__name__}, has no dynamic "
                "tables: leave missing out"
            )
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """Return the model's output, and the number of missing ids.

        Args:
            *args: of the model's forward.
            **kwargs: likewise.

        Returns:
            The model's output; and int64 [number of tables], in the order of ``table_names``:
            occurrences of ids that are not in the table, padding ids aside.
        """
        notes: list[_Note] = []
        opened = _open_notes()
        opened.append(notes)
        try:
            output = self.model(*args, **kwargs)
        finally:
            opened.pop()
        missing = []
        for path in self._paths:
            tables = self.model.get_submodule(path)
            assert isinstance(tables, CountedTables)
            counts = [note.missing for note in notes if note.place == tables.place]
            total = tables.get_buffer("meta").new_zeros(len(tables.names))
            for count in counts:
                total = total + count
            missing.append(total)
        return output, torch.cat(missing)


class CountedTables(nn.Module):
    """Base of served tables, frozen and live, which count missing ids.

    Attributes:
        names: of the tables.
        place: number by which a :class:`CountsMissing` knows the tables; 0: none counts them.
        depth: number of modules from the one that names the tables down to this one.
    """

    names: list[str]
    place = 0
    depth = 1
    _no_offsets: Tensor | None = None  # cached: making it takes as long as a small lookup

    def owner(self, path: str) -> str:
        """Return the path of the module that names the tables.

        Args:
            path: of this module.
        """
        return ".".join(path.split(".")[: -self.depth])

    @property
    def one_bag(self) -> Tensor:
        """Return int64 [0], the offsets of a call of one feature without pooling."""
        if torch.compiler.is_compiling() or self._no_offsets is None:
            return self.get_buffer("meta").new_empty(0)  # not a constant of programs
        return self._no_offsets

    def tensors(self) -> ops.ServedTensors:
        """Return the tensors of the tables, as ops take them."""
        raise NotImplementedError

    def lookup(self, batch: LookupBatch) -> Tensor:
        """Look up rows of ids, or bags of them; nothing changes.

        :class:`CountsMissing` receives the number of missing ids of each table.

        Args:
            batch: ids and settings of the lookup; its weights may get a gradient.

        Returns:
            float32 [B, sum of feature_dims], or [N, dim] without pooling.

        Raises:
            TypeError, ValueError: see :func:`torch_dynemb.ops.serve_lookup`.
            RuntimeError: an argument does not fit the tables, or is on another device. On a GPU, a
                later call raises errors in offsets.
        """
        try:
            weights = batch.per_sample_weights
            if weights is not None and needs_grad(weights):
                return self._lookup_with_learning_weights(batch)
            return self._served(batch.detached())
        except RuntimeError as error:
            name_tables(error, self.names)
            raise

    def _served(self, batch: LookupBatch) -> Tensor:
        served = ops.serve_lookup(self.tensors(), batch)
        note_missing(self.place, served.missing)
        return served.output

    def _lookup_with_learning_weights(self, batch: LookupBatch) -> Tensor:
        """Look the rows up one by one, and pool them by an op that has a gradient of weights."""

        def look_up(part: LookupBatch, begins: Tensor) -> RowsOfIds:
            dim = part.feature_dims[0]
            rows = self._served(LookupBatch.of_rows(part.ids, begins, part.feature_tables, dim))
            return RowsOfIds(rows, torch.arange(rows.shape[0], device=rows.device))

        return pooled_rows(self._without_weights_of_padding(batch), look_up)

    def _without_weights_of_padding(self, batch: LookupBatch) -> LookupBatch:
        """Return a batch with weights of 0 for padding ids, which do not count in means."""
        ids, tables = batch.ids, torch.tensor(batch.feature_tables, device=batch.ids.device)
        ends = begins_of_features(batch.offsets, len(tables))[1:].contiguous()
        places = torch.arange(ids.shape[0], device=ids.device)
        features = torch.searchsorted(ends, places, right=True).clamp(max=len(tables) - 1)
        of_ids = self.get_buffer("meta")[tables[features]]
        is_padding = of_ids[:, Meta.HAS_PADDING].bool() & (of_ids[:, Meta.PADDING_ID] == ids)
        assert batch.per_sample_weights is not None
        return batch._replace(
            per_sample_weights=batch.per_sample_weights.masked_fill(is_padding, 0.0)
        )

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        dims = self.get_buffer("meta")[:, Meta.DIM].tolist()
        return "\n".join(
            f"name={name!r}, dim={dim}, {ids} ids"
            for (name, ids), dim in zip(self.sizes().items(), dims, strict=True)
        )


__all__ = ["CountedTables", "CountsMissing", "note_missing"]
