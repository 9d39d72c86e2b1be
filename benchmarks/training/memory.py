"""Bytes of an id by optimizer and dtypes: counted by tables, and by what is documented."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.command import is_selected
from common.id_streams import distinct_ids
from common.report import Row, quantity
from training.variants import (
    BASE,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    OPTIMIZERS,
    SHORT,
    UINT8,
    Variant,
    state_dtypes,
)

import torch_dynemb as td

MEMORY_DIM = 128
MEMORY_TARGET = 0.52  # of float32's bytes: row-wise Adagrad, D=128, without the index
GENERATION_BYTES, SCALE_BYTES, SCALE_COLUMNS = 4, 4, 128


@dataclass(frozen=True)
class IdBytes:
    """Bytes of an id: ``rows`` with generations, ``state`` of the optimizer, ``index``."""

    rows: float
    state: float
    index: float

    @property
    def total(self) -> float:
        return self.rows + self.state + self.index


def measured_bytes(variant: Variant, dim: int, ids: int) -> IdBytes:
    """Return ``module.memory()`` of a table with so many ids."""
    module = variant.table(dim)
    module.group.insert(0, distinct_ids(0, ids))
    memory = module.memory()
    return IdBytes(memory["rows"] / ids, memory["state"] / ids, memory["index"] / ids)


def formula_bytes(variant: Variant, dim: int) -> int:
    """Bytes of a row and its state by what the documentation says of them."""
    kind = type(variant.config())
    of_weights = dim * variant.state.itemsize
    if variant.state == UINT8:  # columns in words of 4
        of_weights = -(-dim // 4) * 4 + -(-dim // SCALE_COLUMNS) * SCALE_BYTES
    counters = 1 if issubclass(kind, (td.SmartDecayAdam, td.RowWiseRMSprop)) else 0
    state = len(kind.element_state) * of_weights + 4 * (len(kind.row_state) + counters)
    return dim * variant.rows.itemsize + GENERATION_BYTES + state


def memory_rows(bench: str, ids: int, only: list[str]) -> Iterator[Row | str]:
    """Bytes of an id for every combination, beside what the formula gives."""
    for optimizer in OPTIMIZERS:
        for rows in (FLOAT32, BFLOAT16, FLOAT16):
            for state in state_dtypes(optimizer):
                variant = Variant(optimizer, rows, state)
                case = f"rows and state of an id, {variant.name} D={MEMORY_DIM}"
                if not is_selected(only, case, "target"):
                    continue
                yield case
                measured = measured_bytes(variant, MEMORY_DIM, ids)
                yield quantity(
                    bench,
                    case,
                    measured.rows + measured.state,
                    "bytes",
                    target=formula_bytes(variant, MEMORY_DIM),
                    rows_bytes=measured.rows,
                    state_bytes=measured.state,
                    index_bytes=measured.index,
                    total_bytes=measured.total,
                    ids=ids,
                )
    case = f"rows and state, bf16 against fp32 rows, {BASE} D={MEMORY_DIM}"
    if is_selected(only, case, "target"):
        low, full = (
            measured_bytes(Variant(BASE, rows), MEMORY_DIM, ids) for rows in (BFLOAT16, FLOAT32)
        )
        ratio = (low.rows + low.state) / (full.rows + full.state)
        yield quantity(bench, case, ratio, "x", target=MEMORY_TARGET, ids=ids)


USEFUL = (
    Variant("SGD"),
    Variant("SGD", BFLOAT16),
    Variant("RowWiseAdagrad"),
    Variant("RowWiseAdagrad", BFLOAT16),
    Variant("Adagrad"),
    Variant("Adagrad", BFLOAT16, BFLOAT16),
    Variant("PartialRowWiseAdam"),
    Variant("PartialRowWiseAdam", BFLOAT16, UINT8),
    Variant("Adam"),
    Variant("Adam", state=BFLOAT16),
    Variant("Adam", state=UINT8),
    Variant("Adam", BFLOAT16, BFLOAT16),
    Variant("Adam", BFLOAT16, UINT8),
    Variant("AMSGrad"),
)


def memory_table(ids: int) -> str:
    """Bytes of an id for :data:`USEFUL` combinations, in Markdown."""
    lines = ["| optimizer | rows | state | bytes of rows | of state | of the index | all |"]
    lines += ["|" + "---|" * 7]
    for variant in USEFUL:
        measured = measured_bytes(variant, MEMORY_DIM, ids)
        kind = type(variant.config())
        state = SHORT[variant.state] if kind.element_state else "-"
        if kind.row_state:
            state = f"{state}, one by row" if kind.element_state else "one by row"
        cells = [kind.__name__, SHORT[variant.rows], state]
        cells += [f"{n:.0f}" for n in (measured.rows, measured.state, measured.index)]
        lines.append(f"| {' | '.join(cells)} | {measured.total:.0f} |")
    return "\n".join(lines)
