"""Plan of what a part of a model's table takes from a saved table, and whether they fit."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from torch_dynemb.checkpoint.manifest.records import SavedPart, SavedTable
from torch_dynemb.checkpoint.parts import TablePart
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.policy.admission import AdmitFrequent, AdmitFrequentSketch
from torch_dynemb.policy.layout import score_words_of

OnMissingState = Literal["fresh", "error"]
_CONVERTED = (torch.float32, torch.bfloat16)


class TablePlan(NamedTuple):
    """Plan of loading a part.

    Attributes:
        part: part of the model.
        saved: the saved table.
        state: state tensors of the optimizer that are loaded.
        scores: names of the scores that are loaded.
        counts: whether admission counts are loaded, exact ones or a sketch.
        fresh: state that starts anew, because it was not saved or not requested.
    """

    part: TablePart
    saved: SavedTable
    state: tuple[StateTensor, ...]
    scores: tuple[str, ...]
    counts: bool
    fresh: tuple[str, ...]

    @property
    def keeps_steps(self) -> bool:
        """Whether the optimizer's step count continues: with its state, or if it has no state."""
        optimizer, saved = self.part.optimizer, self.saved.optimizer
        if optimizer is None or saved is None:
            return False
        return bool(self.state) or not (optimizer.state or saved["state"])

    @property
    def sources(self) -> list[SavedPart]:
        """Saved parts that share ids and columns with the part."""
        own = self.part.columns
        return [
            saved
            for saved in self.saved.parts
            if saved.id_slots.shares(self.part.ids)
            and saved.first_column < own.stop
            and own.start < saved.first_column + saved.columns
        ]

    @property
    def id_sources(self) -> list[SavedPart]:
        """Saved parts that share its ids and have the first column: their files have the ids."""
        return [part for part in self.saved.first_parts if part.id_slots.shares(self.part.ids)]


def plan_of(
    part: TablePart,
    saved: SavedTable,
    *,
    optimizer_state: bool,
    on_missing_state: OnMissingState,
) -> TablePlan:
    """Plan how a part is loaded.

    Raises:
        ValueError: the table does not fit, or lacks required state.
    """
    config = part.config
    where = f"table {part.name!r}"
    if saved.embedding_dim != part.embedding_dim:
        raise ValueError(
            f"{where} was saved with {saved.embedding_dim} columns, but the model's has "
            f"{part.embedding_dim}: give it the embedding_dim it was saved with"
        )
    if saved.packed != part.packed:
        raise ValueError(
            f"{where} was saved with rows of {saved.dtype}, but the model's are of {part.dtype}, "
            "which no load converts: give it the dtype it was saved with"
        )
    fresh: list[str] = []
    missing: list[str] = []
    state = _state_of(part, saved, optimizer_state, fresh, missing)
    own_scores = score_words_of([config], part.group.config.memory_budget is not None)
    scores = tuple(word for word in own_scores if word in saved.scores)
    missing += [f"score {word}" for word in own_scores if word not in saved.scores]
    rule = config.policy.admission
    counts = False
    if isinstance(rule, AdmitFrequent):
        counts = any(of.counts is not None for of in saved.parts)
    elif isinstance(rule, AdmitFrequentSketch):
        counts = any(of.sketch is not None for of in saved.parts)
    if isinstance(rule, AdmitFrequent | AdmitFrequentSketch) and not counts:
        missing.append("counts of admission")
    if missing and on_missing_state == "error":
        raise ValueError(
            f"{where} was saved without {', '.join(missing)}: give on_missing_state='fresh' to "
            "start it anew"
        )
    return TablePlan(part, saved, state, scores, counts, (*fresh, *missing))


def _state_of(
    part: TablePart, saved: SavedTable, wanted: bool, fresh: list[str], missing: list[str]
) -> tuple[StateTensor, ...]:
    """Return the state tensors that are loaded: all of them, or none."""
    has_state = saved.optimizer is not None and bool(saved.optimizer["state"])
    if part.trained == "later" and has_state and wanted:
        assert saved.optimizer is not None
        raise ValueError(
            f"table {part.name!r} was saved with the optimizer {_shown(saved.optimizer)}, but the "
            "model's has none yet: give it its optimizer before it is loaded, or "
            "give optimizer_state=False to load the rows alone"
        )
    optimizer = part.optimizer
    if optimizer is None:
        return ()
    described = optimizer.description()
    if not optimizer.state and not has_state:
        return ()
    if not wanted:
        if optimizer.state:
            fresh.append("optimizer state")
        return ()
    if saved.optimizer is None:
        missing.append("optimizer state")
        return ()
    if _kinds(described) != _kinds(saved.optimizer):
        raise ValueError(
            f"table {part.name!r} was saved with the optimizer {_shown(saved.optimizer)}, but the "
            f"model's is {_shown(described)}: give optimizer_state=False to load the rows alone"
        )
    blocks = [t.name for t in optimizer.state if t.dtype == torch.uint8]
    columns = {(of.first_column, of.columns) for of in saved.parts}
    if blocks and (part.first_column, len(part.columns)) not in columns:
        raise ValueError(
            f"table {part.name!r} was saved with 8-bit {blocks[0]} of columns {sorted(columns)}, "
            f"but columns {part.columns.start} to {part.columns.stop} are wanted, which have other "
            "blocks: shard columns as they were, or give optimizer_state=False"
        )
    return optimizer.state


def _kinds(description: dict[str, Any]) -> Any:
    """Return name and state tensors. Floats of 32 and 16 bits count as one kind."""
    floats = {str(dtype).removeprefix("torch.") for dtype in _CONVERTED}
    state = [
        [name, per_row, "float" if dtype in floats else dtype]
        for name, per_row, dtype in description["state"]
    ]
    return [description["name"], state]


def _shown(description: dict[str, Any]) -> str:
    state = ", ".join(f"{name} of {dtype}" for name, _, dtype in description["state"])
    return f"{description['name']} ({state or 'no state'})"


__all__ = ["OnMissingState", "TablePlan", "plan_of"]
