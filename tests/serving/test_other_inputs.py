"""Packages of models with inputs of other kinds: each takes the compiler half a minute."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from http_server import PYTHON_SERVER, ROOT, environment, running
from quick_packages import QUICK
from torch import Tensor, nn
from torch._inductor import config
from torch.export import Dim

import torch_dynemb as td
from tutorials.serving.client import Client

pytestmark = [pytest.mark.cpu_only("packages are compiled for the CPU"), pytest.mark.long]

FEATURES = ["u", "v"]


class Keyed(nn.Module):
    """Pooled rows of a keyed jagged input, with a dense layer behind."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = td.DynamicEmbeddingBagCollection(
            [td.TableConfig(name, 4) for name in FEATURES], optimizer=td.SGD(lr=0.1)
        )
        self.top = nn.Linear(8, 2)

    def forward(self, features: td.KeyedJagged) -> tuple[Tensor, Tensor]:
        pooled = self.bags(features)
        return self.top(pooled), pooled


@pytest.mark.parametrize("kind", ["torch_dynemb", "torchrec"])
def test_keyed_jagged_inputs_are_served(kind: str, tmp_path: Path) -> None:
    def features(ids: list[int], offsets: list[int]) -> td.KeyedJagged:
        values, places = torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets)
        if kind == "torch_dynemb":
            return td.KeyedJagged(FEATURES, values, places)
        jagged = pytest.importorskip("torchrec").KeyedJaggedTensor
        made: td.KeyedJagged = jagged.from_offsets_sync(FEATURES, values, places)
        return made

    model = Keyed()
    example = features(list(range(6)), [0, 2, 3, 5, 6])
    model(example)
    leaves = torch.utils._pytree.tree_leaves(example)
    batch = Dim("batch", min=1)
    sizes = {6: {0: Dim.DYNAMIC}, 5: {0: 2 * batch + 1}, 4: {0: 2 * batch}}
    dynamic = [sizes[leaf.shape[0]] if isinstance(leaf, Tensor) else None for leaf in leaves]
    with config.patch(QUICK):
        td.serving.export(model, tmp_path / "p", (example,), dynamic_shapes=(dynamic,))
    served = td.serving.load(tmp_path / "p")
    model.eval()
    for inputs in [
        example,
        features([7, 1, 2], [0, 1, 1, 2, 2, 3, 3]),
        features([5], [0, 1, 1]),
    ]:
        for found, expected in zip(served.run(inputs), model(inputs), strict=True):
            assert torch.equal(found, expected)


def test_the_tutorial_trains_exports_and_serves(tmp_path: Path) -> None:
    def python(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", *arguments]
        run = subprocess.run(
            command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        return run.stdout

    package, log = tmp_path / "clicks", tmp_path / "log"
    options = ["--version", "7", "--steps", "20", "--publish", log]
    assert "3 commits are in" in python("tutorials.serving.export_model", package, *options)
    manifest = json.loads((package / "manifest.json").read_bytes())
    assert manifest["version"] == "7"
    assert min(table["ids"] for table in manifest["tables"].values()) > 1000
    with running([*PYTHON_SERVER, package, "--port", "0", "--follow", log]) as port:
        last = time.monotonic() + 60
        with Client(port) as client:
            while client.describe()["sequence"] != 3:
                assert time.monotonic() < last
                time.sleep(0.005)
        said = python("tutorials.serving.client", "--port", str(port), "--requests", "100")
    times = r"p50 [\d.]+ ms, p99 [\d.]+ ms\n"
    idle, updated = rf"version 7: 100 requests, {times}", rf"while \d+ rows a second .*: {times}"
    assert re.fullmatch(idle + updated, said)
