"""benchmarks/report.py: the tables of benchmarks/README.md are those of the kept results."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu_only("reads results, Markdown and images")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
README = BENCHMARKS / "README.md"
MOST_LINES = 150
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def page(tmp_path: Path) -> Path:
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text())
    return copy


def row(case: str, ratio: float, *, target: float = 1.0, valid: bool = True) -> dict[str, Any]:
    numbers = {"ours_ms": ratio, "peer_ms": 1.0, "ratio": ratio, "target": target}
    known = {"bench": "index", "case": case, "peer": "a map"}
    return {**known, **numbers, "met": ratio <= target, "valid": valid}


def write(folder: Path, name: str, date: str, *rows: dict[str, Any], note: str = "") -> None:
    machine = {"date": date, "processor": "Intel(R) Xeon(R) Processor", "cpu_capability": "AVX2"}
    content = {"machine": machine | ({"note": note} if note else {}), "rows": list(rows)}
    (folder / name).write_text(json.dumps(content))


def test_the_tables_of_the_readme_are_those_of_the_results(
    load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    status = load("report").main(["--check"])
    said = capsys.readouterr()
    assert status == 0, f"run `make bench-report`:\n{said.out}{said.err}"


def test_a_number_that_differs_is_found(
    load: Load, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text()
    changed = re.sub(r"(\| find, all ids present \| )\d", r"\g<1>9", text)
    assert changed != text
    page.write_text(changed)
    assert load("report").main(["--check", "--page", str(page)]) == 1
    assert "find, all ids present | 9" in capsys.readouterr().out
    assert page.read_text() == changed


def test_tables_and_plots_are_written(load: Load, page: Path, tmp_path: Path) -> None:
    whole = page.read_text()
    emptied = re.sub(r"(<!-- table: [\w-]+ -->\n)(?:.+\n)*", r"\1", whole)
    assert len(emptied) < len(whole) / 2
    page.write_text(emptied)
    assert load("report").main(["--page", str(page), "--plots", str(tmp_path)]) == 0
    assert page.read_text() == whole
    written = sorted(path.name for path in tmp_path.glob("*.png"))
    plots = load("reporting.plots").PLOTS
    assert written == sorted([*plots, "capacity.png"])
    for name in written:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert all((BENCHMARKS / "results" / name).is_file() for name in plots)


def test_a_missing_marker_is_named(
    load: Load, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text(page.read_text().replace("<!-- table: calls -->", "<!-- table: call -->"))
    assert load("report").main(["--check", "--page", str(page)]) == 2
    assert "markers ['call', 'calls'] differ" in capsys.readouterr().err


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_the_newer_row_of_a_case_counts(load: Load, tmp_path: Path) -> None:
    write(tmp_path, "a.json", "2026-11-23T01:00:00+00:00", row("find", 0.5), note="one run")
    write(tmp_path, "b.json", "2026-11-21T01:00:00+00:00", row("find", 2.0), row("insert", 3.0))
    (tmp_path / "ledger.json").write_text('{"runs": {}, "kernels": []}')
    kept = load("reporting.kept").Kept(tmp_path)
    found, other = (kept.get("index", case, "a map") for case in ("find", "insert"))
    assert (found.row["ratio"], found.source.name, found.missed) == (0.5, "a.json", False)
    assert (other.row["ratio"], other.source.name, other.missed) == (3.0, "b.json", True)
    tables = load("reporting.tables")
    table = tables.Table(
        "t", "Title", ("map",), (("both", [tables.Cell("index", ("find", "insert"), "a map")]),)
    )
    assert table.markdown(kept).splitlines() == [
        "| **Title** ([Intel Xeon, AVX2, 2026-11-21](results/b.json); "
        "[Intel Xeon, AVX2, 2026-11-23, one run](results/a.json)) | map |",
        "|---|---|",
        "| both | 0.50 / **3.00** ≤ 1 |",
    ]


def test_a_row_that_does_not_exist_is_an_error(load: Load, tmp_path: Path) -> None:
    write(tmp_path, "a.json", "2026-11-23T01:00:00+00:00", row("find", 0.5))
    module = load("reporting.kept")
    with pytest.raises(module.MissingRowError, match=r"'fill', peer='a map'.*\('find', 'a map'\)"):
        module.Kept(tmp_path).get("index", "fill", "a map")


def test_invalid_rows_are_marked_and_no_misses(load: Load, tmp_path: Path) -> None:
    write(tmp_path, "a.json", "2026-11-23T01:00:00+00:00", row("find", 2.0, valid=False))
    kept = load("reporting.kept").Kept(tmp_path)
    tables = load("reporting.tables")
    assert tables.cell_text(tables.Cell("index", ("find",), "a map"), kept) == "2.00† ≤ 1"
    assert "find" not in load("reporting.misses").misses_markdown(kept, ())


def test_every_miss_has_a_reason_and_every_reason_a_miss(load: Load, tmp_path: Path) -> None:
    rows = (row("find", 2.0), row("insert", 0.123, target=0.1), row("erase", 0.5))
    write(tmp_path, "a.json", "2026-11-23T01:00:00+00:00", *rows)
    kept, module = load("reporting.kept").Kept(tmp_path), load("reporting.misses")
    both = module.Miss("index", r"index, (find|insert): a map", "It is slow.")
    assert module.misses_markdown(kept, (both,)).splitlines()[2:] == [
        "| index | 0.123 to 2.00 | 0.1 to 1 | It is slow. |"
    ]
    with pytest.raises(module.UnexplainedError, match=r"'insert'.* add the reason"):
        module.misses_markdown(kept, (module.Miss("find", r"index, find: .*", "Slow."),))
    met = module.Miss("erase", r"index, erase: .*", "It was slow.")
    with pytest.raises(module.UnexplainedError, match="'erase' meets its target now"):
        module.misses_markdown(kept, (both, met))


@pytest.mark.parametrize(
    ("value", "text"),
    [(1052.9, "1,053"), (101.7, "102"), (41.48, "41.5"), (1.1349, "1.13"), (0.1282, "0.128")],
)
def test_figures_have_three_digits(load: Load, value: float, text: str) -> None:
    assert load("reporting.tables").figure(value) == text
