"""Copies with some of the ids: ``keep=`` of freeze, live and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dynemb as td

pytestmark = pytest.mark.any_device

SCORES = ("frequency", "custom", "decayed", "timestamp")


def trained() -> td.DynamicEmbeddingBag:
    """A table with ids 0 to 9; id n comes in the first n + 1 of ten steps, id 9 in all."""
    policy = td.Policy(score=SCORES, half_life=10)
    bag = td.DynamicEmbeddingBag(4, mode="sum", name="t", optimizer=td.SGD(lr=1.0), policy=policy)
    bag.group.clock.set_now(0)
    for step in range(10):
        ids = torch.arange(step, 10)[None]
        bag(ids, scores=-ids).sum().backward()
        bag.optimizer.step(now=10 * (step + 1))
    return bag


def ids_of(model: Any) -> list[int]:
    return sorted(model.frozen_tables.ids(0).tolist())


RULES = {
    "frequency": (td.Top(3, by="frequency"), [7, 8, 9]),
    "frequency, least": (td.AtLeast(8, by="frequency"), [7, 8, 9]),
    "custom": (td.Top(2, by="custom"), [0, 1]),
    "timestamp": (td.AtLeast(80, by="timestamp"), [8, 9]),
    "step": (td.AtLeast(9, by="step"), [9]),
    # id n at time 100: 2^-10 + ... + 2^-(10 - n), nearly 2^-(9 - n)
    "decayed": (td.AtLeast(0.2, by="decayed"), [7, 8, 9]),
    "decayed, top": (td.Top(4, by="decayed"), [6, 7, 8, 9]),
    "all": (td.Top(100, by="step"), list(range(10))),
    "none": (td.AtLeast(11, by="frequency"), []),
    "by name": ({"embedding": td.Top(1, by="frequency")}, [9]),
}


@pytest.mark.parametrize(("keep", "kept"), RULES.values(), ids=list(RULES))
def test_kept_ids_have_their_rows_and_others_are_missing(keep: Any, kept: list[int]) -> None:
    bag = trained()
    frozen = td.freeze(bag, keep=keep)
    assert ids_of(frozen) == kept
    ids = torch.arange(10)
    expected = bag.eval()(ids[:, None])
    unknown = torch.tensor([n not in kept for n in range(10)])
    initial = td.freeze(bag, keep=td.AtLeast(11, by="frequency"))
    expected = torch.where(unknown[:, None], initial(ids[:, None]), expected)
    assert torch.equal(frozen(ids[:, None]), expected)
    assert frozen.frozen_tables.get_buffer("weights0").shape[0] <= max(16, len(kept) + 1)


def test_ids_with_one_score_go_by_id_and_expired_ones_do_not_count() -> None:
    policy = td.Policy(score="frequency", ttl=10)
    bag = td.DynamicEmbeddingBag(4, mode="sum", name="t", optimizer=td.SGD(lr=1.0), policy=policy)
    largest = (1 << 63) - 1
    for now, ids in ((0, [3, 3, 3]), (20, [5, 5, -7, -7, largest, largest, 1])):
        bag.group.clock.set_now(now)
        bag(torch.tensor([ids])).sum().backward()
        bag.optimizer.step(now=now)
    for count, kept in ((1, [-7]), (2, [-7, 5]), (3, [-7, 5, largest]), (9, [-7, 1, 5, largest])):
        assert ids_of(td.freeze(bag, keep=td.Top(count, by="frequency"))) == kept


def test_what_is_refused() -> None:
    bag = trained()
    plain = td.DynamicEmbedding(4, name="p", optimizer=td.SGD(lr=1.0))
    top = td.Top(1, by="frequency")
    for call, message in (
        (
            lambda: td.freeze(bag, keep={"x": top}),
            r"keep names tables \['x'\], but .* \['embedding'\]",
        ),
        (lambda: td.freeze(plain, keep=top), r"'p' does not keep score 'frequency', but \[\]"),
        (lambda: td.freeze(td.freeze(bag), keep=top), "the model is frozen already"),
        (
            lambda: td.serving.live(td.freeze(bag), headroom=1, keep=top),
            "the model is frozen already",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.long
def test_packages_have_the_kept_ids(tmp_path: Path) -> None:
    if torch.get_default_device().type != "cpu":
        pytest.skip("packages are compiled for the CPU here")
    bag, top = trained(), td.Top(3, by="frequency")
    ids = torch.arange(10)[:, None]
    path = td.serving.export(bag, tmp_path / "package", (ids,), keep=top)
    assert torch.equal(td.serving.load(path).run(ids), td.freeze(bag, keep=top)(ids))
    live = td.serving.live(bag, headroom=1)
    with pytest.raises(ValueError, match=r"keep is .*, but the model is live already"):
        td.serving.export(live, tmp_path / "other", (ids,), keep=top)
