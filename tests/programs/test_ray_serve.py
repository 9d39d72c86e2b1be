"""The tutorial of Ray Serve: a replica is killed, and every answer is that of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_ray import run

pytestmark = [pytest.mark.cpu_only("programs, in processes of their own"), pytest.mark.long]


def test_a_killed_replica_is_replaced(tmp_path: Path) -> None:
    found = run("ray_serve_run.py", tmp_path / "package")
    assert found["killed"] in found["before"]
    assert len(found["before"]) == len(found["after"]) == 2
    assert found["killed"] not in found["after"]
