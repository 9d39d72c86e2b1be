"""A base to which the commits of a delta log are applied is the model that published them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from logged_models import Content, Model, act, content, train

import torch_dynemb as td

pytestmark = pytest.mark.any_device


def published(path: Path, model: Model, commits: int, seed: int) -> dict[int, Content]:
    """What the model held at each commit."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    log = td.delta_log.DeltaLog(path, optimizer_state=True)
    log.attach(model)
    contents = {0: content(model)}
    for _ in range(commits):
        for _ in range(int(torch.randint(0, 4, (), generator=generator, device="cpu"))):
            act(model, generator)
        sequence = log.publish()
        contents[sequence] = content(model)
        train(model, generator)  # what comes after a publish is none of it
    log.close()
    return contents


@pytest.mark.parametrize("seed", range(3))
def test_every_commit_leads_to_the_content_of_the_model(tmp_path: Path, seed: int) -> None:
    model = Model()
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for _ in range(3):
        train(model, generator)
    contents = published(tmp_path / "log", model, 12, seed)
    copy = Model(seed=9)
    td.checkpoint.load(tmp_path / "log" / "base", copy)
    follower = td.delta_log.follow(tmp_path / "log", copy)
    assert content(copy) == contents[0]
    for sequence in range(1, 13):
        assert follower.update(until=sequence) == 1
        assert content(copy) == contents[sequence]
    assert follower.update() == 0
    assert (follower.sequence, len(contents)) == (12, 13)
    for until in (0, 5, 12):
        copy = Model(seed=9)
        assert td.delta_log.replay(tmp_path / "log", copy, until=until or None) == (until or 12)
        assert content(copy) == contents[until or 12]
