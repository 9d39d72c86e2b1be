"""Ops on what files hold."""

from __future__ import annotations

import functools
import os
import tempfile

import torch
from torch import Tensor

from op_cases.groups import Case


@functools.cache
def _file() -> tempfile._TemporaryFileWrapper[bytes]:
    """Of three pages; it is removed with the process."""
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115
    file.write(bytes(range(256)) * 48)
    file.flush()
    return file


def _path() -> Tensor:
    return torch.tensor(list(os.fsencode(_file().name)), dtype=torch.uint8)


CASES: dict[str, dict[str, Case]] = {
    "crc32c": {
        "": lambda: (torch.arange(1000, dtype=torch.int16), 0),
        "rows": lambda: (torch.linspace(-1, 1, 12).reshape(3, 4), 2**32 - 1),
        "empty": lambda: (torch.empty((0, 3)), 5),
    },
    "store_io_paths": {"": lambda: ()},
    "read_blocks": {
        "": lambda: (_path(), torch.tensor([8192, 0, 8192]), 4096, 0),
        "threads": lambda: (_path(), torch.tensor([0, 4096]), 8192, 2),
        "empty": lambda: (_path(), torch.empty(0, dtype=torch.int64), 4096, 2),
    },
}
