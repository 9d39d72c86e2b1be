"""Classes of the package have names of their own, and so has almost every public function."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

import torch_dynemb

pytestmark = pytest.mark.cpu_only("reads sources")

PACKAGE = Path(torch_dynemb.__file__).parent
# Public names of OneEmbedding and RecIS, which users import from the rooms of these frameworks.
OF_FRAMEWORKS = {
    "oneembedding": {"Ftrl", "SmartDecayAdam"},
    "recis": {"DynamicEmbedding", "Slot"},
}


# Functions with a name that several modules have, one below the other by reason. The list goes down
# only: a new function gets a name of its own.
SHARED = {
    "RecIS has this name, for an op that has it, too": """
        bucketize dense_to_ragged farmhash feature_cross_ragged ids_encode ids_partition multi_hash
        murmurhash ragged_tile ragged_to_dense ragged_to_sparse
    """,
    "a verb of the package's own rooms, which programs write with the room: checkpoint.load": """
        export load record_changes reshard save
    """,
    "commands, each in its own command.py": "add_command run",
    "a verb of tables and of the op that does it": "fill find find_and_read read",
    "to be renamed": """
        check_ids check_values describe described differentiable gathered give_up places_of
        read_content read_state read_tensors record_bytes source_of take_changes unfinished
    """,
}


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            if name not in OF_FRAMEWORKS.get(place.parts[0], ()):
                places[name].append(str(place))
    assert {name: of for name, of in places.items() if len(of) > 1} == {}


def test_no_two_functions_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        names = set(re.findall(r"^def ([a-z]\w*)", path.read_text(), re.MULTILINE))
        for name in names:
            places[name].append(str(path.relative_to(PACKAGE)))
    shared = {name: of for name, of in places.items() if len(of) > 1}
    known = {name for names in SHARED.values() for name in names.split()}
    assert {name: of for name, of in shared.items() if name not in known} == {}
