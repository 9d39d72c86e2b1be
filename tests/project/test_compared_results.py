"""``benchmarks/run.py --compare``: its report on constructed results."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu_only("a program that reads files")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MACHINE = {"commit": "1a2b", "date": "2026-01-01", "device": "cpu", "processor": "P", "cores": 2}
OTHER_MACHINE = {**MACHINE, "cores": 4}
Write = Callable[..., str]


def timed(case: str, ours: float, peer: float | None = None, **extra: Any) -> dict[str, Any]:
    """Return a row of a time, with minima equal to medians."""
    row: dict[str, Any] = {"bench": "index", "case": case, "valid": True}
    row |= {"ours_ms": ours, "ours_min_ms": ours, "peer": None, "peer_ms": None, "ratio": None}
    if peer is not None:
        row |= {"peer": "a map", "peer_ms": peer, "ratio": ours / peer, "ratio_min": ours / peer}
    return row | extra


def valued(case: str, value: float, unit: str) -> dict[str, Any]:
    """A row of another quantity."""
    nothing = dict.fromkeys(("ours_ms", "peer", "peer_ms", "ratio"))
    return {"bench": "growth", "case": case, "value": value, "unit": unit, "valid": True, **nothing}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of results, and gives its path."""

    def written(name: str, *rows: dict[str, Any], machine: dict[str, Any] = MACHINE) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"machine": machine, "rows": rows}))
        return str(path)

    return written


@pytest.fixture
def compare(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the program; gives its status and all that it prints."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["run.py", "--compare", *arguments])
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCHMARKS / "run.py"), run_name="__main__")
        printed = capfd.readouterr()
        return int(end.value.code or 0), printed.out + printed.err

    return run


Compare = Callable[..., tuple[int, str]]


def section(text: str, title: str) -> list[str]:
    """First words of the lines below a title, a rule apart."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(title):
            break
    else:
        return []
    result = []
    for line in lines:
        if not line:
            break
        result.append("  ".join(line.split("  ")[:2]).strip())
    return result


def test_ratios_are_compared_between_machines(write: Write, compare: Compare) -> None:
    old = write("old.json", timed("find", 10, 10), timed("grow", 10, 10), timed("same", 10, 10))
    new = write(
        "new.json",
        *(timed("find", 4, 3), timed("grow", 30, 40), timed("same", 32, 30)),
        machine=OTHER_MACHINE,
    )
    status, text = compare(old, new)
    assert status == 1
    assert "The machines differ" in text
    assert "3 rows compared, 1 slower and 1 faster by more than 10 %." in text
    slower = text[text.index("Slower:") : text.index("Faster:")].splitlines()
    assert slower[1].split() == ["bench", "case", "peer", "before", "now", "change"]
    assert slower[3].split() == ["index", "find", "a", "map", "1", "x", "1.333", "x", "+33%"]
    assert text[text.index("Faster:") :].splitlines()[3].split()[-1] == "-25%"


def test_nothing_slower_is_status_0(write: Write, compare: Compare) -> None:
    old = write("old.json", timed("find", 10, 10), timed("alone", 10))
    status, text = compare(old, write("new.json", timed("find", 10.9, 10), timed("alone", 5)))
    assert status == 0
    assert "Slower:" not in text
    assert "2 rows compared, 0 slower and 1 faster" in text


def test_times_without_a_peer_need_one_machine(write: Write, compare: Compare) -> None:
    old = [timed("alone", 10), valued("stall", 10, "ns an id"), timed("find", 10, 10)]
    new = [timed("alone", 20), valued("stall", 20, "ns an id"), timed("find", 10, 10)]
    later = {**MACHINE, "commit": "3c4d", "date": "2026-02-02"}
    kept = write("old.json", *old)
    status, text = compare(kept, write("new.json", *new, machine=later))
    assert (status, "3 rows compared, 2 slower" in text) == (1, True)
    status, text = compare(kept, write("elsewhere.json", *new, machine=OTHER_MACHINE))
    assert status == 0
    assert "1 rows compared" in text
    reason = "Not compared, because it is a time without a peer, and the machines differ: 2 rows"
    assert section(text, reason) == ["index, alone", "growth, stall"]


def test_a_median_alone_is_noise(write: Write, compare: Compare) -> None:
    """The minimum must have grown, too, and the change that is printed is the smaller one."""
    old = write("old.json", timed("noisy", 10, 10), timed("slower", 10, 10))
    rows = timed("noisy", 20, 10, ratio_min=1.05), timed("slower", 20, 10, ratio_min=1.2)
    status, text = compare(old, write("new.json", *rows))
    assert status == 1
    assert "2 rows compared, 1 slower" in text
    assert text[text.index("Slower:") :].splitlines()[3].split()[1:] == [
        *("slower", "a", "map", "1", "x", "2", "x", "+20%")
    ]


def test_rows_that_cannot_be_compared_are_named(write: Write, compare: Compare) -> None:
    invalid = timed("find", 10, 10, valid=False, reason="the peer was slow")
    same = timed("same", 1, 1)
    old = [same, invalid, valued("bytes", 8, "bytes"), timed("gone", 1, 1), valued("u", 1, "s")]
    new = [same, timed("find", 30, 10), valued("bytes", 9, "bytes"), timed("made", 1)]
    status, text = compare(write("old.json", *old), write("new.json", *new, valued("u", 1, "ms")))
    assert status == 0
    assert section(text, "Not compared, because the row is not valid in one of the files: 1") == [
        "index, find: a map"
    ]
    assert section(text, "Not compared, because the two files give it in different units: 1") == [
        "growth, u"
    ]
    assert "Not compared, because it is not a time: 1 rows\n" in text
    assert section(text, "Only in old.json: 1 rows") == ["index, gone: a map"]
    assert section(text, "Only in new.json: 1 rows") == ["index, made"]


def test_benchmarks_and_cases_are_selected(write: Write, compare: Compare) -> None:
    rows = timed("find", 10, 10), timed("insert", 10, 10), valued("stall", 10, "s")
    old = write("old.json", *rows)
    new = write("new.json", timed("find", 20, 10), timed("insert", 20, 10))
    assert "2 rows compared, 2 slower" in compare(old, new)[1]
    status, text = compare(old, new, "index", "--only", "insert: a")
    assert "1 rows compared, 1 slower" in text
    assert "Only in" not in text
    status, text = compare(old, new, "growth")
    assert status == 2
    assert "No row can be compared" in text
    assert section(text, "Only in old.json") == ["growth, stall"]


def test_a_run_is_compared_with_a_file(
    write: Write, compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the benchmarks that the file has, and what they were given."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport json, sys\n" + _FAKE_BENCHMARK)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("COMMIT", "5e6f")
    old = write("old.json", timed("find", 10, 10), timed("lost", 10, 10))
    status, text = compare(old, "--only", "find")
    assert status == 1
    assert "this run (cpu, " in text
    assert "1 rows compared, 1 slower" in text
    assert "index.py --json --rounds 7 --only find" in text
    assert "growth.py" not in text


_FAKE_BENCHMARK = """
row = {"bench": "index", "case": "find", "ours_ms": 20, "peer": "a map", "peer_ms": 10}
print(json.dumps({**row, "ratio": 2.0, "valid": True}))
print(sys.argv[1].rsplit("/")[-1], *sys.argv[2:], file=sys.stderr)
"""


def test_kept_results_are_found_beside_the_program(compare: Compare) -> None:
    name = "results/amd-epyc-2-cores-2026-11-22-ragged.json"
    status, text = compare(name, name)
    assert status == 0
    assert "12 rows compared, 0 slower and 0 faster" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "old.json cannot be read (No such file or directory): expected a file that `run.py"),
        ("{", "old.json is not JSON ("),
        ("[1]", "old.json has no machine and rows: expected a file that `run.py --save` has"),
        ('{"runs": [], "kernels": {}}', "old.json has no machine and rows"),
        ('{"machine": {}, "rows": [1]}', "row 0 is not an object"),
        ('{"machine": {}, "rows": [{}]}', "row 0 has bench None, expected a text"),
        ('{"machine": {}, "rows": [ROW, ROW]}', "two rows are of index, find: a map, so it is"),
        ('{"machine": {}, "rows": [NO_TIME]}', "row 0 has neither ours_ms nor value"),
        ('{"machine": {}, "rows": [WORDS]}', "row 0 has ratio 'fast', expected a number or null"),
    ],
)
def test_other_files_are_refused(
    content: str | None, message: str, tmp_path: Path, compare: Compare
) -> None:
    rows = {
        "NO_TIME": {"bench": "index", "case": "find", "valid": True},
        "WORDS": timed("find", 1, 1, ratio="fast"),
        "ROW": timed("find", 1, 1),
    }
    if content is not None:
        for name, row in rows.items():
            content = content.replace(name, json.dumps(row))
        (tmp_path / "old.json").write_text(content)
    status, text = compare(str(tmp_path / "old.json"))
    assert status == 2
    assert message in text


def test_what_cannot_be_done_is_refused(write: Write, compare: Compare) -> None:
    old = write("old.json", timed("find", 10, 10))
    assert "--quick gives none" in compare(old, "--quick")[1]
    assert "compared without running" in compare(old, old, "--save")[1]
    assert "--note goes with --save" in compare(old, "--note", "one run")[1]
    assert "are given as --compare OLD.json [NEW.json]" in compare(old, old, old)[1]
    other = write("other.json", timed("find", 10, 10, bench="gpu"))
    status, text = compare(other)
    assert (status, "has rows of 'gpu', which this program does not run" in text) == (2, True)
