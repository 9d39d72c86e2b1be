"""Plan of what a part of a model's table takes from a saved table, and whether they fit."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from torch_dynemb.checkpoint.loading.later import LaterTable, shards_of
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.parts.saved_tables import SavedPart, SavedTable
from torch_dynemb.parts.table_parts import TablePart
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
        later: changes that are loaded together with the saved table; None: there are none.
    """

    part: TablePart
    saved: SavedTable
    state: tuple[StateTensor, ...]
    scores: tuple[str, ...]
    counts: bool
    fresh: tuple[str, ...]
    later: LaterTable | None = None

    @property
    def keeps_steps(self) -> bool:
        """Whether the optimizer's step count continues: with its state, or if it has no state."""
        optimizer, saved = self.part.optimizer, self.saved.optimizer
        if optimizer is None or saved is None:
            return False
        return bool(self.state) or not (optimizer.state or saved["state"])

    @property
    def optimizer_steps(self) -> int:
        """Number of updates of the optimizer that the part continues from."""
        if not self.keeps_steps:
            return 0
        if self.later is not None:
            return self.later.optimizer_steps
        return max((part.optimizer_steps for part in self.sources), default=0)

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


def resumed_plan(
    call: str, part: TablePart, base: SavedTable, later: LaterTable | None
) -> TablePlan:
    """Plan how a part resumes from a checkpoint and the changes since then, without conversions.

    Args:
        call: prefix of errors.
        part: part of the model.
        base: the table in the checkpoint.
        later: the changes; None: there are none.

    Raises:
        ValueError: the table differs from the one that was trained.
    """
    of_saved = [base] if later is None else [base, later.saved]
    for saved in of_saved:
        _check_same(call, part, saved)
    if later is None:
        return plan_of(part, base, optimizer_state=True, on_missing_state="error")
    state = () if part.optimizer is None else part.optimizer.state
    counts = later.counted is not None or bool(later.sketches)
    saved = later.with_files_of(base)
    return TablePlan(part, saved, state, tuple(saved.scores), counts, (), later)


def _check_same(call: str, part: TablePart, saved: SavedTable) -> None:
    """Raise ValueError if a part cannot resume from a table. Capacities and ttl may differ."""
    policy, optimizer = part.config.policy.description(), part.optimizer
    in_budget = part.group.config.memory_budget is not None
    own = {
        "embedding_dim": part.embedding_dim,
        "dtype": part.dtype,
        "padding_idx": part.config.padding_idx,
        "optimizer": None if optimizer is None else optimizer.description(),
        "scores": list(score_words_of([part.config], in_budget)),
        "half_life": policy.get("half_life"),
        "admission_half_life": policy.get("admission_half_life"),
        "admission": _kind_of(policy["admission"]),
    }
    fields = ("embedding_dim", "dtype", "padding_idx", "optimizer", "scores")
    logged: dict[str, Any] = {field: getattr(saved, field) for field in fields}
    logged["half_life"] = saved.policy.get("half_life")
    logged["admission_half_life"] = saved.policy.get("admission_half_life")
    logged["admission"] = _kind_of(saved.policy.get("admission"))
    differing = [
        f"{field} {logged[field]!r} in the log and {own[field]!r} in the model"
        for field in own
        if own[field] != logged[field]
    ]
    blocks = optimizer is not None and any(of.dtype == torch.uint8 for of in optimizer.state)
    if blocks and part.columns not in shards_of(saved):
        differing.append(f"8-bit state of columns {shards_of(saved)}, not of {part.columns}")
    if differing:
        raise ValueError(
            f"{call}: table {part.name!r} has {'; '.join(differing)}: give the model that was "
            "published, or begin a new log"
        )


def _kind_of(admission: str | None) -> str | None:
    """Return the class of a rule of admission, of which thresholds and sizes may differ."""
    return None if admission is None else admission.partition("(")[0]


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


__all__ = ["OnMissingState", "TablePlan", "plan_of", "resumed_plan"]
