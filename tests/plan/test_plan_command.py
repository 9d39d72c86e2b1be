"""``python -m torch_dynemb plan``: what it reads, prints and refuses."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_dynemb.__main__ import main
from torch_dynemb.plan import report

pytestmark = pytest.mark.cpu_only("a program that reads files")

LINES = 300


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--dim", "8", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that is said; nothing is printed but that."""
    status: object
    try:
        status = main(["plan", *map(str, arguments)])
    except SystemExit as end:
        status = end.code
    reply = capsys.readouterr()
    assert status in (1, 2)
    assert reply.out == ""
    assert reply.err.startswith("error: ")
    assert reply.err.count("\n") == 1
    return reply.err


def criteo_line(number: int) -> str:
    categories = [f"{number % (place + 2):x}" for place in range(26)]
    categories[3] = "" if number % 3 else "ffffffffffffffff"
    return "\t".join(["1", *[str(-number)] * 13, *categories])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    ids = [(n * n) % 211 - 100 for n in range(LINES)]
    (folder / "ids.txt").write_text("".join(f"{id}\n" for id in ids))
    with gzip.open(folder / "ids.txt.gz", "wt") as file:
        file.write("".join(f"{id}\n" for id in ids))
    (folder / "criteo.tsv").write_text("\n".join(criteo_line(n) for n in range(LINES)))
    return folder


@pytest.fixture(scope="module")
def parquet(folder: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    columns = {
        "user": arrow.array([(n * n) % 211 - 100 for n in range(LINES)]),
        "items": arrow.array([[n % 5, 77] if n % 2 else [] for n in range(LINES)]),
        "large": arrow.array([(1 << 64) - 1 - n % 2 for n in range(LINES)], arrow.uint64()),
        "small": arrow.array([None if n % 3 else n % 7 for n in range(LINES)], arrow.int8()),
        "price": arrow.array([0.5] * LINES),
        "name": arrow.array([f"user {n % 9}" if n % 4 else None for n in range(LINES)]),
        "brand": arrow.array([f"brand {n % 3}" for n in range(LINES)]).dictionary_encode(),
        "words": arrow.array([["a", None, f"w{n % 2}"] for n in range(LINES)]),
    }
    path = folder / "rows.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
    return path


def test_ids_by_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, folder / "ids.txt")
    distinct = len({(n * n) % 211 for n in range(LINES)})
    assert (plan["lines"], plan["lookups"], plan["distinct"]) == (LINES, LINES, distinct)
    assert plan["columns"]["id"]["total"] == {
        "low": distinct,
        "expected": distinct,
        "high": distinct,
    }
    compressed = planned(capsys, folder / "ids.txt.gz")
    assert compressed["columns"] == plan["columns"]
    twice = planned(capsys, folder / "ids.txt", folder / "ids.txt.gz")
    assert (twice["lines"], twice["distinct"]) == (2 * LINES, distinct)
    assert planned(capsys, folder / "ids.txt", "--lines", 5)["distinct"] == 5


def test_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (folder / "ids.txt").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    piped = planned(capsys, "-")
    assert piped["columns"] == planned(capsys, folder / "ids.txt")["columns"]


def test_criteo(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, folder / "criteo.tsv")
    assert list(plan["columns"]) == [f"C{n}" for n in range(1, 27)]
    assert plan["columns"]["C1"]["distinct"] == 2
    assert plan["columns"]["C4"] | {"total": None} == {
        "lookups": LINES // 3,
        "missing": LINES - LINES // 3,
        "sampled": False,
        "kept_ids": 1,
        "distinct": 1,
        "total": None,
        "seen_once": 0,
        "ids_for_99_percent": 1,
        "rows": None,
    }
    some = planned(capsys, folder / "criteo.tsv", "--columns", "I3,C26")
    assert {name: of["distinct"] for name, of in some["columns"].items()} == {"I3": 300, "C26": 27}
    cut = planned(capsys, folder / "criteo.tsv", "--columns", "C4", "--lines", 10)
    assert (cut["columns"]["C4"]["missing"], cut["lookups"]) == (6, 4)


def test_parquet(folder: Path, parquet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, parquet)
    assert {name: of["distinct"] for name, of in plan["columns"].items()} == {
        "user": planned(capsys, folder / "ids.txt")["distinct"],
        "items": 6,
        "large": 2,
        "small": 7,
        "name": 9,
        "brand": 3,
        "words": 3,
    }
    assert plan["columns"]["name"]["missing"] == LINES - LINES // 4 * 3
    assert plan["columns"]["words"]["lookups"] == 2 * LINES
    assert plan["columns"]["items"]["lookups"] == LINES
    assert plan["columns"]["items"]["missing"] == LINES // 2
    assert plan["columns"]["small"]["missing"] == LINES - LINES // 3
    assert list(planned(capsys, parquet, "--columns", "small,user")["columns"]) == ["small", "user"]


def test_more_ids_than_are_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, folder / "ids.txt", "--keep", 64)
    assert plan["columns"]["id"]["sampled"]
    assert plan["columns"]["id"]["kept_ids"] <= 64
    assert main(["plan", str(folder / "ids.txt"), "--dim", "8", "--keep", "64"]) == 0
    assert "estimates from a sample of the ids" in capsys.readouterr().out


@pytest.mark.parametrize(("total", "lines"), [("10x", 3000), ("1200", 1200), ("x1.5", 450)])
def test_the_total(
    folder: Path, capsys: pytest.CaptureFixture[str], total: str, lines: int
) -> None:
    plan = planned(capsys, folder / "criteo.tsv", "--columns", "I1,C1", "--total", total)
    assert plan["total_lines"] == lines
    assert plan["columns"]["I1"]["total"]["expected"] == lines  # each line has a new one
    assert lines in [at["lines"] for at in plan["growth"]]


def test_a_suggestion(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = folder / "criteo.tsv"
    plan = planned(capsys, sample, "--columns", "I1,C1", "--device-memory", "1MB", "--ranks", 2)
    assert plan["choices"][plan["suggestion"]]["how"] == "all ids"
    plan = planned(capsys, sample, "--columns", "I1,C1", "--device-memory", "2kB", "--ranks", 2)
    choice = plan["choices"][plan["suggestion"]]
    assert choice["how"] == "evict the rarest"
    assert choice["bytes_of_a_rank"]["memory"]["total"] <= 2000
    rows = [of["rows"] for of in plan["columns"].values()]
    assert choice["ids"] - 2 <= sum(rows) <= choice["ids"] + 2
    assert rows[1] == 2  # the two ids of C1 are frequent
    plan = planned(capsys, sample, "--device-memory", "10")
    assert plan["suggestion"] is None


def test_the_report_has_the_figures(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [folder / "criteo.tsv", "--columns", "I1,C1", "--total", "10x"]
    arguments += ["--device-memory", "2kB", "--ranks", 2, "--optimizer", "adam"]
    plan = planned(capsys, *arguments)
    assert main(["plan", *map(str, arguments), "--dim", "8"]) == 0
    text = capsys.readouterr().out
    for word in ("I1", "C1", "bfloat16", "uint8", f"{plan['total']['high']:,}", "busiest"):
        assert word in text
    assert plan["choices"][plan["suggestion"]]["code"] in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 200


def test_a_terminal_shows_tables_of_rich(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    plan = planned(capsys, folder / "ids.txt")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    report.print_report(plan)
    text = capsys.readouterr().out
    assert "┃" in text
    assert f"{plan['distinct']:,}" in text


def test_a_terminal_without_rich(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(capsys, folder / "ids.txt")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report.print_report(plan)
    assert capsys.readouterr().out == report.plain_text(list(report.parts(plan))) + "\n"


def test_a_plot(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    planned(capsys, folder / "ids.txt", "--total", "100x", "--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    said = refused(capsys, folder / "ids.txt", "--dim", 8, "--plot", tmp_path / "plan.xyz")
    assert "--plot is" in said
    assert ".png, .svg or .pdf" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dim", "0"], "'0' is not a number of at least 1"),
        (["--dim", "8", "--columns", "user"], "--columns names 'user', which"),
        (["--dim", "8", "--columns", "id,id"], "--columns is id,id: name every column once"),
        (["--dim", "8", "--total", "many"], "--total is 'many', expected a number of lines"),
        (["--dim", "8", "--total", "0.5x"], "--total is '0.5x', expected at least 1x"),
        (["--dim", "8", "--total", "10"], "--total is 10 lines, but the sample has 300"),
        (
            ["--dim", "8", "--device-memory", "8 apples"],
            "--device-memory is '8 apples', expected",
        ),
        (["--dim", "8", "--keep", "3"], "--keep is 3, expected at least 64"),
        (["--dim", "8", "--optimizer", "best"], "invalid choice: 'best'"),
        (["--dim", "8", "--state-dtype", "uint8"], "state_dtype is uint8, but rowwise-adagrad"),
        (["--dim", "8", "--format", "criteo"], "line 1 has 1 fields with tabs between them"),
        (["--dim", "8", "--format", "parquet"], "cannot be read as Parquet"),
        ([], "--dim"),
    ],
)
def test_wrong_options(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert said in refused(capsys, folder / "ids.txt", *options)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty: a sample has a line at least"),
        (b"12\nabc\n", "line 2: id is 'abc', expected a decimal 64-bit integer"),
        (b"12\n1.5\n", "line 2: id is '1.5', expected"),
        (b"1_2\n", "line 1: id is '1_2', expected"),
        (b"3\n\n99999999999999999999\n", "line 3: id is '99999999999999999999', expected"),
        (b"\xff\xfe\n", r"id is '\\xff\\xfe', expected"),
        (b"\n\n", "no line has an id in id"),
        (b"1\t2\t3\n", "has 3 fields with tabs between them in its first line, expected 1"),
    ],
)
def test_wrong_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    path = tmp_path / "ids"
    path.write_bytes(content)
    reply = refused(capsys, path, "--dim", 8)
    assert said in reply
    assert str(path) in reply


def test_wrong_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder: name the files" in refused(capsys, tmp_path, "--dim", 8)
    assert "nothere does not exist" in refused(capsys, tmp_path / "nothere", "--dim", 8)
    both = refused(capsys, folder / "ids.txt", folder / "criteo.tsv", "--dim", 8)
    assert "name with --columns those that all files have" in both
    lines = [criteo_line(0), criteo_line(1).replace("\t1\t", "\tq1\t", 1), criteo_line(2)]
    (tmp_path / "bad.tsv").write_text("\n".join(lines))
    said = refused(capsys, tmp_path / "bad.tsv", "--dim", 8)
    assert "line 2: C1 is 'q1', expected a string of at most 16 hexadecimal digits" in said
    (tmp_path / "short.tsv").write_text(f"{criteo_line(0)}\n1\t2\n")
    assert "line 2 has 2 fields" in refused(capsys, tmp_path / "short.tsv", "--dim", 8)
    (tmp_path / "torn.gz").write_bytes((folder / "ids.txt.gz").read_bytes()[:-20])
    assert "cannot be decompressed after line" in refused(capsys, tmp_path / "torn.gz", "--dim", 8)


def test_wrong_parquet(parquet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, parquet, "--dim", 8, "--columns", "price")
    assert "column 'price' has type double, expected integers, strings or lists of them" in said
    assert "user, items, large, small, name, brand, words" in said
    assert "choose among user" in refused(capsys, parquet, "--dim", 8, "--columns", "ids")
    (tmp_path / "torn").write_bytes(parquet.read_bytes()[:-7])
    assert "cannot be read as Parquet" in refused(capsys, tmp_path / "torn", "--dim", 8)
    assert "cannot be read as Parquet" in refused(capsys, "-", "--format", "parquet", "--dim", 8)


def test_libraries_that_are_not_there(
    folder: Path,
    parquet: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refused(capsys, parquet, "--dim", 8)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refused(capsys, folder / "ids.txt", "--dim", 8, "--plot", folder / "x.png")
    assert "pip install matplotlib" in said


def test_columns_are_counted_alike_in_text_and_torch(folder: Path) -> None:
    from torch_dynemb.plan.streams import read_lines

    _, batches = read_lines(
        [str(folder / "criteo.tsv")], file_format=None, columns=["C4", "C5"], limit=None
    )
    (batch,) = batches
    assert batch.columns["C4"].ids.tolist() == [-1] * (LINES // 3)
    assert batch.columns["C4"].lines.tolist() == list(range(0, LINES, 3))
    assert torch.equal(batch.columns["C5"].ids, torch.arange(LINES) % 6)
