"""Source that reads a table from a dump of NVIDIA's DynamicEmb."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer, text
from torch_dynemb.files.locations import checked_path
from torch_dynemb.migrate.dynamicemb_layout import (
    OPTIMIZERS,
    ROW_COLUMNS,
    ROW_DTYPE,
    SECOND,
    STATE_DTYPE,
    DumpedOptimizer,
    dtype_in,
    files_of_all_ranks,
    options_file,
    read_options,
)
from torch_dynemb.migrate.files import Path_, RawFile
from torch_dynemb.migrate.raw_files import FLOAT_DTYPES
from torch_dynemb.migrate.source import Source, SourceRows
from torch_dynemb.table import RowBatch
from torch_dynemb.table.content import CountedIds

_KEPT_BY = {"lru": ("timestamp",), "lfu": ("frequency",), "customized": ("custom",)}


class _RankFiles(NamedTuple):
    """Files of one rank."""

    keys: Path
    values: Path
    scores: Path | None
    state: Path | None


class DumpSource(Source):
    """Table of a dump, see :func:`read_dynamicemb`.

    Attributes:
        options: content of its JSON file.
        words: number of scores of a row.
        has_state_files: whether it was dumped with ``optim=True``.
    """

    def __init__(
        self,
        folder: Path,
        table: str,
        *,
        scores: Sequence[str] | None,
        now: int,
        counter: bool,
        value_dtype: torch.dtype | None = None,
    ) -> None:
        self._folder, self._table = folder, table
        described_in = options_file(folder, table)
        self.options = read_options(described_in)
        self._dtype = value_dtype or dtype_in(self.options, ROW_DTYPE, described_in)
        keys = files_of_all_ranks(folder, table, "emb_keys")
        if keys is None:
            raise FileNotFoundError(
                f"read_dynamicemb: {folder} has no files {table}_emb_keys.rank_*: give the folder "
                "of the collection, such as PATH/model.sparse, and the name of a table"
            )
        others = {
            item: files_of_all_ranks(folder, table, item) for item in ("emb_values", "emb_scores")
        }
        others["state"] = files_of_all_ranks(folder, table, "emb_opt_values") or files_of_all_ranks(
            folder, table, "opt_values"
        )
        for item, found in others.items():
            if found is None and item == "emb_values":
                raise FileNotFoundError(f"read_dynamicemb: {folder} has no {table}_{item}.rank_*")
            if found is not None and len(found) != len(keys):
                raise ValueError(
                    f"read_dynamicemb: {folder} has {len(keys)} files of keys of {table!r}, but "
                    f"{len(found)} of {item}: it is incomplete, or two dumps lie there"
                )
        values, of_scores, of_state = (
            others[item] for item in ("emb_values", "emb_scores", "state")
        )
        assert values is not None
        self._parts = [
            _RankFiles(
                keys[k],
                values[k],
                None if of_scores is None else of_scores[k],
                None if of_state is None else of_state[k],
            )
            for k in range(len(keys))
        ]
        self.has_state_files = of_state is not None
        self._state_dtype = torch.float32
        if of_state is not None:
            self._state_dtype = dtype_in(self.options, STATE_DTYPE, described_in)
        counts = [part.keys.stat().st_size // 8 for part in self._parts]
        self._dim = self._row_columns(
            "emb_values", [part.values for part in self._parts], counts, self._dtype.itemsize
        )
        dim = self._option(ROW_COLUMNS)
        if None not in (dim, self._dim) and dim != self._dim:
            raise ValueError(
                f"{values[0]} has rows of {self._dim} values of {self._dtype}, but "
                f"{described_in} has {ROW_COLUMNS} {dim}: one of them is of another dump"
            )
        words = self._row_columns(
            "emb_scores", [part.scores for part in self._parts], counts, itemsize=8
        )
        self.words = words or 0
        self._words = self._score_names(scores, words)
        self._optimizer = self._dumped_optimizer(counts)
        self._now = now
        step = self.options.get("step_score")
        kept = tuple(word for word in self._words if word != "")
        super().__init__(
            f"{folder}: table {table!r}",
            self._dim,
            state=self._optimizer.names,
            scores=kept,
            optimizer_steps=self._option("iters"),
            step=None if step is None else integer(f"{folder}: step_score", step, least=0),
            now=now if "timestamp" in kept else None,
        )
        self._counter = counter

    def _row_columns(
        self, item: str, paths: Sequence[Path | None], counts: Sequence[int], itemsize: int
    ) -> int | None:
        """Compute values of a row from sizes of files; None: no files, or no rows."""
        found: int | None = None
        for path, count in zip(paths, counts, strict=True):
            if path is None:
                return None
            size = path.stat().st_size
            if count == 0 and size == 0:
                continue
            columns, rest = divmod(size, max(1, count) * itemsize)
            if count == 0 or rest or columns == 0 or (found is not None and columns != found):
                raise ValueError(
                    f"{path} has {size} bytes, expected rows of {found or 'some'} values of "
                    f"{itemsize} bytes for {count} keys: {self._table}_{item} or the keys are cut "
                    "off, or of another dtype: give read_dynamicemb value_dtype"
                )
            found = columns
        return found

    def _score_names(self, given: Sequence[str] | None, words: int | None) -> tuple[str, ...]:
        if words is None:
            return ()
        if given is None:
            strategy = str(self.options.get("evict_strategy", ""))
            known = strategy.rpartition(".")[2].lower().removeprefix("k")
            given = _KEPT_BY.get(known, ())
            if known == "customized" and "step_score" in self.options:
                given = ("step",)
            if known and len(given) != words:
                raise ValueError(
                    f"{self._folder}: table {self._table!r} has {words} scores of a row and "
                    f"evict_strategy {strategy!r}: give scores=, their names in the order of its "
                    "score_strategy, such as ('timestamp', 'frequency')"
                )
            # dumps of 2025 do not name their scores
            return tuple(given) if given else ("",) * words
        names = tuple(text("read_dynamicemb: a name of scores", name) for name in given)
        unknown = set(names) - {"step", "timestamp", "frequency", "custom"}
        if unknown or len(names) != words or len(set(names)) != len(names):
            raise ValueError(
                f"read_dynamicemb: scores is {names}, but {self._folder} has {words} scores of a "
                f"row of {self._table!r}: give as many of step, timestamp, frequency and custom"
            )
        return names

    def _dumped_optimizer(self, counts: Sequence[int]) -> DumpedOptimizer:
        paths = [part.state for part in self._parts]
        kind = self.options.get("opt_type")
        stateless = kind is None or (kind in OPTIMIZERS and not OPTIMIZERS[kind].names)
        if stateless and all(path is None or path.stat().st_size == 0 for path in paths):
            return DumpedOptimizer(())  # a dump of SGD with optim=True has empty files
        columns = self._row_columns("emb_opt_values", paths, counts, self._state_dtype.itemsize)
        if columns is None or self._dim is None:
            return DumpedOptimizer(())
        where = f"{paths[0]}: table {self._table!r}"
        if kind is None:  # dumps of 2025 do not name it
            adam = {"iters", "beta1", "beta2"} <= self.options.keys()
            kind = "adam" if adam else "exact_adagrad"
            if not adam and columns != self._dim:
                kind = "exact_row_wise_adagrad"
        if kind not in OPTIMIZERS:
            raise ValueError(
                f"{where}: opt_type is {kind!r}, which is not known here, only "
                f"{sorted(OPTIMIZERS)}: remove the files of its state to load rows alone"
            )
        optimizer = OPTIMIZERS[kind]
        # dumps of 2025 have 16 bytes for row-wise Adagrad, of which the first value counts
        padded = optimizer.per_row and columns in (4, 8)
        if columns != optimizer.columns(self._dim) and not padded:
            raise ValueError(
                f"{where} has {columns} values of state of a row, but {kind} of rows with "
                f"{self._dim} columns has {optimizer.columns(self._dim)}: it is damaged"
            )
        self._state_columns = columns
        return optimizer

    def _option(self, name: str) -> int | None:
        value = self.options.get(name)
        where = f"{options_file(self._folder, self._table)}: {name}"
        return None if value is None else integer(where, value, least=0)

    def batches(self, size: int) -> Iterator[SourceRows]:
        for part in self._parts:
            with ExitStack() as stack:
                keys = stack.enter_context(RawFile(part.keys, torch.int64))
                if keys.rows == 0:
                    continue
                assert self._dim is not None
                opened: dict[str, RawFile] = {"rows": RawFile(part.values, self._dtype, self._dim)}
                if part.scores is not None and self.scores:
                    columns = len(self._words)
                    opened["scores"] = RawFile(part.scores, torch.int64, columns)
                if part.state is not None and self.state:
                    opened["state"] = RawFile(part.state, self._state_dtype, self._state_columns)
                for file in opened.values():
                    if stack.enter_context(file).rows != keys.rows:
                        raise ValueError(
                            f"{file.path} has {file.rows} rows, but {keys.path} has {keys.rows} "
                            "keys: one of them is cut off"
                        )
                for begin in range(0, keys.rows, size):
                    end = min(begin + size, keys.rows)
                    read = {name: file.read(begin, end) for name, file in opened.items()}
                    batch = RowBatch(
                        keys.read(begin, end),
                        read["rows"],
                        self._state_of(read.get("state")),
                        self._scores_of(read.get("scores")),
                    )
                    yield SourceRows(batch, str(part.values), begin)

    def _state_of(self, values: Tensor | None) -> dict[str, Tensor]:
        if values is None:
            return {}
        assert self._dim is not None
        width = 1 if self._optimizer.per_row else self._dim
        parts = values[:, : self._optimizer.columns(self._dim)].split(width, 1)
        return dict(zip(self._optimizer.names, parts, strict=True))

    def _scores_of(self, values: Tensor | None) -> dict[str, Tensor]:
        if values is None:
            return {}
        result = dict(zip(self._words, values.unbind(1), strict=True))
        if "timestamp" in result:
            times = result["timestamp"]
            # a single score is an age; beside others it is a time
            ages = len(self._words) == 1
            result["timestamp"] = (
                (self._now - times // SECOND).clamp(min=0) if ages else times // SECOND
            )
        return {word: of.contiguous() for word, of in result.items() if word != ""}

    def waiting(self) -> CountedIds | None:
        if not self._counter:
            return None
        keys = files_of_all_ranks(self._folder, self._table, "counter_keys")
        counts = files_of_all_ranks(self._folder, self._table, "counter_frequencies")
        if keys is None or counts is None or len(keys) != len(counts):
            raise FileNotFoundError(
                f"read_dynamicemb: {self._folder} has no {self._table}_counter_keys.rank_* with as "
                f"many {self._table}_counter_frequencies.rank_*: give counter=False"
            )
        found: list[list[Tensor]] = [
            [torch.empty(0, dtype=torch.int64, device="cpu")] for _ in range(2)
        ]
        for of_keys, of_counts in zip(keys, counts, strict=True):
            with RawFile(of_keys, torch.int64) as ids, RawFile(of_counts, torch.int64) as numbers:
                if ids.rows != numbers.rows:
                    raise ValueError(
                        f"{of_counts} has {numbers.rows} counts, but {of_keys} has {ids.rows} "
                        "keys: one of them is cut off"
                    )
                found[0].append(ids.read(0, ids.rows))
                found[1].append(numbers.read(0, numbers.rows))
        return CountedIds(torch.cat(found[0]), torch.cat(found[1]))


def read_dynamicemb(
    folder: Path_,
    table: str,
    *,
    scores: Sequence[str] | None = None,
    counter: bool = False,
    now: int | None = None,
    value_dtype: torch.dtype | None = None,
) -> Source:
    """Read a table from a dump of NVIDIA's DynamicEmb, as a source for :func:`load`.

    Optimizer state is read if the dump has it. The files of all ranks are read, so any number of
    ranks can load them. :func:`torch_dynemb.compat.dynamicemb.DynamicEmbLoad` loads all tables of
    a model. Scores are converted:

    * TIMESTAMP: ages in nanoseconds become times of the last lookup, in seconds.
    * LFU: frequencies.
    * STEP: steps.
    * CUSTOMIZED: custom scores.

    Args:
        folder: of the collection: ``DynamicEmbDump(path, model)`` writes ``path/model.NAME`` for
            the module NAME of the model.
        table: name of the table.
        scores: names of the scores of a row, in the order of the table's ``score_strategy``:
            ``step``, ``timestamp``, ``frequency`` or ``custom``. Default: as the dump says, which
            is enough if a row has one score.
        counter: also read counts of ids that wait for admission.
        now: Unix time in seconds from which ages are counted; default: the current time.
        value_dtype: of rows: float32, float64, float16 or bfloat16. Default: the
            ``embedding_dtype`` in the dump's JSON, or float32 in older dumps, which have none.
            Optimizer state has the ``optim_state_dtype`` of the JSON, or float32.

    Returns:
        The source. Only sizes of files have been read.

    Raises:
        TypeError: an argument has a wrong type.
        FileNotFoundError: the dump has no such table.
        ValueError: files are missing or cut off, or name unknown options.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> folder = tempfile.TemporaryDirectory()
        >>> part = ".rank_0.world_size_1"
        >>> torch.tensor([7, 8]).numpy().tofile(folder.name + "/users_emb_keys" + part)
        >>> torch.ones(2, 4).numpy().tofile(folder.name + "/users_emb_values" + part)
        >>> users = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> migrate.load(users, migrate.read_dynamicemb(folder.name, "users"))["embedding"].ids
        2
        >>> folder.cleanup()
    """
    path = checked_path("read_dynamicemb", folder)
    name = text("read_dynamicemb: table", table)
    at = int(time.time()) if now is None else integer("read_dynamicemb: now", now, least=0)
    if value_dtype is not None and value_dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"read_dynamicemb: value_dtype is {described(value_dtype)}, expected one of "
            f"{list(map(str, FLOAT_DTYPES))}"
        )
    return DumpSource(path, name, scores=scores, now=at, counter=counter, value_dtype=value_dtype)


__all__ = ["DumpSource", "read_dynamicemb"]
