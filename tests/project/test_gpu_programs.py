"""Programs of gpu-check without a GPU: what they count, and that they compile and run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_programs import module, shared

pytestmark = [
    pytest.mark.cpu_only("gpu-check without a GPU"),
    pytest.mark.usefixtures("repository_on_path"),
]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--quick", "--rounds", "1", "--dims", "8"]


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
    assert "steps of 320 ids on cpu" in capsys.readouterr().out


@pytest.mark.long
def test_every_op_runs_in_the_program_for_the_sanitizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["small_shapes", "--device", "cpu"])
    module("small_shapes").main()
    assert "results equal the CPU's" in capsys.readouterr().out


def parts_that_fail(device: torch.device, optimizer: str, results: dict[str, Any]) -> Any:
    """Stands for the programs of an optimizer: they pass, fault, hang and print megabytes."""
    on_cpu = device.type == "cpu"

    def insertion() -> None:
        results["ids"] = torch.ones(2)

    def faults() -> None:
        if not on_cpu:
            os.kill(os.getpid(), signal.SIGKILL)

    def raises() -> None:
        if not on_cpu:
            blocking = os.environ.get("CUDA_LAUNCH_BLOCKING")
            raise RuntimeError("in a kernel" if blocking else "an illegal address")

    def hangs() -> None:
        if not on_cpu:
            time.sleep(60)

    def differs() -> None:
        results["x"] = torch.tensor([1.0 if on_cpu else 2.0])

    def prints() -> None:
        print("x" * (3 << 20))

    return {part.__name__: part for part in (insertion, faults, raises, hangs, differs, prints)}


def test_a_part_that_faults_hangs_or_prints_megabytes_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apart = module("isolated_parts")
    monkeypatch.setattr(apart, "parts_of", parts_that_fail)
    monkeypatch.setattr(apart, "finish", lambda device, part: part())
    monkeypatch.setattr(apart, "recorded_launches", lambda: contextlib.nullcontext({"a_kernel"}))
    records = tmp_path / "records.jsonl"
    # the name of a device, which nothing uses
    parts = apart.IsolatedParts(torch.device("cuda"), records, seconds=60, watchdog=1.0)
    names = ["insertion", "faults", "raises", "hangs", "differs", "prints"]
    parts.run("adam", names)
    assert [json.loads(line)["part"] for line in records.read_text().splitlines()] == names
    found = {one.part: one for one in parts.done}
    results = [found[name].result for name in names]
    assert results == ["passed", "failed", "failed", "failed", "differs", "passed"]
    assert found["faults"].reason == "died with signal 9"
    assert found["raises"].reason == "RuntimeError: an illegal address"
    assert found["raises"].blocking == "failed. RuntimeError: in a kernel"
    assert found["hangs"].reason == "hangs: nothing came for 1 s"
    assert found["prints"].kernels == ["a_kernel"]


def test_a_part_that_has_failed_twice_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apart = module("isolated_parts")
    monkeypatch.setattr(apart, "parts_of", parts_that_fail)
    monkeypatch.setattr(apart, "finish", lambda device, part: part())
    monkeypatch.setattr(apart, "recorded_launches", lambda: contextlib.nullcontext(set()))
    parts = apart.IsolatedParts(torch.device("cuda"), tmp_path / "records", seconds=60)
    for optimizer in ("adam", "sgd", "lamb"):
        parts.run(optimizer, ["raises", "prints"])
    assert [one.result for one in parts.done if one.part == "prints"] == ["passed"] * 3
    last = parts.done[-2]
    assert (last.result, last.reason) == ("not run", "it failed with adam, sgd")


def test_checks_of_the_first_contact_are_apart_from_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contact = module("first_contact")
    monkeypatch.setattr(contact, "CHECK_SECONDS", 1.0)

    def passes() -> str:
        return "x" * (1 << 18)  # more than a pipe holds

    def raises() -> str:
        raise ValueError("wrong")

    def dies() -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def hangs() -> str:
        time.sleep(60)
        return ""

    found = [contact.run_check(check) for check in (passes, raises, dies, hangs)]
    assert [one["result"] for one in found] == ["passed", "failed", "failed", "failed"]
    reasons = [one["reason"] for one in found[1:]]
    assert reasons == ["ValueError: wrong", "died with signal 9", "hangs: nothing came for 1 s"]


@pytest.mark.long
def test_every_part_runs_apart_from_those_before_it(tmp_path: Path) -> None:
    """After a failure, a part has the ids of the first part alone.

    In a process of its own: OpenMP's threads, which earlier tests have started, end with a fork.
    """
    program = f"""
import pathlib, torch
from benchmarks.gpu import isolated_parts as apart
cpu, records = torch.device("cpu"), pathlib.Path({str(tmp_path / "records")!r})
parts = apart.IsolatedParts(cpu, records, seconds=600, watchdog=120)
for name in apart.PARTS:
    parts.run("adam", [name])
assert [one.line() for one in parts.done if one.result != "passed"] == []
assert {{op for one in parts.done for op in one.ops}} >= apart.wanted_ops(cpu)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.long
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
        "gpu_host_rows",
        "gpu_tiers",
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


@pytest.mark.long
def test_the_experiments_compile() -> None:
    experiments = module("experiments")
    try:
        program = experiments.compile_program("9.0")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert program.is_file()
