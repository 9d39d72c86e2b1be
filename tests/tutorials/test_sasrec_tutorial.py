"""The tutorial of SASRec: its ratings, its losses, and a model that serves while it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutorials.sequence.sasrec import __main__ as program
from tutorials.sequence.sasrec.data import PADDING, generate, split_at
from tutorials.sequence.sasrec.serve import serve_and_train
from tutorials.sequence.sasrec.train import LOSSES, STATIC, Trainer, curve, quality_of

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")


def test_ratings_are_in_order_and_split_by_time() -> None:
    ratings = generate(users=200, items=100, steps=12)
    expected = []
    for ids, times in zip(ratings.ids.tolist(), ratings.times.tolist(), strict=True):
        count = sum(id != PADDING for id in ids)
        assert len(set(ids[:count])) == count  # each item once
        assert sorted(times[:count]) == times[:count]
        assert times[count:] == [float("inf")] * (12 - count)
        before = sum(time < 0.6 for time in times)
        if 0 < before < count:
            expected.append(([*ids[:before], *[PADDING] * (12 - before)], ids[before]))
    split = split_at(ratings, 0.6)
    assert list(zip(split.known.tolist(), split.wanted.tolist(), strict=True)) == expected
    assert len(expected) > 30
    # the planted ranking has the next item far more often than chance
    assert quality_of(split.best, split.wanted).hit_rate > 3 * 10 / 100


def test_every_loss_is_trained() -> None:
    split = split_at(generate(users=60, items=80, steps=8), 0.7)
    for name in (STATIC, *LOSSES):
        (quality,) = curve(name, split, dim=8, epochs=1)
        assert 0 <= quality.ndcg <= quality.hit_rate <= 1


def test_a_copy_serves_while_the_model_trains(tmp_path: Path) -> None:
    ratings = generate(users=80, items=60, steps=8)
    trainer = Trainer("256 uniform", split_at(ratings, 0.5), dim=8)
    served = serve_and_train(trainer, ratings, 0.5, tmp_path, commits=2, compiled=False)
    assert served.apart < 1e-5
    assert served.answers > 0
    assert served.commits == 2


@pytest.mark.long
def test_sampled_losses_come_near_all_items_and_a_package_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.main(["--json", "--out", str(tmp_path)])
    *lines, served = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    ndcg = {line["loss"]: line["ndcg"] for line in lines}
    assert ndcg["256 uniform"] > 0.94 * ndcg[STATIC]
    assert ndcg["in-batch and 256 uniform"] > 0.97 * ndcg[STATIC]
    assert ndcg["in-batch, not corrected"] < 0.95 * ndcg[STATIC]
    assert ndcg[STATIC] < ndcg["planted probabilities"]
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert served["apart"] < 1e-4
    assert served["answers"] > 0
    assert served["new_items"] > 0
