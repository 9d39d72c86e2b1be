"""Files and names of dumps of NVIDIA's DynamicEmb.

``DynamicEmbDump`` writes a folder for each collection of the model. Its files have no headers:

* ``TABLE_emb_keys.rank_R.world_size_W``: int64 [n]
* ``TABLE_emb_values...``: [n, dim], of the dtype of the options
* ``TABLE_emb_scores...``: int64 [n, scores]
* ``TABLE_emb_opt_values...``: [n, columns], of the dtype of the options; dumps of 2025:
  ``TABLE_opt_values...``
* ``TABLE_counter_keys...`` and ``TABLE_counter_frequencies...``: int64 [n]
* ``TABLE_opt_args.json``: options. Since September 2026 ``embedding_dtype``, ``embedding_dim`` and
  ``optim_state_dtype`` are among them, such as ``"bfloat16"``; before, all values are float32.
  Row-wise Adagrad keeps float32 in any table, other optimizers the dtype of the rows.

See ``dump_load.py``, ``key_value_table.py`` and ``optimizer.py`` in corelib/dynamicemb of
github.com/NVIDIA/recsys-examples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_dynemb.files.bounded_json import json_of
from torch_dynemb.migrate.raw_files import FLOAT_DTYPES

SECOND = 10**9  # DynamicEmb reads times from a GPU's clock, in nanoseconds
# files that a dump of a table may have; state has two names
ITEMS = ("emb_keys", "emb_values", "emb_scores", "emb_opt_values", "opt_values")
COUNTER_ITEMS = ("counter_keys", "counter_frequencies")
ROW_DTYPE, ROW_COLUMNS, STATE_DTYPE = "embedding_dtype", "embedding_dim", "optim_state_dtype"
_FILE = re.compile(r"\.rank_(\d+)\.world_size_(\d+)")


class DumpedOptimizer(NamedTuple):
    """Optimizer state in a dump.

    Attributes:
        names: names of the state in this library, in the order of the dump.
        per_row: whether a row has one value of each.
    """

    names: tuple[str, ...]
    per_row: bool = False

    def columns(self, dim: int) -> int:
        """Return values of a row."""
        return len(self.names) * (1 if self.per_row else dim)


# opt_type -> state
OPTIMIZERS = {
    "sgd": DumpedOptimizer(()),
    "exact_sgd": DumpedOptimizer(()),
    "adam": DumpedOptimizer(("exp_avg", "exp_avg_sq")),
    "exact_adagrad": DumpedOptimizer(("sum",)),
    "exact_row_wise_adagrad": DumpedOptimizer(("sum",), per_row=True),
    "ftrl": DumpedOptimizer(("linear", "sum")),
}


def table_file(folder: Path, table: str, item: str, rank: int = 0, ranks: int = 1) -> Path:
    """Return the path of a file of a dump.

    Args:
        folder: of the collection.
        table: its name.
        item: such as ``emb_keys``.
        rank, ranks: the rank that wrote it, and the number of ranks.
    """
    return folder / f"{table}_{item}.rank_{rank}.world_size_{ranks}"


def options_file(folder: Path, table: str) -> Path:
    """Return the path of the JSON of a table."""
    return folder / f"{table}_opt_args.json"


def read_options(path: Path) -> Mapping[str, Any]:
    """Read the JSON of a table; empty without a file, as in old dumps without state.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        options = json_of(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return options


def dtype_name(dtype: torch.dtype) -> str:
    """Return DynamicEmb's name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_in(options: Mapping[str, Any], name: str, where: Path) -> torch.dtype:
    """Return a dtype of the options; float32 if they lack it, as in older dumps.

    Args:
        options: of :func:`read_options`.
        name: ROW_DTYPE or STATE_DTYPE.
        where: the file with the options.

    Raises:
        ValueError: the dtype is not read.
    """
    given = options.get(name, "float32")
    known = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}
    if given in known:
        return known[given]
    of_rows = name == ROW_DTYPE
    remedy = "give read_dynamicemb value_dtype" if of_rows else "remove the files of state"
    if str(given).startswith("float8"):
        remedy = "have DynamicEmb load the dump into a table of torch.bfloat16, and dump that table"
    raise ValueError(f"{where}: {name} is {given!r}, expected one of {list(known)}: {remedy}")


def files_of(folder: Path, table: str, item: str, suffix: str = "") -> dict[tuple[int, int], Path]:
    """Return the files of an item of a table by rank and number of ranks.

    Args:
        folder: of the collection.
        table: its name.
        item: such as ``emb_keys``.
        suffix: end of their names.
    """
    prefix = f"{table}_{item}"
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.startswith(prefix) or not path.name.endswith(suffix):
            continue
        match = _FILE.fullmatch(path.name.removeprefix(prefix).removesuffix(suffix))
        if match is not None:
            found[int(match[1]), int(match[2])] = path
    return found


def files_of_all_ranks(folder: Path, table: str, item: str) -> list[Path] | None:
    """Return the files of one dump, in the order of ranks; None: no files.

    Args:
        folder, table, item: as in :func:`files_of`.

    Raises:
        ValueError: files are missing, or belong to two dumps.
    """
    found = files_of(folder, table, item)
    if not found:
        return None
    ranks = next(iter(found))[1]
    if sorted(found) != [(rank, ranks) for rank in range(ranks)]:
        have = ", ".join(f"rank {rank} of {of}" for rank, of in sorted(found))
        raise ValueError(
            f"{folder} has files {table}_{item} of {have}, expected all ranks of one dump: files "
            "are missing, or two dumps lie there"
        )
    return [found[rank, ranks] for rank in range(ranks)]


__all__ = [
    "COUNTER_ITEMS",
    "ITEMS",
    "OPTIMIZERS",
    "ROW_COLUMNS",
    "ROW_DTYPE",
    "SECOND",
    "STATE_DTYPE",
    "DumpedOptimizer",
    "dtype_in",
    "dtype_name",
    "files_of",
    "files_of_all_ranks",
    "options_file",
    "read_options",
    "table_file",
]
