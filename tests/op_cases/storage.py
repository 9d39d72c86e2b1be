"""Ops on what files hold."""

from __future__ import annotations

import torch

from op_cases.groups import Case

CASES: dict[str, dict[str, Case]] = {
    "crc32c": {
        "": lambda: (torch.arange(1000, dtype=torch.int16), 0),
        "rows": lambda: (torch.linspace(-1, 1, 12).reshape(3, 4), 2**32 - 1),
        "empty": lambda: (torch.empty((0, 3)), 5),
    },
}
