"""The HTML report that a job leaves: what it says, and that it needs no other file."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import torch_dynemb as td
from tutorials.dlrm import train
from tutorials.dlrm.job import checkpoint
from tutorials.dlrm.job.generate import format_lines
from tutorials.dlrm.job.planted import PlantedConfig, PlantedModel
from tutorials.dlrm.loop import Point
from tutorials.dlrm.report import conclusion

pytestmark = [
    pytest.mark.cpu_only("the job of a tutorial, on the CPU"),
    pytest.mark.usefixtures("same_threads_afterwards"),
]

SECTIONS = [
    *("Loss and AUC", "Ids", "Memory", "Throughput", "Evictions by feature"),
    *("Result", "Settings", "Machine and versions"),
]
SMALL = ["--batch-size", "64", "--embedding-dim", "4", "--threads", "1", "--log-every", "5"]
SUMMARY: dict[str, Any] = {
    "samples": 2000,
    "auc": 0.75,
    "baseline_auc": 0.76,
    "best_auc": 0.8,
    "ids": 1234,
    "table_bytes": 2**20,
    "evicted": 56,
    "samples_per_s": 4321.0,
}


class Page(HTMLParser):
    """Titles, images, text and rows of tables of a report; an element that is not closed fails."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.images: list[bytes] = []
        self.text = ""
        self._open: list[str] = []
        source = path.read_text()
        assert "http" not in source
        assert "<script" not in source
        assert not re.search(r"@import|url\(|<link|<iframe", source)
        self.facts = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", source, re.DOTALL))
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            source = dict(attrs)["src"]
            assert source is not None
            assert source.startswith("data:image/png;base64,")
            self.images.append(base64.b64decode(source.split(",")[1], validate=True))
        elif tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] == "h2":
            self.titles.append(data)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2000 lines, in a folder with a name that needs escapes."""
    config = PlantedConfig(samples=2000, cardinality_divisor=1000)
    folder = tmp_path_factory.mktemp("data") / "a&b<c>"
    folder.mkdir()
    path = folder / "samples.tsv"
    path.write_bytes(format_lines(PlantedModel(config).draw(0, config.samples)))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    train.main([*map(str, arguments), *SMALL])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.long
def test_a_job_that_evicts_says_so_in_pictures(data, tmp_path, capsys):
    result = run(capsys, data, "--out", tmp_path, "--capacity", "700")
    page = Page(tmp_path / "report.html")
    assert page.titles == SECTIONS
    assert len(page.images) == 5
    assert all(image.startswith(b"\x89PNG\r\n\x1a\n") for image in page.images)
    assert len(set(page.images)) == 5
    assert conclusion(result) in page.text
    assert f"{result['evicted']:,} ids had to go for others" in page.text
    assert f"{result['ids']:,} ids have a row at the end" in page.text
    assert page.facts["--capacity"] == "700"
    assert page.facts["--lr"] == "0.02"
    assert page.facts["--data"] == str(data).replace("&", "&amp;").replace("<", "&lt;").replace(
        ">", "&gt;"
    )
    assert page.facts["torch_dynemb"] == td.__version__
    assert {"processor", "cores", "memory", "system", "torch", "Python"} <= set(page.facts)


def test_a_job_that_evicts_nothing_and_has_few_steps(data, tmp_path, capsys):
    run(capsys, data, "--out", tmp_path, "--samples", "100", "--no-baseline")
    page = Page(tmp_path / "report.html")
    assert page.titles == SECTIONS
    assert len(page.images) == 4
    assert "None: tables grow as long as ids come" in page.text


@pytest.mark.long
def test_points_are_those_of_the_whole_job_after_an_interruption(
    data, tmp_path, capsys, ctrl_c_after_a_save
):
    def points(out: Path) -> list[Point]:
        saved = checkpoint.read(out / "checkpoint")
        assert saved is not None
        return [Point(*values) for values in saved["progress"]["points"]]

    def untimed(out: Path) -> list[tuple[object, ...]]:
        return [(p.samples, p.ids, p.evicted) for p in points(out)]

    arguments = [data, "--no-baseline", "--capacity", "700", "--checkpoint-every", "10"]
    run(capsys, *arguments, "--out", tmp_path / "whole")
    with ctrl_c_after_a_save():
        run(capsys, *arguments, "--out", tmp_path / "interrupted")
    assert not (tmp_path / "interrupted" / "report.html").exists()
    run(capsys, *arguments, "--out", tmp_path / "interrupted", "--resume")
    whole, resumed = points(tmp_path / "whole"), points(tmp_path / "interrupted")
    assert [point.samples for point in whole] == [320, 640, 960, 1280, 1600, 1800]
    assert untimed(tmp_path / "interrupted") == untimed(tmp_path / "whole")
    assert all(sum(point.ids) <= 700 for point in whole)
    for of_a_job in (whole, resumed):
        for before, after in pairwise(of_a_job):
            assert before.seconds < after.seconds
            assert sum(before.evicted) < sum(after.evicted)
        assert all(point.resident_bytes > point.table_bytes > 0 for point in of_a_job)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "is 0.7500, 0.0100 below that of hashed tables in the same memory and 0.0500 below"),
        (
            {"auc": None, "baseline_auc": None},
            "the AUC is undefined, because the held-out samples have",
        ),
        ({"baseline_auc": 0.7, "best_auc": None}, "0.0500 above that of hashed tables in the same"),
        ({}, "the tables have 1,234 ids in 1.0 MiB after 56 evictions, and training took 4,321 "),
        ({"evicted": 0}, "the tables have 1,234 ids in 1.0 MiB, and training took 4,321 samples a"),
    ],
)
def test_the_first_sentence(changes, said):
    assert said in conclusion(SUMMARY | changes)
