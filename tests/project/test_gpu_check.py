"""gpu-check without a GPU: what it says, what it counts, and that its programs compile and run."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cpu_only("gpu-check where there is no GPU")

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "benchmarks" / "gpu" / "check.py"
SMALL = ["--device", "cpu", "--quick", "--rounds", "1", "--dims", "8"]


@pytest.fixture(autouse=True)
def _repository_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.gpu.{name}")


def shared(name: str) -> Any:
    return importlib.import_module(f"benchmarks.common.{name}")


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


# -- the ledger of kernels ----------------------------------------------------------------------


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OUT": str(tmp_path)}
    reply = check(cwd=tmp_path, env=environ)
    assert reply.returncode != 0
    said = "has no CUDA" if torch.version.cuda is None else "finds no GPU"
    assert reply.stderr.startswith("gpu-check: first cannot run: torch ")
    assert said in reply.stderr
    assert "GPU_PYTHON names another" in reply.stderr


def test_a_commit_comes_from_git_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = shared("machine")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delenv("COMMIT", raising=False)
    with pytest.raises(machine.CommitUnknownError, match="Set the environment variable COMMIT"):
        machine.commit()
    monkeypatch.setenv("COMMIT", "0123abc")
    assert machine.commit() == "0123abc"
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(machine, "commit_of_git", lambda: "4567def")
    assert machine.commit() == "4567def"


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
    assert part.run("slow", python(sleeper), seconds=1.5).result == "cut"
    assert part.run("next", python("pass"), seconds=60).result == "passed"
    steps = summary_of(part, tmp_path)
    assert steps["slow"]["reason"].startswith("interrupted after 2 s")
    assert part.bad() == []


def test_a_budget_that_is_used_up_cuts_what_comes_last(tmp_path: Path) -> None:
    part = make_part(tmp_path, seconds=10.0)  # less than a step is begun with
    assert part.run("late", python("raise SystemExit(1)"), seconds=60).result == "not run"
    assert summary_of(part, tmp_path)["late"]["reason"] == "the part's 10 s were used up"


class Planned:
    """Stands for a part; notes what would be run."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.summary: dict[str, Any] = {"kernels": {}}
        self.name = "first"
        self.commands: dict[str, list[str]] = {}
        self.notes: dict[str, Any] = {}
        self.results: dict[str, str] = {}

    def run(self, step: str, command: list[str], **arguments: Any) -> Any:
        self.commands[step] = command
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
    by_optimizer = {"adam": ["find_ids"], "sgd": ["find_ids", "pool_bags"]}
    (tmp_path / "small-shapes.json").write_text(json.dumps(by_optimizer))
    timed = {"bench": "gpu_published", "case": "lookup", "valid": True, "ours_ms": 1.0}
    (tmp_path / "published-case.jsonl").write_text(json.dumps(timed) + '\n{"half a li')
    launched = [
        {"bench": "gpu_kernels", "case": "published", "kernels": ["gather_rows"]},
        {"bench": "gpu_kernels", "case": "dims", "kernels": ["pool_bags"]},  # was not timed
    ]
    (tmp_path / "launches.jsonl").write_text("\n".join(map(json.dumps, launched)))
    checks.first(part, MACHINE, None, [])
    assert list(part.commands) == [
        "small shapes",
        "device tests",
        "device tests alone",
        "memcheck",
        "published case",
        "ncu",
        "ncu table",
        "launches",
    ]
    assert part.commands["memcheck"][:3] == ["/tools/compute-sanitizer", "--tool", "memcheck"]
    assert part.commands["memcheck"][-2:] == ["--optimizers", "adam"]
    assert part.summary["kernels"] == {
        "ran": ["find_ids", "pool_bags"],
        "sanitized": ["find_ids"],
        "timed": ["gather_rows"],
    }
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
    assert part.summary["kernels"] == {"ran": [], "timed": []}
    assert part.notes["ncu"].result == "not run"
    assert part.notes["kernels that ran"].result == "not run"


def test_suite_runs_some_tests_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = module("check")
    for installed in (True, False):
        monkeypatch.setattr(checks, "has_module", lambda name, there=installed: there)
        part = Planned(tmp_path)
        checks.suite(part, MACHINE, None, [])
        first, alone = part.commands["suite"], part.commands["suite alone"]
        assert "(not long) and not alone" in first
        assert "(not long) and alone" in alone
        assert ("-n" in first, "-n" in alone) == (installed, False)


def test_rest_measures_ceilings_before_it_divides_by_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = module("check")
    monkeypatch.setattr(checks, "find_tool", lambda name, root: None)
    part = Planned(tmp_path)
    checks.rest(part, MACHINE, None, ["--quick"])
    assert list(part.commands) == ["experiments", "host", "steps"]  # small sizes: no launches
    ceilings = part.commands["experiments"][-2]
    assert part.commands["steps"][-3:] == ["--ceilings", ceilings, "--quick"]
    assert sorted(part.notes) == ["initcheck", "racecheck"]


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
    assert "no kernel image is available, and there is no nvcc" in steps["library"]["reason"]
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


# -- what is counted ----------------------------------------------------------------------------


def test_limits_are_those_counted_by_hand() -> None:
    limits = module("limits")
    pooled = limits.Shape(ids=100, unique=10, bags=20, dim=8)  # rows of 32 bytes
    found = 100 * 16
    assert limits.find(pooled) == limits.Work(found + 10 * 64, 10, found + 100 * 64)
    assert limits.find_or_insert(pooled) == limits.find(pooled)
    assert limits.find_or_insert(pooled, scored=True) == limits.Work(
        1600 + 640 + 320, 20, 1600 + 6400 + 3200
    )
    handles = 100 * 8 + 21 * 8
    outputs = 20 * 32
    assert limits.lookup_rows(pooled) == limits.Work(
        handles + outputs + 10 * (32 + 32), 20, handles + outputs + 100 * (32 + 32)
    )
    updated = 10 * (32 + 6 * 32)
    assert limits.backward(pooled, "Adam") == limits.Work(
        handles + outputs + updated, 40, handles + 100 * 32 + updated
    )
    updated = 10 * (32 + 2 * 32 + 2 * 32)
    assert limits.backward(pooled, "RowWiseAdagrad") == limits.Work(
        handles + outputs + updated, 30, handles + 100 * 32 + updated
    )
    sequence = limits.Shape(ids=100, unique=10, bags=None, dim=3)  # rows of less than a sector
    in_order = 100 * 8 + 100 * 12
    assert limits.lookup_rows(sequence) == limits.Work(in_order + 10 * 64, 20, in_order + 100 * 64)
    moved = 100 * (12 + 4 + 3 * 16 + 24)
    assert limits.gradient_sort(sequence, 1 << 16) == limits.Work(moved, 0, moved)


def test_a_limit_is_the_slowest_of_memory_accesses_and_cache() -> None:
    limits = module("limits")
    ceilings = limits.Ceilings(gb_per_s=1000.0, g_accesses_per_s=10.0, l2_gb_per_s=2000.0)
    many_bytes = limits.Work(4e9, 1e6, 4e9)
    many_accesses = limits.Work(1e6, 4e9, 1e6)
    much_cache = limits.Work(1e6, 1e6, 4e9)
    assert ceilings.ms(many_bytes) == pytest.approx(4.0)
    assert ceilings.ms(many_accesses) == pytest.approx(400.0)
    assert ceilings.ms(much_cache) == pytest.approx(2.0)
    assert ceilings.limited_by(many_bytes) == "bytes"
    assert ceilings.limited_by(many_accesses) == "accesses"
    assert ceilings.limited_by(much_cache) == "L2 bytes"
    parts = [many_bytes, many_accesses, much_cache]
    assert limits.limit_ms(parts, ceilings) == pytest.approx(406.0)
    assert limits.total(parts) == limits.Work(4.002e9, 4.002e9, 8.001e9)


def test_repeated_ids_do_not_make_a_lookup_free() -> None:
    """The rows of all occurrences cross from L2, however few are distinct."""
    limits = module("limits")
    few = limits.Shape(ids=1_000_000, unique=1000, bags=None, dim=128)
    ceilings = limits.ASSUMED_H200
    assert ceilings.limited_by(limits.lookup_rows(few)) == "L2 bytes"
    assert ceilings.ms(limits.lookup_rows(few)) >= 1e6 * 2 * 512 / ceilings.l2_gb_per_s / 1e6


def line(experiment: str, case: str, rate: float, **fields: float) -> dict[str, object]:
    """As experiments.cu prints it."""
    times = {"min_ms": 1.0, "median_ms": 1.0, "rounds": 7}
    return {"experiment": experiment, "case": case, **times, "rate": rate, "unit": "G/s", **fields}


def test_ceilings_are_the_best_of_the_largest_footprint() -> None:
    experiments = module("experiments")
    small, large = float(1 << 26), float(1 << 34)
    lines = [
        line("copy", "cudaMemcpy", 4000.0),
        line("copy", "kernel", 4200.0),
        line("random read", "a", 90.0, access_bytes=64, footprint=small),
        line("random read", "a", 20.0, access_bytes=64, footprint=large),
        line("random read", "b", 25.0, access_bytes=64, footprint=large),
        line("random read", "c", 40.0, access_bytes=8, footprint=large),
        line("L2 read", "a", 5000.0, footprint=small),
        line("L2 read", "a", 6000.0, footprint=small),
    ]
    rows = [experiments.row_of(one) for one in lines]
    found = experiments.ceilings(rows)
    assert found == module("limits").Ceilings(4200.0, 25.0, 6000.0, measured=True)
    assert experiments.ceilings(rows[:2]) is None
    assert experiments.ceilings(rows[:6]) is None
    assert rows[2]["case"] == "random read: a, over 64 MiB"


@pytest.mark.parametrize(
    ("status", "text", "result"),
    [
        (0, "ops ran\n========= ERROR SUMMARY: 0 errors\n", "passed"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n", "passed"),
        (86, "========= ERROR SUMMARY: 3 errors\n", "findings"),
        (1, "Traceback\n========= ERROR SUMMARY: 0 errors\n", "failed"),
        (
            1,
            "========= Error: Device not supported\n========= ERROR SUMMARY: 9 errors\n",
            "not run",
        ),
        (1, "no such option\n", "not run"),
    ],
)
def test_a_sanitizers_output_is_understood(status: int, text: str, result: str) -> None:
    assert module("nvidia_tools").sanitizer_verdict(status, text).result == result


@pytest.mark.parametrize(
    ("status", "text", "result"),
    [
        (0, "==PROF== Profiling gather_rows\n==PROF== Report: hot-kernels.ncu-rep\n", "passed"),
        (0, "==PROF== Disconnected\n==WARNING== No kernels were profiled.\n", "failed"),
        (1, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "not run"),
        (1, "RuntimeError: oh\n==ERROR== The application returned an error code (1).\n", "failed"),
    ],
)
def test_what_nsight_compute_says_is_understood(status: int, text: str, result: str) -> None:
    outcome = module("nvidia_tools").ncu_verdict(status, text)
    assert outcome.result == result
    assert outcome.reason


def test_the_hot_kernels_exist_and_their_table_is_looked_at() -> None:
    tools = module("nvidia_tools")
    assert set(tools.HOT_KERNELS) <= module("ledger").kernels_of_sources().keys()
    assert tools.ncu_table_verdict(0, "\n".join(tools.HOT_KERNELS)).result == "passed"
    lacking = tools.ncu_table_verdict(0, "\n".join(tools.HOT_KERNELS[1:]))
    assert lacking.reason.startswith(f"the report lacks {tools.HOT_KERNELS[0]}")


def test_tools_are_found_beside_the_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_tool = module("nvidia_tools").find_tool
    monkeypatch.setenv("PATH", str(tmp_path))
    place = tmp_path / "nsight-compute-2025.3.1" / "ncu"
    place.parent.mkdir()
    place.touch()
    assert find_tool("ncu", tmp_path) == str(place)


def test_the_program_for_nsight_compute_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--ids", "320", "--rows", "1000"]
    monkeypatch.setattr(sys, "argv", ["hot_kernels", *arguments])
    module("hot_kernels").main()
    assert "two steps of 320 ids" in capsys.readouterr().out


def test_every_op_runs_in_the_program_for_the_sanitizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["small_shapes", "--device", "cpu"])
    module("small_shapes").main()
    assert "results equal the CPU's" in capsys.readouterr().out


def test_an_error_ends_a_part_of_the_program_and_not_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shapes = module("small_shapes")

    def fail(self: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(shapes.TableCalls, "_sequence", fail)
    done = shapes.run(torch.device("cpu"), ["sgd"])
    assert done.failures == ["sgd: fail: RuntimeError: a kernel failed"]
    assert {"export_batch", "merge_grad_"} <= done.ops
    kernels = tmp_path / "kernels.json"
    arguments = ["--device", "cpu", "--optimizers", "sgd", "--kernels", str(kernels)]
    monkeypatch.setattr(sys, "argv", ["small_shapes", *arguments])
    with pytest.raises(SystemExit, match="1 parts failed: sgd: fail"):
        shapes.main()
    assert json.loads(kernels.read_text()) == {}  # none of its kernels counts as having run


def test_steps_are_timed_and_plotted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiments, steps = module("experiments"), module("steps")
    ceilings = tmp_path / "ceilings.jsonl"
    measured = [
        line("copy", "kernel", 10.0),
        line("random read", "a", 0.1, access_bytes=64, footprint=1),
        line("L2 read", "a", 20.0, footprint=1),
    ]
    ceilings.write_text("\n".join(json.dumps(experiments.row_of(one)) for one in measured))
    file = tmp_path / "steps.jsonl"
    arguments = [*SMALL, "--rows", str(file), "--ceilings", str(ceilings)]
    monkeypatch.setattr(sys, "argv", ["steps", *arguments])
    with torch.random.fork_rng(devices=[]):
        steps.main()
    rows = shared("report").read_rows(file)
    assert {row["bench"] for row in rows} == {
        "gpu_ops",
        "gpu_lookup",
        "gpu_train_step",
        "gpu_published",
    }
    assert len({(row["bench"], row["case"], row["peer"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["valid"] is True
        if row["peer"] is not None:
            assert row["ratio"] == pytest.approx(row["ours_ms"] / row["peer_ms"], rel=1e-3)
        if "limit_ms" in row:
            assert row["fraction"] == pytest.approx(row["limit_ms"] / row["ours_ms"], rel=1e-3)
            assert row["limited_by"] in ("bytes", "accesses", "L2 bytes")
            assert row["ceilings"] == "measured"
    image = tmp_path / "plot.png"
    assert module("roofline").draw(rows, "a CPU", image)
    assert image.stat().st_size > 10_000
    assert not module("roofline").draw([], "nothing", tmp_path / "none.png")


def test_graphs_are_replayed_in_turn_and_their_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = module("stages.candidates")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(candidates, "capture", lambda run, pool: SimpleNamespace(replay=run))
    settings = SimpleNamespace(cuda=True, device=torch.device("cpu"), rounds=1, peer_calls=2)
    seen: dict[str, list[Any]] = {"replayed": [], "peer": []}
    timed = candidates.Candidates(settings, ["a", "b", "c"])
    timed.replayed(
        "step",
        lambda *given: seen["replayed"].append(given),
        lambda: seen["replayed"].append("end"),
    )
    timed.peer("peer", lambda *given: seen["peer"].append(given))
    assert set(timed.time()) == {"step", "peer"}
    assert seen["replayed"] == [(0, "a"), (1, "b"), (2, "c"), "end"] * 3
    assert seen["peer"] == [(0, "a"), (1, "b")] * 3


def test_the_experiments_compile() -> None:
    experiments = module("experiments")
    try:
        program = experiments.compile_program("9.0")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert program.is_file()
