"""gpu-check without a GPU: what it says, what it counts, and that its programs compile and run."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / "benchmarks" / "gpu" / "check.py"
KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(")
SMALL = ["--device", "cpu", "--quick", "--rounds", "1", "--dims", "8"]


@pytest.fixture(autouse=True)
def _repository_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.gpu.{name}")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def kernels_of_sources() -> dict[str, str]:
    files = [*(ROOT / "csrc" / "cuda").glob("*.cu"), *(ROOT / "csrc" / "cuda").glob("*.cuh")]
    return {name: file.name for file in files for name in KERNEL.findall(file.read_text())}


def test_the_readme_lists_every_kernel() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    section = text[text.index("## CUDA kernels") :]
    table = section[section.index("| kernel | file |") :].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line]
    listed = {row[0].strip("`"): row[1].strip("`") for row in cells}
    assert listed == kernels_of_sources()
    assert len(listed) == len(cells)
    for row in cells:
        assert len(row) == 6
        for state in row[3:]:
            assert state == "never" or re.fullmatch("[0-9a-f]{7,40}", state), row


def test_help_names_the_parts() -> None:
    reply = check("--help")
    assert reply.returncode == 0
    for part in ("build", "test", "sanitize", "bench", "all"):
        assert re.search(rf"^  {part} ", reply.stdout, re.MULTILINE)


def test_make_neither_installs_nor_needs_an_environment() -> None:
    command = ["make", "-n", "gpu-check", "PART=test", "GPU_PYTHON=some-python"]
    # not what a make that runs this test hands on to other makes
    environ = {k: v for k, v in os.environ.items() if k not in ("ARGS", "MAKEFLAGS", "MAKELEVEL")}
    reply = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=environ
    )
    lines = reply.stdout
    assert lines.split() == ["PYTHONPATH=.", "some-python", "benchmarks/gpu/check.py", "test"]


@pytest.mark.parametrize("part", ["build", "all"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    reply = check(part)
    assert reply.returncode != 0
    said = "has no CUDA: set GPU_PYTHON" if torch.version.cuda is None else "finds no GPU"
    assert said in reply.stderr
    assert reply.stderr.splitlines()[-1] == "gpu-check: failed: build"


def test_limits_are_those_counted_by_hand() -> None:
    limits = module("limits")
    pooled = limits.Shape(ids=100, unique=10, bags=20, dim=8)  # rows of 32 bytes
    assert limits.find(pooled) == limits.Work(100 * 16 + 10 * 64, 10)
    assert limits.find_or_insert(pooled, scored=True) == limits.Work(1600 + 640 + 320, 20)
    in_order = 100 * 8 + 21 * 8 + 20 * 32
    assert limits.lookup_rows(pooled) == limits.Work(in_order + 10 * (32 + 32), 20)
    adam = limits.backward(pooled, "Adam")
    assert adam == limits.Work(in_order + 10 * (32 + 6 * 32), 40)
    rowwise = limits.backward(pooled, "RowWiseAdagrad")
    assert rowwise == limits.Work(in_order + 10 * (32 + 2 * 32 + 2 * 32), 30)
    sequence = limits.Shape(ids=100, unique=10, bags=None, dim=3)  # rows of less than a sector
    assert limits.lookup_rows(sequence) == limits.Work(100 * 8 + 100 * 12 + 10 * 64, 20)
    assert limits.gradient_sort(sequence, 1 << 16).bytes == 100 * (12 + 4 + 3 * 16 + 24)


def test_a_limit_is_the_slower_of_bytes_and_accesses() -> None:
    limits = module("limits")
    ceilings = limits.Ceilings(gb_per_s=1000.0, g_accesses_per_s=10.0)
    many_bytes, many_accesses = limits.Work(4e9, 1e6), limits.Work(1e6, 4e9)
    assert ceilings.ms(many_bytes) == pytest.approx(4.0)
    assert ceilings.ms(many_accesses) == pytest.approx(400.0)
    assert ceilings.limited_by(many_bytes) == "bytes"
    assert ceilings.limited_by(many_accesses) == "accesses"
    parts = [many_bytes, many_accesses]
    assert limits.limit_ms(parts, ceilings) == pytest.approx(404.0)
    assert limits.total(parts) == limits.Work(4.001e9, 4.001e9)


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
    ]
    rows = [experiments.row_of(one) for one in lines]
    found = experiments.ceilings(rows)
    assert (found.gb_per_s, found.g_accesses_per_s) == (4200.0, 25.0)
    assert experiments.ceilings(rows[:2]) is None
    assert rows[2]["case"] == "random read: a, over 64 MiB"


@pytest.mark.parametrize(
    ("status", "text", "result"),
    [
        (0, "ops ran\n========= ERROR SUMMARY: 0 errors\n", "clean"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n", "clean"),
        (86, "========= ERROR SUMMARY: 3 errors\n", "findings"),
        (1, "Traceback\n========= ERROR SUMMARY: 0 errors\n", "failed"),
        (
            1,
            "========= Error: Device not supported\n========= ERROR SUMMARY: 9 errors\n",
            "not run",
        ),
        (1, "no such option\n", "not run"),
        (124, "", "failed"),
    ],
)
def test_a_sanitizers_output_is_understood(status: int, text: str, result: str) -> None:
    assert module("check").verdict(status, text)["result"] == result


def test_a_program_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "import time; print('begun', flush=True); time.sleep(60)"
    assert module("check").run([sys.executable, "-c", program], log, seconds=2) == 124
    assert log.read_text().startswith("begun")


def test_half_a_line_is_no_row(tmp_path: Path) -> None:
    assert module("check").complete_lines('{"a": 1}\n{"a": 2}\n{"a"') == ['{"a": 1}', '{"a": 2}']


def test_every_op_runs_in_the_program_for_the_sanitizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["small_shapes", "--device", "cpu"])
    module("small_shapes").main()
    assert "results equal the CPU's" in capsys.readouterr().out


def test_steps_are_timed_and_plotted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiments, steps = module("experiments"), module("steps")
    ceilings = tmp_path / "ceilings.jsonl"
    measured = [
        line("copy", "kernel", 10.0),
        line("random read", "a", 0.1, access_bytes=64, footprint=1),
    ]
    ceilings.write_text("\n".join(json.dumps(experiments.row_of(one)) for one in measured))
    file = tmp_path / "steps.jsonl"
    arguments = [*SMALL, "--rows", str(file), "--ceilings", str(ceilings)]
    monkeypatch.setattr(sys, "argv", ["steps", *arguments])
    with torch.random.fork_rng(devices=[]):
        steps.main()
    rows = module("measure").read_rows(file)
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
            assert row["limited_by"] in ("bytes", "accesses")
    image = tmp_path / "plot.png"
    assert module("roofline").draw(rows, "a CPU", image)
    assert image.stat().st_size > 10_000
    assert not module("roofline").draw([], "nothing", tmp_path / "none.png")


def test_the_experiments_compile() -> None:
    experiments = module("experiments")
    try:
        program = experiments.compile_program("9.0")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert program.is_file()
