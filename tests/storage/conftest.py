"""Fixtures of tests about stored rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import faulty_training
import file_shim
import pytest


class ShimmedRun(NamedTuple):
    """A run of ``faulty_training``.

    Attributes:
        happened: what it has told.
        root: its folder, with ``changes.log``.
    """

    happened: dict[str, dict[str, Any]]
    root: Path


@pytest.fixture(scope="session")
def shimmed_run(tmp_path_factory: pytest.TempPathFactory) -> ShimmedRun:
    root = tmp_path_factory.mktemp("shimmed")
    faulty_training.logged(root).mkdir()  # the log begins with what is done below it
    environment = file_shim.environment(
        root, log=faulty_training.logged(root), faults=faulty_training.faults(root)
    )
    here = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, here))
    program = [sys.executable, faulty_training.__file__, str(root)]
    run = subprocess.run(program, env=environment, check=True, capture_output=True, text=True)
    return ShimmedRun(json.loads(run.stdout), root)
