"""The loop of tutorials/online: events that drift, what a client notes, and the whole program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from tutorials.dlrm.metrics import exact_auc
from tutorials.online import run
from tutorials.online.client import Client
from tutorials.online.daily import daily_scores
from tutorials.online.events import AD, CLICK, COLUMNS, TIME, USER, World, write
from tutorials.online.growing_file import ENDED, Tail, count_of, read
from tutorials.online.model import Training
from tutorials.online.result import Result, auc_by_window, plot, quantiles_by_window
from tutorials.online.trainer import BATCH

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")

SMALL = World(users=150, ads=20)


def drawn(days: float, a_day: int) -> tuple[np.ndarray, np.ndarray]:
    """Events, and the day of each."""
    at = np.arange(int(days * a_day)) / a_day
    events = np.zeros((len(at), COLUMNS), np.int64)
    events[:, USER:] = SMALL.events(at, np.random.default_rng(3))
    events[:, TIME] = (at * 1e9).astype(np.int64)
    return events, at


def test_a_model_that_learns_on_stays_ahead_of_a_daily_one() -> None:
    events, days = drawn(2.4, 10_000)
    ads = [events[(days >= begin) & (days < begin + 0.1), AD] for begin in (0.0, 2.3)]
    assert ads[0].max() < ads[1].min()  # other ads within two days
    daily, training = daily_scores(events, days), Training()
    online = []
    for batch in torch.from_numpy(events).split(BATCH):
        with torch.no_grad():
            logits, seen = training.model(batch[:, USER].contiguous(), batch[:, AD].contiguous())
        assert seen == sum(map(len, online))
        online.append(logits.numpy())
        training.step(batch)
    last = (days >= 1.5) & (days < 2.0)
    clicks, scores = events[last, CLICK], np.concatenate(online)[last]
    best = SMALL.chance(events[last, USER], events[last, AD], days[last])
    auc = exact_auc(clicks, scores)
    assert exact_auc(clicks, daily[last]) + 0.05 < auc < exact_auc(clicks, best)


def test_events_are_read_once_by_a_reader_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.touch()
    write(path, rate=1e5, day=10.0, is_over=lambda: count_of(path, COLUMNS) >= 1000)
    assert path.with_name(ENDED).exists()
    whole = torch.from_numpy(read(path, COLUMNS, 0, 10**6))
    found = []
    state = None
    while True:
        loader = StatefulDataLoader(Tail(path, COLUMNS, 7), batch_size=None)
        if state is not None:
            loader.load_state_dict(state)
        before = len(found)
        for batch in loader:
            found.append(batch)
            state = loader.state_dict()
            if len(found) % 40 == 0 and len(found) < 200:
                break  # another process
        if len(found) == before or len(found) % 40:
            break
    assert torch.equal(torch.cat(found), whole)


def test_ages_windows_and_the_plot(tmp_path: Path) -> None:
    events, days = drawn(1.5, 1000)
    path = tmp_path / "events"
    path.write_bytes(events.tobytes())
    client = Client(path, tmp_path / "socket")
    client._asked = len(events)
    client.answers = [(10**9, 400), (2 * 10**9, 400), (3 * 10**9, 1500)]
    times, ages = client.ages()
    assert len(times) == len(ages) == 1500
    assert ages[:400] == pytest.approx(1 - days[:400], abs=1e-6)
    assert ages[400:] == pytest.approx(3 - days[400:], abs=1e-6)
    ends, auc = auc_by_window(days, events[:, CLICK], events[:, CLICK])
    assert (ends[0], ends[-1], set(auc)) == (0.125, 1.375, {1.0})
    quantiles = quantiles_by_window(days, ages, ends)
    assert quantiles.shape == (11, 2)
    assert quantiles[0, 0] == pytest.approx(np.median(ages[:125]))
    result = Result(
        ends, auc, auc, auc, *quantiles.T.tolist(), day=9.0, events=1500, late=0, killed=1.0
    )
    result.save(tmp_path / "result.json")
    loaded = Result.load(tmp_path / "result.json")
    assert loaded.summary() == result.summary()
    plot(loaded, tmp_path / "result.png")
    assert (tmp_path / "result.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.long
def test_the_whole_loop_loses_no_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run.main(["--out", str(out), "--days", "2", "--day", "4", "--rate", "1000"])
    result = Result.load(out / "online.json")
    assert "AUC from the second day on" in capsys.readouterr().out
    assert result.events == count_of(out / "events", COLUMNS)
    # the loop ends when the last answer knows every event: none was lost, and none counted twice
    assert len(result.days) >= 14
    assert (out / "online.png").exists()
