"""Ops on served tables in a file."""

from __future__ import annotations

import tempfile
from collections import deque
from functools import cache, partial
from pathlib import Path

import torch

from op_cases.groups import Case, OpArguments, make_group
from op_cases.serving import frozen_tensors, lookup_arguments
from torch_dynemb import SSDStore
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.serving.file_names import moved_file, new_instance, path_of
from torch_dynemb.serving.file_tables import FileTables
from torch_dynemb.serving.live_files import LiveFileTables
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


def live_arguments(*more: object) -> OpArguments:
    """Of live tables of their own, which a call may change."""
    tables = LiveFileTables(file_tables(), headroom=8)
    _kept.append(tables)
    return tables.get_buffer("file").clone(), *more


# the last ones, which a call may need; earlier ones end
_kept: deque[LiveFileTables] = deque(maxlen=4)


def make_live_arguments() -> OpArguments:
    file = file_tables().file
    named = moved_file(file, path_of(file), instance=new_instance())
    return named, file_tables().get_buffer("meta").clone(), [5, 0, 7]


CASES: dict[str, dict[str, Case]] = {
    "file_lookup": {
        "sum": partial(file_lookup_arguments, Pooling.SUM),
        "weighted mean": partial(file_lookup_arguments, Pooling.MEAN, weighted=True),
        "rows": partial(file_lookup_arguments, Pooling.NONE),
    },
    "file_open": {"": file_arguments},
    "file_close": {"": file_arguments},
    "file_stats": {"": file_arguments},
    "file_make_live": {"": make_live_arguments},
    "file_apply": {
        "": lambda: live_arguments(0, torch.tensor([1, 900]), torch.ones(2, 4), torch.tensor([2]))
    },
    "file_room": {"": lambda: live_arguments(0, torch.tensor([1, 900]), torch.tensor([2]), True)},
    "file_counts": {"": lambda: file_arguments(3)},
    "file_ids": {"": lambda: file_arguments(1, list(file_tables().sizes().values())[1])},
    "file_pages": {
        "": lambda: (torch.arange(70), torch.arange(70 * 60).to(torch.uint8).reshape(70, 60), 7),
        "large": lambda: (torch.arange(2), torch.ones(2, 5000, dtype=torch.uint8), 0),
    },
}
