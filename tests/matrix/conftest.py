"""Running ranks for the cases of a space."""

from __future__ import annotations

import pytest
from covering import RanksOf

NAMES = {2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}


@pytest.fixture(scope="session")
def ranks_of(request: pytest.FixtureRequest) -> RanksOf:
    """Return running ranks by their number."""
    return lambda number: request.getfixturevalue(NAMES[number])
