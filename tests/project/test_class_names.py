"""Classes of the package have names of their own."""

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


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            if name not in OF_FRAMEWORKS.get(place.parts[0], ()):
                places[name].append(str(place))
    assert {name: of for name, of in places.items() if len(of) > 1} == {}
