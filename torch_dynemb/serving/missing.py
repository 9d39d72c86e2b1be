"""How many ids a frozen model has not found, as an output beside what the model returns."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb._library.error_names import name_tables
from torch_dynemb.checkpoint.parts import table_name
from torch_dynemb.ops.columns import Meta
from torch_dynemb.ops.tensors import LookupBatch


class _Note(NamedTuple):
    """What one lookup has not found.

    Attributes:
        place: of its tables in the model.
        missing: int64 [tables].
    """

    place: int
    missing: Tensor


class _Notes(threading.local):
    """Those of the forwards that run in a thread, the innermost one last."""

    def __init__(self) -> None:
        self.open: list[list[_Note]] = []


_eager = _Notes()
_traced: list[list[_Note]] = []  # torch traces one program at a time, and knows no thread's own


def _open_notes() -> list[list[_Note]]:
    return _traced if torch.compiler.is_compiling() else _eager.open


def note_missing(place: int, missing: Tensor) -> None:
    """Tells the forward of a :class:`CountsMissing` that runs, if there is one.

    Args:
        place: of the tables among those of the model.
        missing: int64 [tables], how many ids a lookup has not found.
    """
    opened = _open_notes()
    if opened:
        opened[-1].append(_Note(place, missing))


class CountsMissing(nn.Module):
    """A frozen model that also returns how many ids it has not found.

    Args:
        model: what :func:`torch_dynemb.freeze` has made.

    Attributes:
        table_names: whose counts they are: the names of the tables, behind the paths of their
            modules in the model.

    Raises:
        ValueError: the model has no frozen tables.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.table_names: list[str] = []
        self._paths: list[str] = []
        for path, module in model.named_modules():
            if not isinstance(module, CountedTables):
                continue
            module.place = len(self._paths)
            self._paths.append(path)
            of_module = path.rpartition(".")[0]
            self.table_names += [table_name(of_module, name) for name in module.names]
        if not self._paths:
            raise ValueError(
                f"freeze: missing is True, but the model, a {type(model).__name__}, has no dynamic "
                "tables: leave missing out"
            )
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """What the model returns, and how many ids were not there.

        Args:
            *args: of the model's forward.
            **kwargs: likewise.

        Returns:
            What the model returns; and int64 [number of tables], in the order of ``table_names``:
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
        for place, path in enumerate(self._paths):
            tables = self.model.get_submodule(path)
            assert isinstance(tables, CountedTables)
            counts = [note.missing for note in notes if note.place == place]
            total = tables.get_buffer("tables").new_zeros(len(tables.names))
            for count in counts:
                total = total + count
            missing.append(total)
        return output, torch.cat(missing)


class CountedTables(nn.Module):
    """Base of tables that are served, frozen and live, which count the ids that they lack.

    Attributes:
        names: of the tables.
        place: of the module among those of its model that have tables.
    """

    names: list[str]
    place = 0
    _no_offsets: Tensor | None = None  # made once: it takes as long as a small lookup

    @property
    def one_bag(self) -> Tensor:
        """int64 [0], the offsets of a call of one feature whose ids are not pooled."""
        if torch.compiler.is_compiling() or self._no_offsets is None:
            return self.get_buffer("meta").new_empty(0)  # no constant of programs
        return self._no_offsets

    def tensors(self) -> ops.ServedTensors:
        """The tensors of the tables, as ops take them."""
        raise NotImplementedError

    def lookup(self, batch: LookupBatch) -> Tensor:
        """Rows of ids, or bags of them; changes nothing.

        :class:`CountsMissing` gets how many ids were not in each table.

        Args:
            batch: what is asked for; weights get no gradient.

        Returns:
            float32 [B, sum of feature_dims], or [N, dim] without pooling.

        Raises:
            TypeError, ValueError: see :func:`torch_dynemb.ops.serve_lookup`.
            RuntimeError: an argument does not fit the tables, or is not where they are. On a GPU, a
                later call raises what is wrong with offsets.
        """
        try:
            served = ops.serve_lookup(self.tensors(), batch.detached())
        except RuntimeError as error:
            name_tables(error, self.names)
            raise
        note_missing(self.place, served.missing)
        return served.output

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        dims = self.get_buffer("meta")[:, Meta.DIM].tolist()
        return "\n".join(
            f"name={name!r}, dim={dim}, {ids} ids"
            for (name, ids), dim in zip(self.sizes().items(), dims, strict=True)
        )


__all__ = ["CountedTables", "CountsMissing", "note_missing"]
