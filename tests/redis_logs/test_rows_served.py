"""Frozen models with rows in Redis give what the model gives at the commit that they name."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from logged_models import Model, train
from redis_cluster import ClusterOfServers
from redis_server import RedisServer, calling_before
from test_redis_rows import published, start
from torch import nn
from torch.ao.quantization import PlaceholderObserver, QConfig

import torch_dynemb as td
from torch_dynemb.delta_log import DeltaLog, RedisRows
from torch_dynemb.errors import ReplacedError
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.tables import exported

pytestmark = pytest.mark.cpu_only("a Redis server")


def drawn(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [torch.randint(-3, 70, (20, columns), generator=generator) for columns in (3, 2, 1)]


def trained(folder: Path, seed: int) -> tuple[Model, torch.Generator, DeltaLog]:
    model, generator = Model(seed), torch.Generator(device="cpu").manual_seed(seed)
    for _ in range(3):
        train(model, generator)
    return model, generator, start(model, folder / "log")


def test_answers_are_those_of_the_model(cluster: ClusterOfServers, tmp_path: Path) -> None:
    model, generator, log = trained(tmp_path, 1)
    rows = RedisRows(cluster.url, "clicks", shards=4)
    follower = rows.follow(tmp_path / "log")
    untrained = Model(7)  # of which no row is used
    for number in (None, 1, 2):
        if number is not None:
            train(model, generator)
            published(log)
            follower.update()
        model.eval()
        untrained.dense.load_state_dict(model.dense.state_dict())
        for of in (model, untrained):
            served = td.freeze(of, storage=RedisRows(cluster.client(), "clicks"))
            answer = served(*drawn(1))
            assert served.sequence == number
        served = td.freeze(model, storage=rows, missing=True)
        expected, missing = td.freeze(model, missing=True)(*drawn(2))
        answer, counted = served(*drawn(2))
        assert torch.equal(answer, expected)
        assert torch.equal(answer, model(*drawn(2)))
        assert torch.equal(counted, missing)
        assert missing.min() > 0
        assert served.position.base == rows.reader.read("one", drawn(2)[2][:, 0]).positions[0].base
        model.train()
    log.close()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_those_of_torch(server: RedisServer, tmp_path: Path, mode: str) -> None:
    bag = td.DynamicEmbeddingBag(8, mode=mode, name="ads", optimizer=td.SGD(lr=1), padding_idx=3)
    bag(torch.arange(50)[None]).sum().backward()
    td.checkpoint.save(tmp_path / "base", bag)
    rows = RedisRows(server.url, "clicks")
    rows.load(tmp_path / "base")
    peer = nn.EmbeddingBag(50, 8, mode=mode, padding_idx=3)
    with torch.no_grad():
        for batch in exported(bag.group.tables, 0, 100):
            peer.weight[batch.ids] = read_rows(bag.group.tables, 0, batch.ids, batch.handles).rows
    served = td.freeze(
        td.DynamicEmbeddingBag(8, mode=mode, name="ads", optimizer=td.SGD(lr=1), padding_idx=3),
        storage=rows,
    )
    ids, offsets = torch.randint(0, 50, (40,)), torch.tensor([0, 7, 7, 30])
    torch.testing.assert_close(served(ids, offsets), peer(ids, offsets))
    assert torch.equal(served(ids, offsets), td.freeze(bag)(ids, offsets))
    assert torch.equal(served(ids[:0], offsets[:1]), torch.zeros(1, 8))
    assert torch.equal(served.half()(ids, offsets), td.freeze(bag).half()(ids, offsets))
    assert torch.equal(copy.deepcopy(served)(ids, offsets), served(ids, offsets))
    if mode == "sum":
        weights = torch.rand(40, requires_grad=True)
        served(ids, offsets, weights).sum().backward()
        assert weights.grad is not None


def test_a_forward_reads_rows_of_one_commit(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, generator, log = trained(tmp_path, 2)
    rows = RedisRows(server.client(), "clicks", shards=1, timeout=60)
    follower = rows.follow(tmp_path / "log")
    served = td.freeze(model, storage=RedisRows(server.client(), "clicks", timeout=60))
    served(*drawn(3))  # its layout and connections are there
    position = log.position()
    train(model, generator)
    published(log)
    with calling_before(monkeypatch, 2, follower.update) as count:
        answer = served(*drawn(3))
    assert count[0] == 4  # both modules were read again
    assert served.sequence == 1
    served.model.dense.load_state_dict(model.dense.state_dict())
    assert torch.equal(served(*drawn(3)), model.eval()(*drawn(3)))
    assert not torch.equal(served(*drawn(3)), answer)
    served.require(log.position())
    served(*drawn(3))
    served.require(served.position)
    served(*drawn(3))
    served.require(position)
    with pytest.raises(ReplacedError, match=r"of commit 1 of base \w+, but those of base \w+ are"):
        served(*drawn(3))
    impatient = td.freeze(model, storage=RedisRows(server.client(), "clicks", timeout=1e-9))
    impatient(*drawn(3))
    train(model, generator)
    published(log)
    with (
        calling_before(monkeypatch, 2, follower.update),
        pytest.raises(ReplacedError, match="were replaced in each forward"),
    ):
        impatient(*drawn(3))
    log.close()


def test_what_cannot_be_served_is_refused(server: RedisServer, tmp_path: Path) -> None:
    model, _, log = trained(tmp_path, 3)
    log.close()
    rows = RedisRows(server.url, "clicks")
    with pytest.raises(ValueError, match="has no whole rows: wait until follow"):
        td.freeze(model, storage=rows)
    rows.load(tmp_path / "log" / "base")
    served = td.freeze(model, storage=rows)
    for export in (torch.export.export, torch.jit.trace):
        with pytest.raises(RuntimeError, match=r"cannot read rows in Redis: run the model eager"):
            export(served, tuple(drawn(4)))
    with pytest.raises(TypeError, match="construct RedisRows, and freeze the model with it"):
        pickle.dumps(served)
    with pytest.raises(ValueError, match=r"keep is .* but storage has its rows and ids already"):
        td.freeze(model, storage=rows, keep=td.Top(3, by="step"))
    with pytest.raises(ValueError, match="rows is 'int8', but storage has its rows"):
        td.freeze(model, storage=rows, rows="int8")
    with pytest.raises(ValueError, match="ranks is 'first', but rows in storage come to no rank"):
        td.freeze(model, storage=rows, ranks="first")
    with pytest.raises(ValueError, match="the model is frozen already"):
        td.freeze(served, storage=rows)
    with pytest.raises(ValueError, match="Linear, has no dynamic tables: leave storage out"):
        td.freeze(nn.Linear(2, 2), storage=rows)
    other = td.DynamicEmbedding(5, name="one", optimizer=td.SGD(lr=1))
    with pytest.raises(ValueError, match=r"table 'one' has dim 5, but RedisRows.*'one': 8"):
        td.freeze(nn.ModuleDict({"one": other}), storage=rows)
    with pytest.raises(RuntimeError, match="does not count them by table"):
        served.model.one.sizes()
    with pytest.raises(TypeError, match=r"RemoteModel\.require: position is 3"):
        served.require(3)
    served.model.one.qconfig = QConfig(PlaceholderObserver, PlaceholderObserver)
    with pytest.raises(TypeError, match="has its rows in files or in Redis, where they stay"):
        td.serving.FrozenEmbedding.from_float(served.model.one)
    with pytest.raises(TypeError, match="in a file or in Redis, of which a search would read"):
        td.retrieval.top_k(torch.randn(1, 8), served.model.one, 1)
