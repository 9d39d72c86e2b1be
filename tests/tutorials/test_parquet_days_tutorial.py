"""The tutorial of Parquet by day: what is read, and a run that goes on in the middle of a day."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from checkpoint_content import saved_content
from torchdata.stateful_dataloader import StatefulDataLoader

import torch_dynemb as td
from tutorials.parquet_days import __main__ as program
from tutorials.parquet_days.generate import FIRST, write_days
from tutorials.parquet_days.reader import Day

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parquet") / "events"
    write_days(folder, days=3, events=5000)
    return folder


@pytest.mark.long_cases("2")
@pytest.mark.parametrize("workers", [0, 2], ids=str)
def test_a_day_is_read_once_with_interruptions(events: Path, workers: int) -> None:
    day = events / "day=2026-01-02"
    batches: list[dict] = []
    state = None
    while True:
        loader = StatefulDataLoader(Day(day), batch_size=None, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        before = len(batches)
        for batch in loader:
            batches.append(batch)
            state = loader.state_dict()
            if len(batches) % 6 == 0:
                break  # another process
        if len(batches) == before or len(batches) % 6:
            break
    whole = pq.read_table(day / "part-0.parquet")
    words = [word for batch in batches for word in batch["names"]]
    items = torch.cat([batch["items"] for batch in batches])
    assert torch.equal(items, td.hash_strings(words))
    seconds = [int(time.timestamp()) for time in whole["time"].to_pylist()]
    if workers == 0:
        assert words == whole["item"].to_pylist()
        assert [batch["now"] for batch in batches][-1] == seconds[-1]
    assert sorted(words) == sorted(whole["item"].to_pylist())
    assert min(batch["now"] for batch in batches) >= FIRST + 86_400


@pytest.mark.long
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    events: Path, tmp_path: Path
) -> None:
    data = ["--data", str(events)]
    one, two = tmp_path / "one", tmp_path / "two"
    program.main([*data, "--out", str(one), "--stop-after", "47"])
    program.main([*data, "--out", str(two), "--stop-after", "31"])  # in the second day
    program.main([*data, "--out", str(two), "--resume", "--stop-after", "47"])
    first, second = saved_content(one), saved_content(two)
    for name, of in first.items():
        assert torch.equal(second[name].ids, of.ids)
        assert torch.equal(second[name].rows, of.rows)
        assert all(torch.equal(second[name].state[key], of.state[key]) for key in of.state)
        assert all(torch.equal(second[name].scores[key], of.scores[key]) for key in of.scores)
    assert first.keys() == second.keys() == {"users", "items"}


@pytest.mark.long
def test_days_are_predicted_better_and_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.main(["--data", str(tmp_path / "events"), "--out", str(tmp_path / "out")])
    *lines, named = capsys.readouterr().out.splitlines()
    recall = [float(line.split()[2]) for line in lines]
    assert recall[-1] > recall[0] > 0.1  # 10 of 2000 items by chance: 0.005
    assert named.count("item-") == 5
