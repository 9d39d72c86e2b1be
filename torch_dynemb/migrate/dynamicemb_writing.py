"""Writing of tables in the format of NVIDIA's DynamicEmb, see ``dynamicemb_layout.py``.

All ranks write into the files of rank 0. DynamicEmb's loader keeps the ids that each rank owns,
so any number of ranks can read one file. Files by rank would lose negative ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.migrate.dynamicemb_layout import (
    COUNTER_ITEMS,
    ITEMS,
    OPTIMIZERS,
    ROW_COLUMNS,
    ROW_DTYPE,
    SECOND,
    STATE_DTYPE,
    dtype_name,
    files_of,
    options_file,
    table_file,
)
from torch_dynemb.ops.columns import Clock, Hyper
from torch_dynemb.optim import SGD, Adagrad, Adam, Ftrl, RowWiseAdagrad
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.policy.admission import AdmitFrequent
from torch_dynemb.rows.read import batches_at
from torch_dynemb.table import content
from torch_dynemb.table.clock import next_now

_ROWS = 1 << 16  # rows of a write
_UNFINISHED = ".tmp"
_KINDS = {SGD: "sgd", Adam: "adam", Adagrad: "exact_adagrad", Ftrl: "ftrl"}
_KINDS |= {RowWiseAdagrad: "exact_row_wise_adagrad"}
_STRATEGIES = {"timestamp": "KLru", "frequency": "KLfu", "step": "KCustomized"}
_STRATEGIES |= {"custom": "KCustomized"}


class DumpOptions(NamedTuple):
    """Options of a dump.

    Attributes:
        optim: whether optimizer state is dumped.
        counter: whether ids that wait for admission are dumped.
        native_dtype: whether rows and state keep their dtype, and do not become float32.
    """

    optim: bool
    counter: bool
    native_dtype: bool = False


class _Shape(NamedTuple):
    """Summary of a part of a table for other ranks.

    Attributes:
        slots: first of its slots of ids.
        first_column, columns: its columns.
        ids, counted: numbers of its ids, and of its ids that wait for admission.
        sum: checksum of its ids in their order.
        clock: of its group.
        steps: of its optimizer.
    """

    slots: int
    first_column: int
    columns: int
    ids: int
    counted: int
    sum: int
    clock: int
    steps: int


def dump_kind(optimizer: OptimizerConfig | None) -> str | None:
    """Return DynamicEmb's name of an optimizer; None: it has no such optimizer, or other state.

    Args:
        optimizer: of a table.
    """
    kind = None if optimizer is None else _KINDS.get(type(optimizer))
    if optimizer is None or kind is None:
        return None
    same = {tensor.name for tensor in optimizer.state} == set(OPTIMIZERS[kind].names)
    floats = all(tensor.dtype.is_floating_point for tensor in optimizer.state)
    return kind if same and floats else None


def dumped_scores(part: TablePart) -> tuple[str, ...]:
    """Return the names of a table's scores in a dump, in their order.

    Two scores are DynamicEmb's compound of TIMESTAMP and LFU. Otherwise only the score that decides
    eviction is dumped.
    """
    kept = tuple(word for word in part.config.policy.scores if word != "none")
    return ("timestamp", "frequency") if set(kept) == {"timestamp", "frequency"} else kept[:1]


def check_dumpable(call: str, part: TablePart, options: DumpOptions) -> None:
    """Raise ValueError if a dump cannot express the requested content.

    Args:
        call: prefix of error messages.
        part: of a table.
        options: of the dump.
    """
    where = f"{call}: table {part.name!r}"
    if part.packed:
        raise ValueError(f"{where} has rows of 8 bits, which a dump cannot have")
    if options.optim and part.trained == "now" and dump_kind(part.optimizer) is None:
        raise ValueError(
            f"{where} is trained by {part.optimizer}, but DynamicEmb has only "
            "SGD, Adam, Adagrad, RowWiseAdagrad and Ftrl with state of floats: give optim=False"
        )
    by_row = part.optimizer is not None and any(of.per_row for of in part.optimizer.state)
    if options.optim and by_row and len(part.columns) < part.embedding_dim:
        raise ValueError(
            f"{where} is sharded by columns and keeps state by row, of which each shard has its "
            "own: shard it by rows, or give optim=False"
        )
    if "decayed" in dumped_scores(part):
        raise ValueError(
            f"{where} is evicted by decayed counts, a score that DynamicEmb does not have: save it "
            "with torch_dynemb.checkpoint.save"
        )
    rule = part.config.policy.admission
    if options.counter and part.config.policy.admission_ticks != 0:
        raise ValueError(
            f"{where} has admission={rule!r}, and DynamicEmb has no counts that decay: give "
            "counter=False"
        )
    if options.counter and rule is not None and not isinstance(rule, AdmitFrequent):
        raise ValueError(
            f"{where} has admission={rule!r}, which does not count ids one by one: give "
            "counter=False"
        )


def dump_table(
    ranks: Ranks, folder: Path, table: str, parts: Sequence[TablePart], options: DumpOptions
) -> list[Path]:
    """Write a table under temporary names; all ranks call it together.

    Args:
        ranks: that have the table.
        folder: existing folder of the collection.
        table: its name in the collection.
        parts: parts on this rank.
        options: of the dump.

    Returns:
        The final paths of the files.

    Raises:
        ValueError: column shards of the table have different ids.
        OSError: the disk is full, or fails.
    """
    entries = ranks.run(
        lambda: [content.sorted_entries(part.group.tables, part.table) for part in parts]
    )
    counts = [
        content.read_counts(part.group.tables, part.table) if options.counter else None
        for part in parts
    ]
    shapes = [
        _Shape(
            part.ids.begin,
            part.first_column,
            len(part.columns),
            of.ids.numel(),
            0 if counted is None else counted.ids.numel(),
            ops.crc32c(of.ids.cpu()),
            int(part.group.index.clock[Clock.STEP]),
            content.optimizer_steps(part.group.tables, part.table),
        )
        for part, of, counted in zip(parts, entries, counts, strict=True)
    ]
    told = [shape for of_rank in ranks.gather(shapes) for shape in of_rank]
    firsts = sorted({shape.slots: shape for shape in told if shape.first_column == 0}.values())
    for shape in told:
        same = next(first for first in firsts if first.slots == shape.slots)
        if (shape.ids, shape.sum) != (same.ids, same.sum):
            raise ValueError(
                f"DynamicEmbDump: column shards of table {table!r} have other ids, because they "
                "have evicted others: shard a table that evicts by rows"
            )
    described = ranks.gather([_Described.of(part, options) for part in parts])
    of_table = next(of for of_rank in described for of in of_rank)
    total, waiting = sum(of.ids for of in firsts), sum(of.counted for of in firsts)
    files = _files_of(folder, table, of_table, options, total, waiting)

    def create() -> None:
        for file in files.values():
            file.create()

    ranks.on_first(create)

    def write() -> None:
        for part, of, counted, shape in zip(parts, entries, counts, shapes, strict=True):
            begin = sum(first.ids for first in firsts if first.slots < shape.slots)
            _write_part(files, part, of, of_table.state, begin)
            if counted is not None and shape.first_column == 0:
                begin = sum(first.counted for first in firsts if first.slots < shape.slots)
                files["counter_keys"].write(begin, 0, counted.ids[:, None])
                files["counter_frequencies"].write(begin, 0, counted.counts[:, None])

    ranks.run(write)

    def end() -> None:
        for file in files.values():
            file.sync()
        text = {**of_table.options, "dist_type": "roundrobin"}
        if "iters" in text:
            text["iters"] = max(shape.steps for shape in told)
        if of_table.scores == ("step",):
            text["step_score"] = max(shape.clock for shape in told)
        path = options_file(folder, table)
        unfinished(path).write_text(json.dumps(text, indent=4))

    ranks.on_first(end)
    return [*(file.path for file in files.values()), options_file(folder, table)]


def unfinished(path: Path) -> Path:
    """Return the name of a file while it is written."""
    return path.with_name(path.name + _UNFINISHED)


def unfinished_of(folder: Path, table: str) -> list[Path]:
    """List the temporary files that a dump of a table has written.

    Args:
        folder: of the collection.
        table: its name there.
    """
    options = unfinished(options_file(folder, table))
    found = [options] if options.exists() else []
    for item in (*ITEMS, *COUNTER_ITEMS):
        found += files_of(folder, table, item, _UNFINISHED).values()
    return found


class _Described(NamedTuple):
    """Properties that all parts of a table share.

    Attributes:
        dim: columns of the whole table.
        state: names of the dumped state.
        per_row: whether a row has one value of each.
        scores: names of the dumped scores.
        options: content of the JSON, without counts.
        counts: whether waiting ids are counted exactly.
        row_dtype, state_dtype: of the files.
    """

    dim: int
    state: tuple[str, ...]
    per_row: bool
    scores: tuple[str, ...]
    options: dict[str, Any]
    counts: bool
    row_dtype: torch.dtype
    state_dtype: torch.dtype

    @staticmethod
    def of(part: TablePart, options: DumpOptions) -> _Described:
        kind, scores = dump_kind(part.optimizer), dumped_scores(part)
        dumped = OPTIMIZERS[kind] if options.optim and kind is not None else OPTIMIZERS["sgd"]
        text: dict[str, Any] = {}
        if kind is not None:
            hyper = part.group.rows.hyper[part.table]
            text = {"opt_type": kind, "lr": float(hyper[Hyper.LR])}
            if kind == "adam":
                text |= {"iters": 0, "beta1": float(hyper[Hyper.BETA1])}
                text |= {"beta2": float(hyper[Hyper.BETA2]), "eps": float(hyper[Hyper.EPS])}
                text["weight_decay"] = float(hyper[Hyper.WEIGHT_DECAY])
            elif kind != "sgd":
                text["initial_accumulator_value"] = float(hyper[Hyper.INITIAL_STATE])
            if kind == "ftrl":
                text |= {"learning_rate_power": -0.5, "ftrl_beta": float(hyper[Hyper.BETA])}
                text |= {"l1_reg": float(hyper[Hyper.L1]), "l2_reg": float(hyper[Hyper.RIDGE])}
            elif "adagrad" in kind:
                text["eps"] = float(hyper[Hyper.EPS])
        if len(scores) == 1:
            text["evict_strategy"] = f"EvictStrategy.{_STRATEGIES[scores[0]]}"
        counts = options.counter and isinstance(part.config.policy.admission, AdmitFrequent)
        row_dtype = state_dtype = torch.float32
        if options.native_dtype:
            row_dtype = part.config.dtype
            of_state = {of.dtype for of in part.optimizer.state} if part.optimizer else set()
            state_dtype = of_state.pop() if len(of_state) == 1 else torch.float32
        text |= {ROW_DTYPE: dtype_name(row_dtype), ROW_COLUMNS: part.embedding_dim}
        text[STATE_DTYPE] = dtype_name(state_dtype)
        return _Described(
            part.embedding_dim,
            dumped.names,
            dumped.per_row,
            scores,
            text,
            counts,
            row_dtype,
            state_dtype,
        )


class _File:
    """File with an array without a header, into which ranks write their rows and columns.

    Args:
        path: its final path.
        rows, columns: of the array.
        dtype: of its elements.
    """

    def __init__(self, path: Path, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.path, self._dtype = path, dtype
        self._shape = rows, columns
        self._mapped: Tensor | None = None

    def create(self) -> None:
        """Create the file with its final size: a full disk fails now."""
        with unfinished(self.path).open("wb") as file:
            size = self._shape[0] * self._shape[1] * self._dtype.itemsize
            if size > 0:
                os.posix_fallocate(file.fileno(), 0, size)

    def write(self, row: int, column: int, values: Tensor) -> None:
        """Write some rows and columns.

        Args:
            row, column: the first ones.
            values: [n, k].
        """
        if values.numel() == 0:
            return
        if self._mapped is None:
            count = self._shape[0] * self._shape[1]
            name = str(unfinished(self.path))
            self._mapped = torch.from_file(name, shared=True, size=count, dtype=self._dtype)
        rows = slice(row, row + values.shape[0])
        columns = slice(column, column + values.shape[1])
        self._mapped.view(self._shape)[rows, columns] = values.to("cpu", self._dtype)

    def sync(self) -> None:
        """Wait until the file is on the disk."""
        with unfinished(self.path).open("rb") as file:
            os.fsync(file.fileno())


def _files_of(
    folder: Path, table: str, of: _Described, options: DumpOptions, rows: int, waiting: int
) -> dict[str, _File]:
    """Return the files of a table by content."""
    shapes = {"emb_keys": (rows, 1, torch.int64), "emb_values": (rows, of.dim, of.row_dtype)}
    if of.scores:
        shapes["emb_scores"] = rows, len(of.scores), torch.int64
    if options.optim:  # without columns for SGD, as DynamicEmb writes it
        width = len(of.state) * (1 if of.per_row else of.dim)
        shapes["emb_opt_values"] = rows, width, of.state_dtype
    if of.counts:
        shapes["counter_keys"] = shapes["counter_frequencies"] = waiting, 1, torch.int64
    return {item: _File(table_file(folder, table, item), *shape) for item, shape in shapes.items()}


def _write_part(
    files: dict[str, _File],
    part: TablePart,
    entries: content.TableEntries,
    state: tuple[str, ...],
    row: int,
) -> None:
    """Write the rows of a part.

    Args:
        files: by content.
        part: of the table.
        entries: its ids, ascending.
        state: names of the dumped state, in the order of the file.
        row: its first row in the files.
    """
    first, words = part.first_column, dumped_scores(part)
    for batch in batches_at(part.group.tables, part.table, entries, _ROWS, scores=words):
        files["emb_values"].write(row, first, batch.rows)
        if "emb_opt_values" in files:
            for number, name in enumerate(state):
                column = number * part.embedding_dim + first
                files["emb_opt_values"].write(row, column, batch.state[name])
        if first == 0:
            files["emb_keys"].write(row, 0, batch.ids[:, None])
            if "emb_scores" in files:
                scores = torch.stack([batch.scores[word] for word in words], 1)
                files["emb_scores"].write(row, 0, _dumped(part, scores))
        row += batch.ids.numel()


def _dumped(part: TablePart, scores: Tensor) -> Tensor:
    """Convert scores to DynamicEmb's: a time is an age, or a time beside frequencies, in ns.

    Args:
        part: of the table.
        scores: int64 [n, words].
    """
    names = dumped_scores(part)
    if "timestamp" not in names:
        return scores
    result, word = scores.clone(), names.index("timestamp")
    if len(names) == 1:
        result[:, word] = next_now(part.group.tables) - result[:, word]
    result[:, word] = result[:, word].clamp(min=0) * SECOND
    return result


__all__ = [
    "DumpOptions",
    "check_dumpable",
    "dump_kind",
    "dump_table",
    "dumped_scores",
    "unfinished",
]
