"""Ops on read-only tables in a file."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path

import torch

from op_cases.groups import Case, OpArguments, make_group
from op_cases.serving import frozen_tensors, lookup_arguments
from torch_dynemb import SSDStore
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.serving.file_tables import FileTables
from torch_dynemb.serving.row_files import RowFolder


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed with the process."""
    return tempfile.TemporaryDirectory()


@cache
def file_tables() -> FileTables:
    """The tables of make_group() in a file, with 16 rows in memory."""
    storage = SSDStore(Path(_folder().name) / "rows", cache="16 rows")
    tables = FileTables(make_group(), RowFolder(storage, None), None)
    tables.open()
    return tables


def file_arguments(*more: object) -> OpArguments:
    return file_tables().file.clone(), *more


def file_lookup_arguments(pooling: Pooling, *, weighted: bool = False) -> OpArguments:
    given = lookup_arguments(partial(frozen_tensors, "floats"), pooling, weighted=weighted)
    tables = dict(file_tables().named_buffers())
    of_file = (tables[name].clone() for name in ("file", "tables", "meta", "init_data"))
    return *of_file, *given[5:-2]


CASES: dict[str, dict[str, Case]] = {
    "file_lookup": {
        "sum": partial(file_lookup_arguments, Pooling.SUM),
        "weighted mean": partial(file_lookup_arguments, Pooling.MEAN, weighted=True),
        "rows": partial(file_lookup_arguments, Pooling.NONE),
    },
    "file_open": {"": file_arguments},
    "file_close": {"": file_arguments},
    "file_stats": {"": file_arguments},
    "file_ids": {"": lambda: file_arguments(1, list(file_tables().sizes().values())[1])},
    "file_pages": {
        "": lambda: (torch.arange(70), torch.arange(70 * 60).to(torch.uint8).reshape(70, 60), 7),
        "large": lambda: (torch.arange(2), torch.ones(2, 5000, dtype=torch.uint8), 0),
    },
}
