"""td.freeze(missing=True): how many ids were not found, eager, exported, in threads."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.serving import CountsMissing
from torch_dynemb.serving import missing as missing_ids

pytestmark = pytest.mark.any_device

IDS = torch.randint(0, 40, (20, 3), generator=seeded(0))
SGD = td.SGD(lr=0.1)


class Model(nn.Module):
    """Two modules with three tables; one of them is looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.user = td.DynamicEmbedding(4, name="user", padding_idx=7, optimizer=SGD, split=True)
        tables = [td.TableConfig("ad", 4), td.TableConfig("shop", 4)]
        self.bags = nn.ModuleList([td.DynamicEmbeddingBagCollection(tables, optimizer=SGD)])
        self.dense = nn.Linear(12, 1)

    def forward(self, ids: Tensor, others: Tensor | None = None) -> dict[str, Tensor]:
        others = ids if others is None else others
        rows = self.user(ids).sum(1) + self.user(others).sum(1)
        bags = self.bags[0]({"ad": ids, "shop": others + 1})
        return {"score": self.dense(torch.cat([rows, bags], 1)), "rows": rows}


def trained() -> Model:
    torch.manual_seed(0)
    model = Model()
    model(IDS)["score"].sum().backward()
    model.user.optimizer.step()
    return model


def counts(model: Model, ids: Tensor, others: Tensor) -> list[int]:
    """How many of the ids a model does not have, by table."""
    known = {
        "user": model.user.group,
        "ad": model.bags[0].group,
        "shop": model.bags[0].group,
    }
    asked = {"user": torch.cat([ids, others]), "ad": ids, "shop": others + 1}
    missing = []
    for name, group in known.items():
        flat = asked[name].flatten()
        there = group.contains(group.names.index(name), flat)
        if name == "user":
            there = there | (flat == 7)
        missing.append(int((~there).sum()))
    return missing


NAMES = ["user.user", "bags.0.ad", "bags.0.shop"]
BATCHES = [(IDS, IDS), (IDS + 30, IDS), (IDS[:1] + 90, IDS[:1] + 35), (IDS[:0], IDS[:0])]


def test_counts_by_table() -> None:
    model = trained()
    frozen: Any = td.freeze(model, missing=True)
    plain = td.freeze(model)
    assert isinstance(frozen, CountsMissing)
    assert frozen.table_names == NAMES
    for twin in (frozen, copy.deepcopy(frozen), td.freeze(frozen)):
        for ids, others in BATCHES:
            output, missing = twin(ids, others=others)
            assert missing.dtype == torch.int64
            assert missing.tolist() == counts(model, ids, others)
            for name, of in plain(ids, others).items():
                assert torch.equal(output[name], of)
    assert sum(counts(model, *BATCHES[1])) > 20


def test_what_is_not_looked_up_misses_nothing() -> None:
    class Half(Model):
        def forward(self, ids: Tensor, others: Tensor | None = None) -> dict[str, Tensor]:
            return {"rows": self.user(ids)}

    model = Half()
    model(IDS)
    _, missing = td.freeze(model, missing=True)(IDS + 100)
    assert missing.tolist() == [60, 0, 0]


def test_an_error_in_the_model_leaves_nothing_behind() -> None:
    frozen = td.freeze(trained(), missing=True)
    with pytest.raises(TypeError, match="expected int64 or int32"):
        frozen(IDS, IDS.float())
    _, missing = frozen(IDS + 100)
    assert missing.tolist() == [120, 60, 60]


@pytest.mark.long_cases("True")
@pytest.mark.traced
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    model = trained()
    frozen = td.freeze(model, missing=True)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    program = torch.export.export(
        frozen, (IDS, IDS.clone()), dynamic_shapes={"args": (sizes, sizes)}, strict=strict
    )
    assert not missing_ids._traced  # nothing is left of the trace
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for ids, others in (*BATCHES, (IDS.repeat(1, 2), IDS.repeat(1, 2) + 70)):
        output, missing = loaded(ids, others)
        assert missing.tolist() == counts(model, ids, others)
        assert list(output) == ["score", "rows"]
        assert torch.equal(output["rows"], frozen(ids, others)[0]["rows"])


@pytest.mark.long
@pytest.mark.traced
def test_compiled_in_one_graph() -> None:
    model = trained()
    frozen = td.freeze(model, missing=True)
    compiled = torch.compile(frozen, fullgraph=True, backend="eager", dynamic=True)
    for ids, others in BATCHES[:3]:
        assert compiled(ids, others)[1].tolist() == counts(model, ids, others)


def test_threads_count_for_themselves() -> None:
    model = trained()
    frozen = td.freeze(model, missing=True)
    expected = [counts(model, ids, others) for ids, others in BATCHES]
    found: list[list[list[int]]] = [[] for _ in range(4)]

    def work(number: int) -> None:
        for _ in range(20):
            found[number].append(frozen(*BATCHES[number])[1].tolist())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[of] * 20 for of in expected]
