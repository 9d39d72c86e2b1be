"""Wrong arguments of the package: every call raises, and says argument, value and remedy.

Each ``wrong_*.py`` has the rows of one part of the package, ``test_wrong_ops.py`` those of ops.
Single values of all public calls are in ``test_values_by_argument.py``, tensors of all ops in
``test_errors_ops.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import wrong_initializers
import wrong_migrate
import wrong_modules
import wrong_oneembedding
import wrong_optimizers
import wrong_policies
import wrong_recis
import wrong_retrieval
import wrong_serving
import wrong_tables
import wrong_torchrec
from refusing import cases

pytestmark = pytest.mark.cpu_only("arguments that are refused before a device sees them")

TABLES: list[Any] = [
    *(wrong_initializers, wrong_migrate, wrong_modules, wrong_oneembedding),
    *(wrong_optimizers, wrong_policies, wrong_recis, wrong_retrieval, wrong_serving),
    *(wrong_tables, wrong_torchrec),
]


ROWS = [row for table in TABLES for row in table.ROWS]


@pytest.mark.parametrize(("call", "error", "words"), cases(ROWS))
def test_wrong_argument(call: Callable[[], object], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call()
