"""Which kernels have run on a GPU: the ledger, and what is noted of launches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_programs import ROOT, module

pytestmark = [
    pytest.mark.cpu_only("gpu-check without a GPU"),
    pytest.mark.usefixtures("repository_on_path"),
]


def kernel_line(name: str, **states: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("ran", "sanitized", "timed"))
    return {"file": "a.cu", "kernel": name, "ops": "find", **nothing, **states}


def run_summary(commit: str, **kernels: list[str]) -> dict[str, Any]:
    return {"commit": commit, "device": "a GPU", "date": "2026-01-02T03:04", "kernels": kernels}


def test_the_ledger_has_every_kernel() -> None:
    ledger = module("ledger")
    whole = ledger.load(ledger.PATH)
    kernels = whole["kernels"]
    assert {kernel["kernel"]: kernel["file"] for kernel in kernels} == ledger.kernels_of_sources()
    assert len({kernel["kernel"] for kernel in kernels}) == len(kernels)
    for kernel in kernels:
        assert kernel["ops"]
        for state in ledger.STATES:
            commit = kernel[state]
            assert commit is None or re.fullmatch(r"[0-9a-f]{7,40}(\+changes)?", commit), kernel
            assert commit is None or commit in whole["runs"]


def test_the_table_of_launches_names_kernels() -> None:
    text = (ROOT / "csrc" / "README.md").read_text()
    section = text[text.index("## Launches of a training step") :]
    rows = [line.split("|") for line in section.split("\n## ")[0].splitlines() if line[:1] == "|"]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    assert len(named) > 10
    assert named <= module("ledger").kernels_of_sources().keys()


@pytest.mark.parametrize("readme", ["README.md", "benchmarks/README.md"])
def test_readmes_say_how_many_kernels_have_run(readme: str) -> None:
    ledger = module("ledger")
    sentence = ledger.sentence(ledger.load(ledger.PATH))
    assert sentence in " ".join((ROOT / readme).read_text().replace("*", "").split())


def test_the_ledger_is_written_as_it_is_read(tmp_path: Path) -> None:
    ledger = module("ledger")
    copy = tmp_path / "ledger.json"
    ledger.save(ledger.load(ledger.PATH), copy)
    assert copy.read_text() == ledger.PATH.read_text()
    lines = copy.read_text().splitlines()
    assert sum('"kernel":' in line for line in lines) == len(ledger.load(copy)["kernels"])


def test_runs_are_merged_into_the_ledger(tmp_path: Path) -> None:
    ledger = module("ledger")
    whole = {"runs": {}, "kernels": [kernel_line("a"), kernel_line("b")]}
    assert ledger.sentence(whole) == "0 of 2 kernels have run on a GPU."
    assert ledger.merge(whole, run_summary("0000001")) == 0
    assert whole["runs"] == {}
    assert ledger.merge(whole, run_summary("0000001", ran=["a", "b"], sanitized=["a"])) == 3
    assert ledger.merge(whole, run_summary("0000002", ran=["a", "b"], timed=["b"])) == 3
    assert whole["kernels"] == [
        kernel_line("a", ran="0000002", sanitized="0000001"),
        kernel_line("b", ran="0000002", timed="0000002"),
    ]
    assert sorted(whole["runs"]) == ["0000001", "0000002"]
    assert ledger.sentence(whole) == (
        "2 of 2 kernels have run on a GPU, 1 under the sanitizer, 1 were timed (last: 2026-01-02, "
        "a GPU)."
    )
    ledger.merge(whole, run_summary("0000003", sanitized=["a"]))
    assert sorted(whole["runs"]) == ["0000002", "0000003"]  # no kernel names the first any more
    with pytest.raises(ValueError, match="no kernels named c: add a line for each"):
        ledger.merge(whole, run_summary("0000003", ran=["c"]))
    with pytest.raises(ValueError, match="kernels has walked: expected ran, sanitized, timed"):
        ledger.merge(whole, run_summary("0000003", walked=["a"]))


def test_merging_from_the_command_line(tmp_path: Path) -> None:
    ledger = module("ledger")
    file, summary = tmp_path / "ledger.json", tmp_path / "gpu-check-first.json"
    ledger.save({"runs": {}, "kernels": [kernel_line("a"), kernel_line("b")]}, file)
    summary.write_text(json.dumps(run_summary("0000001", ran=["b"])))
    program = str(ROOT / "benchmarks" / "gpu" / "ledger.py")
    command = [sys.executable, program, "--ledger", str(file), "merge", str(summary)]
    reply = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "gpu-check-first.json: 1 entries changed" in reply.stdout
    assert "1 of 2 kernels have run on a GPU" in reply.stdout
    assert "never ran: a (a.cu): find" in reply.stdout
    assert ledger.load(file)["kernels"][1]["ran"] == "0000001"


@pytest.mark.parametrize(
    ("launched", "kernel"),
    [
        ("void dynemb::cuda::(anonymous namespace)::gather_rows<4, 32>(SlabLookup)", "gather_rows"),
        ("dynemb::cuda::(anonymous namespace)::find_ids(dynemb::cuda::IndexArgs)", "find_ids"),
        ("_ZN6dynemb4cuda12_GLOBAL__N_111gather_rowsILi4ELi32EEEvNS1_10SlabLookupE", "gather_rows"),
        ("_ZN6dynemb4cuda41_GLOBAL__N__1f_13_find_ids_cu_8find_idsENS0_9IndexArgsE", "find_ids"),
        ("void at::native::gather_rows<4>(float*)", None),
        ("void cub::DeviceScanKernel<dynemb::cuda::Sum>(int)", None),
    ],
)
def test_launches_are_known_by_name(launched: str, kernel: str | None) -> None:
    assert module("ledger").kernel_of(launched, ["gather_rows", "find_ids"]) == kernel


class FakeProfiler:
    """Stands for torch's, which needs a GPU."""

    def __init__(self, *, activities: list[Any]) -> None:
        self.names: list[str] = []

    def start(self) -> None:
        self.names = ["cudaLaunchKernel", "dynemb::cuda::(anonymous namespace)::find_ids(int)"]

    def stop(self) -> None:
        self.names.append("void dynemb::cuda::(anonymous namespace)::pool_bags<4, 32>(int)")

    def events(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.names]


def test_launches_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = module("launches")
    monkeypatch.setattr(launches, "profile", FakeProfiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with launches.recorded_launches() as names:
        assert names == set()
    assert names == {"find_ids", "pool_bags"}

    def refuse(self: Any) -> None:
        raise RuntimeError("CUPTI is not there")

    monkeypatch.setattr(FakeProfiler, "start", refuse)
    with launches.recorded_launches() as names:
        pass
    assert names == set()
