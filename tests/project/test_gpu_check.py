"""gpu-check without a GPU: what it says, its parts and their record, and the library."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_programs import ROOT, module, shared

pytestmark = [
    pytest.mark.cpu_only("gpu-check without a GPU"),
    pytest.mark.usefixtures("repository_on_path"),
]

CHECK = ROOT / "benchmarks" / "gpu" / "check.py"


def check(*arguments: str, **where: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **where)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def make_part(tmp_path: Path, *, seconds: float = 100.0) -> Any:
    about = {"commit": "0123abc", "device": "a GPU", "date": "2026-01-02T03:04:05+00:00"}
    return module("part").Part(
        "first", tmp_path / "work", tmp_path / "out", seconds=seconds, about=about
    )


def summary_of(part: Any, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The steps that are on disk, by name."""
    summary = json.loads((tmp_path / "out" / "gpu-check-first.json").read_text())
    return {step["step"]: step for step in summary["steps"]}


# -- parts, steps, the record -------------------------------------------------------------------


def test_help_names_the_parts() -> None:
    reply = check("--help")
    assert reply.returncode == 0
    for part in ("first", "suite", "rest"):
        assert re.search(rf"^  {part} ", reply.stdout, re.MULTILINE)


def test_make_neither_installs_nor_needs_an_environment() -> None:
    command = ["make", "-n", "gpu-check", "GPU_PYTHON=some-python"]
    # not what a make that runs this test hands on to other makes
    environ = {k: v for k, v in os.environ.items() if k not in ("ARGS", "MAKEFLAGS", "MAKELEVEL")}
    reply = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=environ
    )
    assert reply.stdout.split() == ["some-python", "benchmarks/gpu/check.py", "first"]


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OUT": str(tmp_path)}
    reply = check(cwd=tmp_path, env=environ)
    assert reply.returncode != 0
    said = "has no CUDA" if torch.version.cuda is None else "finds no GPU"
    assert reply.stderr.startswith("gpu-check: first cannot run: torch ")
    assert said in reply.stderr
    assert "GPU_PYTHON names another" in reply.stderr


def test_a_commit_comes_from_the_environment_or_git(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = shared("machine")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delenv("COMMIT", raising=False)
    assert machine.commit() == "unknown"
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(machine, "commit_of_git", lambda: "4567def")
    assert machine.commit() == "4567def"
    monkeypatch.setenv("COMMIT", "0123abc")
    assert machine.commit() == "0123abc"


def test_each_step_leaves_its_record(tmp_path: Path) -> None:
    part = make_part(tmp_path)
    on_disk = tmp_path / "out" / "gpu-check-first.json"
    part.run("good", python(f"print(open({str(on_disk)!r}).read()); print('done')"), seconds=60)
    part.run("bad", python("print('oh'); raise SystemExit(3)"), seconds=60)
    part.run("missing", [str(tmp_path / "nothing")], seconds=60)
    steps = summary_of(part, tmp_path)
    assert (steps["good"]["result"], steps["good"]["status"]) == ("passed", 0)
    assert steps["good"]["reason"] == "done"
    # while it ran, the record said what would stand had gpu-check been killed
    meanwhile = json.loads((part.work / "good.log").read_text().removesuffix("done\n"))
    assert meanwhile["steps"][0]["result"] == "cut"
    assert (steps["bad"]["result"], steps["bad"]["status"]) == ("failed", 3)
    assert "does not start" in steps["missing"]["reason"]
    assert part.bad() == ["bad", "missing"]
    with tarfile.open(tmp_path / "out" / "gpu-check-first.tar.gz") as archive:
        names = archive.getnames()
        assert "gpu-check-first/bad.log" in names
        summary = archive.extractfile("gpu-check-first/summary.json")
        assert summary is not None
        assert json.load(summary) == json.loads(on_disk.read_text())


def test_a_step_that_takes_too_long_is_cut_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module("part"), "LEAST_SECONDS", 0.5)
    part = make_part(tmp_path)
    sleeper = "import time; print('begun', flush=True); time.sleep(600)"
    assert part.run("slow", python(sleeper), seconds=0.6).result == "cut"
    assert part.run("next", python("pass"), seconds=60).result == "passed"
    steps = summary_of(part, tmp_path)
    assert steps["slow"]["reason"].startswith("interrupted after 1 s")
    assert part.bad() == []


def test_a_step_that_prints_too_much_is_cut_and_the_end_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module("part"), "LOG_BYTES", 2 << 20)
    monkeypatch.setattr(module("part"), "ARCHIVED_BYTES", 1 << 16)
    part = make_part(tmp_path)
    loud = "import time; print('y' * 4_000_000, flush=True); time.sleep(600)"
    assert part.run("loud", python(loud), seconds=60).result == "cut"
    assert summary_of(part, tmp_path)["loud"]["reason"].startswith("interrupted because it printed")
    with tarfile.open(tmp_path / "out" / "gpu-check-first.tar.gz") as archive:
        assert archive.getmember("gpu-check-first/loud.log").size == 1 << 16


def test_limits_of_the_steps_of_all_parts_fit_into_fifteen_minutes() -> None:
    checks = module("check")
    limits = checks.LIMITS
    assert list(limits) == list(checks.PARTS) == ["first", "suite", "rest"]
    assert sum(limits["first"].values()) <= 330
    assert sum(sum(part.values()) for part in limits.values()) <= 15 * 60 - 90  # start and copies
    timeout = float(checks.PYTEST[checks.PYTEST.index("--timeout") + 1])
    assert timeout < min(limits["suite"].values())


def test_a_budget_that_is_used_up_cuts_what_comes_last(tmp_path: Path) -> None:
    part = make_part(tmp_path, seconds=4.0)  # less than a step is begun with
    assert part.run("late", python("raise SystemExit(1)"), seconds=60).result == "not run"
    assert summary_of(part, tmp_path)["late"]["reason"] == "the part's 4 s were used up"


class Planned:
    """Stands for a part; notes what would be run."""

    def __init__(self, work: Path, name: str = "first") -> None:
        self.work = work
        self.summary: dict[str, Any] = {"kernels": {}}
        self.name = name
        self.seconds = sum(module("check").LIMITS[name].values())
        self.limits: dict[str, float] = {}
        self.commands: dict[str, list[str]] = {}
        self.notes: dict[str, Any] = {}
        self.results: dict[str, str] = {}

    def run(self, step: str, command: list[str], **arguments: Any) -> Any:
        self.commands[step] = command
        self.limits[step] = arguments["seconds"]
        return module("part").Outcome(self.results.get(step, "passed"), f"{step} is done")

    def record(self, step: str, outcome: Any, **facts: Any) -> Any:
        self.notes[step] = outcome
        return outcome

    def save(self) -> None:
        pass

    def left(self) -> float:
        return 500.0


MACHINE = {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", "capability": "9.0"}


def test_first_does_the_most_worthy_steps_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = module("check")
    monkeypatch.setattr(checks, "find_tool", lambda name, root: f"/tools/{name}")
    part = Planned(tmp_path)
    records = [
        {"optimizer": "adam", "part": "pooled", "result": "passed", "kernels": ["find_ids"]},
        {"optimizer": "sgd", "part": "pooled", "result": "passed", "kernels": ["pool_bags"]},
        {"optimizer": "sgd", "part": "bags", "result": "differs", "kernels": ["merge"]},
    ]
    for job in range(2):
        lines = "\n".join(map(json.dumps, records[job::2]))
        (tmp_path / f"small-shapes.{job}.jsonl").write_text(lines)
    contact = {"check": "host_pieces", "result": "failed", "reason": "hangs"}
    (tmp_path / "first-contact.jsonl").write_text(json.dumps(contact))
    timed = {"bench": "gpu_published", "case": "lookup", "valid": True, "ours_ms": 1.0}
    (tmp_path / "published-case.jsonl").write_text(json.dumps(timed) + '\n{"half a li')
    checks.first(part, MACHINE, None, [])
    assert list(part.commands) == [
        "small shapes",
        "first contact",
        "published case",
        "kernel times",
        "memcheck",
        "ncu",
        "ncu table",
    ]
    assert sum(part.limits.values()) + checks.LIMITS["first"]["library found"] == part.seconds
    assert part.commands["memcheck"][:3] == ["/tools/compute-sanitizer", "--tool", "memcheck"]
    plain = ["--plain", "--optimizers", "adam", "--parts", "insertion", "pooled"]
    assert " ".join(plain) in " ".join(part.commands["memcheck"])
    assert "kns=dynemb" in part.commands["memcheck"]
    assert part.summary["kernels"] == {"ran": ["find_ids", "pool_bags"], "sanitized": ["find_ids"]}
    assert part.summary["parts"] == records[2:]
    assert part.summary["first_contact"] == [contact]
    results = json.loads((tmp_path / "nvidia-h200-2026-01-02-first.json").read_text())
    assert (results["machine"], results["rows"]) == (MACHINE, [timed])


def test_nothing_is_claimed_of_kernels_that_were_not_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = module("check")
    part = Planned(tmp_path)
    part.results = {"memcheck": "findings"}
    monkeypatch.setattr(checks, "find_tool", lambda name, root: None if name == "ncu" else name)
    checks.first(part, MACHINE, None, [])
    assert part.summary["kernels"] == {"ran": []}
    assert part.notes["ncu"].result == "not run"
    assert part.notes["kernels that ran"].result == "not run"


def test_suite_runs_some_tests_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = module("check")
    for installed in (True, False):
        monkeypatch.setattr(checks, "has_module", lambda name, there=installed: there)
        part = Planned(tmp_path, "suite")
        checks.suite(part, MACHINE, None, [])
        assert "(cuda) and not alone" in part.commands["device tests"]
        first, alone = part.commands["suite"], part.commands["suite alone"]
        assert "(not long and not cuda) and not alone" in first
        assert "(not long and not cuda) and alone" in alone
        assert ("-n" in first, "-n" in alone) == (installed, False)


def test_rest_measures_ceilings_before_it_divides_by_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = module("check")
    monkeypatch.setattr(checks, "find_tool", lambda name, root: None)
    part = Planned(tmp_path, "rest")
    timed = {"bench": "gpu_published", "case": "lookup", "valid": True, "ours_ms": 1.0}
    (tmp_path / "steps.jsonl").write_text(json.dumps(timed))
    launched = [
        {"bench": "gpu_kernels", "case": "published", "kernels": ["gather_rows"]},
        {"bench": "gpu_kernels", "case": "dims", "kernels": ["pool_bags"]},  # was not timed
    ]
    (tmp_path / "launches.jsonl").write_text("\n".join(map(json.dumps, launched)))
    checks.note_timed_kernels(part, "published", "dims")
    assert part.summary["kernels"] == {"timed": ["gather_rows"]}
    part.commands.clear()
    checks.rest(part, MACHINE, None, ["--quick"])
    assert list(part.commands) == ["experiments", "host", "steps", "host rows", "tiers"]
    ceilings = part.commands["experiments"][-2]
    assert part.commands["steps"][-3:] == ["--ceilings", ceilings, "--quick"]
    assert sorted(part.notes) == ["initcheck", "racecheck"]


@pytest.mark.long
def test_tests_that_look_at_free_memory_run_alone() -> None:
    looks = re.compile(r"memory_in_use\(|mem_get_info\(")
    unmarked = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            marks = [ast.unparse(decorator) for decorator in node.decorator_list]
            if looks.search(ast.unparse(node)) and "pytest.mark.alone" not in marks:
                unmarked.append(f"{path.name}: {node.name}")
    assert unmarked == []


# -- the library --------------------------------------------------------------------------------


def provided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trial: str, **arguments: Any
) -> tuple[bool, dict[str, dict[str, Any]]]:
    """What becomes of a library that passes a trial or not, where a build makes another."""
    library = module("library")
    monkeypatch.setattr(library, "TRY", trial)
    monkeypatch.setattr(library, "BUILT", tmp_path / "built.json")
    show = "import os; print(*(os.environ[n] for n in ('DYNEMB_CUDA', 'TORCH_CUDA_ARCH_LIST')))"
    monkeypatch.setattr(library, "BUILD", ("-c", show))
    part = make_part(tmp_path)
    works = library.provide(part, MACHINE, **{"cuda_root": tmp_path, "rebuild": False, **arguments})
    return works, summary_of(part, tmp_path)


def test_a_library_that_works_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    works, steps = provided(monkeypatch, tmp_path, "print('a step')", cuda_root=None)
    assert works
    assert list(steps) == ["library found", "library"]
    assert steps["library"]["reason"] == "the one that was there is taken: it works"


def test_a_library_is_built_where_none_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = "raise SystemExit('no kernel image is available')"
    works, steps = provided(monkeypatch, tmp_path, fails, cuda_root=None)
    assert not works
    assert "no kernel image is available; no nvcc" in steps["library"]["reason"]
    works, steps = provided(monkeypatch, tmp_path, fails)
    assert not works
    assert steps["build"]["reason"] == "1 9.0"
    assert steps["library found"]["result"] == "not run"
    assert steps["library"]["result"] == "failed"
    works, steps = provided(monkeypatch, tmp_path, "print('a step')", rebuild=True)
    assert works
    assert list(steps) == ["build", "library built", "library"]
    assert steps["library"]["reason"] == "built for 9.0 because --rebuild was given"


def test_a_library_that_sources_have_outrun_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = module("library")
    monkeypatch.setattr(library, "ROOT", tmp_path)
    source, binary, note = tmp_path / "csrc" / "a.cu", tmp_path / "_C.so", tmp_path / "note"
    source.parent.mkdir()
    source.write_text("kernel")
    (tmp_path / "setup.py").write_text("setup")
    binary.write_text("binary")
    assert not library.is_stale(binary, note)  # built elsewhere
    note.write_text(
        json.dumps({"library": library.digest(binary), "sources": library.source_digest()})
    )
    assert not library.is_stale(binary, note)
    source.write_text("another kernel")
    assert library.is_stale(binary, note)
    binary.write_text("brought along")
    assert not library.is_stale(binary, note)
