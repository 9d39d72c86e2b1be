"""Classes of the package have names of their own."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_device

PACKAGE = Path(__file__).parents[2] / "torch_dynemb"

# Public names of OneEmbedding and RecIS, whose users import them from rooms of those names.
FRAMEWORK_ROOMS = ("oneembedding", "recis")
FRAMEWORK_NAMES = {"DynamicEmbedding", "Ftrl", "SmartDecayAdam"}

# Names that two classes share and that may only become fewer.
SHARED = {
    "Place",
    "SavedGroup",
    "SavedRows",
    "Slot",
    "StoredRows",
    "TableOptions",
    "TablePlan",
    "Target",
    "_NpzFile",
    "_ParquetFile",
    "_Piece",
    "_Tile",
}


def _shared_names() -> set[str]:
    names: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            if room in FRAMEWORK_ROOMS and node.name in FRAMEWORK_NAMES:
                continue
            names[node.name] += 1
    return {name for name, count in names.items() if count > 1}


def test_no_more_classes_share_a_name() -> None:
    assert _shared_names() <= SHARED
