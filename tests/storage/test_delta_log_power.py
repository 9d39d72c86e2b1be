"""Power failures while a delta log is written: what was appended is there, nothing is damage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import file_shim
import pytest
from crash_states import MAKE_FOLDER, crash_states, read_log
from logged_batches import batches, read

from torch_dynemb.delta_log import DirectorySink

pytestmark = pytest.mark.cpu_only("about files, without tables")

COUNT, ENTRIES = 4, 150  # of batches, of numbers in each: a batch begins and ends within sectors

PROGRAM = f"""
import os, sys
sys.path[:0] = {[*sys.path]!r}
from logged_batches import batches
from torch_dynemb.checkpoint import DirectorySink
sink = DirectorySink("log", segment_bytes=3000)
for number, data in enumerate(batches({COUNT}, {ENTRIES}), start=1):
    sink.append(memoryview(data), number)
    os.mkdir(f"appended-{{number}}")
"""


@pytest.mark.long
def test_what_was_appended_survives_and_the_rest_is_no_damage(tmp_path: Path) -> None:
    folder, shim = tmp_path / "disk", tmp_path / "shim"
    folder.mkdir()
    shim.mkdir()
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**file_shim.environment(shim, log=folder), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    changes = read_log(shim / "changes.log", folder)
    marks = [at for at, change in enumerate(changes) if change.kind == MAKE_FOLDER]
    marks = [at for at in marks if (changes[at].path or "").startswith("appended-")]
    assert len(marks) == COUNT
    whole, torn = batches(COUNT, ENTRIES), 0
    for number, state in enumerate(crash_states(changes, drawn=3)):
        appended = sum(at < state.prefix for at in marks)
        disk = tmp_path / "after" / str(number)
        disk.mkdir(parents=True)
        state.write(disk)
        sink = DirectorySink(disk / "log", segment_bytes=3000)
        found = read(sink)
        assert found in ([*range(1, appended + 1)], [*range(1, appended + 2)]), state
        files = sorted((disk / "log").glob("*.delta")) if (disk / "log").is_dir() else []
        torn += sum(os.path.getsize(path) for path in files) > sum(map(len, whole[: len(found)]))
        for sequence in range(len(found) + 1, COUNT + 1):  # the log goes on
            sink.append(memoryview(whole[sequence - 1]), sequence)
        sink.close()
        assert [bytes(data) for data in sink.read(0)] == whole
    assert torn > 10
