"""What files hold: names, or numbers that never change, whatever is reordered in the code."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from saved_modules import FORMAT_3, saved_module, train
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops import columns, lookup_autograd
from torch_dynemb.optim import base
from torch_dynemb.policy import layout as policy_layout
from torch_dynemb.policy import policy
from torch_dynemb.table import config as table_config

pytestmark = pytest.mark.cpu_only("files, which are the same for all devices")


def saved_state() -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(FORMAT_3, weights_only=True)
    return state


def assert_holds_the_same(module: Any, state: dict[str, Tensor]) -> None:
    """Rows, scores by name, counts and clocks of the file."""
    words = json.loads(bytes(state["format"].tolist()))["scores"]
    own = module.state_dict()
    assert (
        list(module.group.config.layout.score_words)
        == json.loads(bytes(own["format"].tolist()))["scores"]
    )
    for name, tensor in state.items():
        if name == "format":
            continue
        if not name.endswith(".scores"):
            assert torch.equal(own[name], tensor), name
            continue
        for word, score in enumerate(words):
            column = 4 * module.group.config.layout.word(score)
            given = tensor[:, 4 * word : 4 * word + 4]
            assert torch.equal(own[name][:, column : column + 4], given), (name, score)


def test_a_file_of_format_3_is_read_and_trained_on() -> None:
    module, twin = saved_module(), saved_module()
    module.load_state_dict(saved_state())
    assert_holds_the_same(module, saved_state())
    assert module.sizes() == {"a": 16, "b": 24, "c": 32}
    twin.load_state_dict(module.state_dict())
    ids = torch.arange(40)
    before = module.group.scores.get(0, ids, score="frequency")
    for one in (module, twin):
        train(one, range(4, 6))
    assert_holds_the_same(twin, module.state_dict())
    after = module.group.scores.get(0, ids, score="frequency")
    seen = [
        torch.randint(0, 40, (10, 3), generator=torch.Generator().manual_seed(s)) for s in (4, 5)
    ]
    occurrences = torch.bincount(torch.cat(seen).reshape(-1), minlength=40)
    kept = before.found & after.found & (after.scores > occurrences)  # the others came anew
    assert kept.any()
    assert torch.equal(after.scores[kept], (before.scores + occurrences)[kept])


@pytest.mark.parametrize(
    "scores",
    [
        ("custom", "frequency", "timestamp", "step"),
        ("step", "invented", "timestamp", "another", "frequency", "custom"),
        ("step", "frequency", "timestamp", "custom"),
    ],
    ids=str,
)
def test_scores_in_another_order(monkeypatch: pytest.MonkeyPatch, scores: tuple[str, ...]) -> None:
    known = saved_module()
    known.load_state_dict(saved_state())
    monkeypatch.setattr(policy, "SCORES", scores)
    monkeypatch.setattr(policy_layout, "SCORES", scores)
    module = saved_module()
    module.load_state_dict(saved_state())
    assert_holds_the_same(module, saved_state())
    for one in (known, module):
        train(one, range(4, 8))
    ids = torch.arange(40)
    for name in ("step", "timestamp", "frequency", "custom", "expiry"):
        expected = known.group.scores.get(0, ids, score=name)
        given = module.group.scores.get(0, ids, score=name)
        assert torch.equal(given.scores, expected.scores), name
        assert torch.equal(given.found, expected.found)
    assert torch.equal(module.group.read(0, ids), known.group.read(0, ids))
    again = saved_module()
    again.load_state_dict(module.state_dict())
    assert_holds_the_same(again, module.state_dict())


def test_dtypes_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    other = (torch.float16, torch.bfloat16, torch.float32)
    monkeypatch.setattr(table_config, "ROW_DTYPES", other)
    module = saved_module()
    module.load_state_dict(saved_state())
    assert_holds_the_same(module, saved_state())


def test_optimizers_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    known = saved_module()
    known.load_state_dict(saved_state())
    train(known, range(4, 6))
    last = len(ops.OPTIMIZER_NAMES) - 1
    backward = lookup_autograd._BACKWARD
    monkeypatch.setattr(base, "OPTIMIZER_NAMES", ops.OPTIMIZER_NAMES[::-1])
    monkeypatch.setattr(
        lookup_autograd, "_BACKWARD", lambda *given: backward(*given[:-1], last - given[-1])
    )
    module = saved_module()
    module.load_state_dict(saved_state())
    assert_holds_the_same(module, saved_state())
    train(module, range(4, 6))
    ids = torch.arange(40)
    assert torch.equal(module.group.read(0, ids), known.group.read(0, ids))


def test_numbers_of_columns_never_change() -> None:
    """New ones get new numbers; what is gone leaves a gap."""
    held = {
        columns.Table: "BUCKET_COUNT SIZE TOMBSTONES INSERTED GROWTHS ERASED EVICTED REJECTED "
        "NOT_ADMITTED FOUND MISSED DEFAULT_SERVED",
        columns.Slab: "NEXT_ROW FREE_COUNT COMMITTED_ROWS ROW_BYTES GENERATION",
        columns.Clock: "STEP NOW",
        columns.RowClock: "UPDATES SINCE_STEP STALE NON_FINITE",
    }
    for kind, names in held.items():
        for number, name in enumerate(names.split()):
            assert kind[name] == number


def test_optimizers_are_saved_under_names_of_their_own() -> None:
    configs = [c for c in vars(td).values() if isinstance(c, type) and hasattr(c, "kernel_name")]
    assert len(configs) > 10
    assert len({config.__name__ for config in configs}) == len(configs)
    for config in configs:
        names = [tensor.name for tensor in config(lr=0.1).state]
        # beside the entries of a table, or of the rows themselves
        assert not {"buckets", "scores", "counts", "free_rows", "weights", "generations"} & set(
            names
        )
        assert len(set(names)) == len(names)
