"""Checkpoints of a process: what is saved is loaded, into whatever model has such tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import tqdm
from saved_models import SCORED, Net, contents, differences, train
from torch import nn

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.policy.layout import score_words_of

pytestmark = pytest.mark.any_device

OPTIMIZERS = [
    td.SGD(lr=1e-3),
    td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5),
    td.Adam(lr=0.05, row_steps=True),
    td.Adam(lr=0.05, state_dtype=torch.bfloat16),
    td.Adam(lr=0.05, state_dtype=torch.uint8),
    td.PartialRowWiseAdam(lr=0.05),
]


def trained(steps: int = 6, **arguments: Any) -> Net:
    model = Net(**arguments)
    train(model, range(steps))
    return model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "last"


def as_saved(model: Net) -> dict[str, Any]:
    return {name: table._asdict() for name, table in contents(model).items()}


# -- the same model ------------------------------------------------------------------------------


def test_a_printed_report_is_short(path: Path) -> None:
    model = Net()
    checkpoint.save(path, model, state={"sums": torch.arange(12345)})
    report = checkpoint.load(path, model)
    assert "features.scored" in repr(report)
    assert "state of ['sums']" in repr(report)
    assert "12344" not in repr(report)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.name}-{len(o.state)}")
def test_training_goes_on_bit_for_bit(
    path: Path, optimizer: td.optim.OptimizerConfig, split: bool
) -> None:
    model = trained(optimizer=optimizer, split=split)
    checkpoint.save(path, model)
    twin = Net(seed=7, optimizer=optimizer, split=split)
    report = checkpoint.load(path, twin)
    assert all(table.exact and not table.fresh for table in report.tables.values())
    assert report.tables["features.scored"].ids == model.features.group.size(0) > 0
    assert differences(as_saved(model), as_saved(twin)) == []
    for net in (model, twin):
        train(net, range(6, 12))
    assert model.features.group.usage.tables(wait=True)["scored"].evicted > 0
    assert differences(as_saved(model), as_saved(twin)) == []
    assert (
        differences(
            model.features.group.usage.tables(wait=True),
            twin.features.group.usage.tables(wait=True),
        )
        == []
    )
    assert torch.equal(model.top.weight, twin.top.weight)


def test_a_filled_model_is_replaced(path: Path) -> None:
    model = trained()
    checkpoint.save(path, model)
    other = trained(9, seed=3)
    before = other.features.group.usage.memory()["rows"]
    checkpoint.load(path, other)
    assert differences(as_saved(model), as_saved(other)) == []
    assert (
        other.features.group.usage.memory()["rows"] <= before
    )  # the rows of before are used again
    for net in (model, other):
        train(net, range(6, 9))
    assert differences(as_saved(model), as_saved(other)) == []


@pytest.mark.parametrize("name", ["items", "other", None])
def test_a_table_may_have_another_name(path: Path, name: str | None) -> None:
    policy = td.Policy(score="frequency", admission=td.AdmitFrequent(2))
    options = {"optimizer": td.Adam(lr=0.1), "policy": policy}
    ids = torch.arange(10)
    items = td.DynamicEmbedding(4, name="items", **options)
    for seen in (ids, ids, ids + 5):
        items(seen).sum().backward()
        items.optimizer.step()
    checkpoint.save(path, items)
    twin = td.DynamicEmbedding(4, name=name, **options)
    assert checkpoint.load(path, twin).tables["embedding"].exact
    for table in (items, twin):
        table(ids + 5).square().sum().backward()  # admits the ids from 10 on
        table.optimizer.step()
    assert len(twin) == len(items) == 15
    assert torch.equal(items.eval()(ids + 5), twin.eval()(ids + 5))


def test_rows_that_were_looked_up_only_are_saved(path: Path) -> None:
    model = Net()
    model.user(torch.arange(1, 9))
    checkpoint.save(path, model)
    twin = Net(seed=5)
    checkpoint.load(path, twin)
    ids = torch.arange(1, 20)  # also ids to come begin as they would have
    assert torch.equal(model.eval().user(ids), twin.eval().user(ids))


def test_an_empty_model_is_saved(path: Path) -> None:
    checkpoint.save(path, Net())
    twin = trained()
    checkpoint.load(path, twin)
    assert set(twin.features.group.sizes().values()) == {0}
    train(twin, range(2))


def test_the_next_save_replaces_the_one_before(path: Path) -> None:
    model = trained()
    first = checkpoint.save(path, model)
    assert first.done()
    train(model, range(6, 7))
    checkpoint.save(str(path), model).wait()
    twin = Net()
    checkpoint.load(path, twin)
    assert differences(as_saved(model), as_saved(twin)) == []
    assert [entry.name for entry in path.parent.iterdir()] == ["last"]


def test_state_of_the_program_comes_back(path: Path) -> None:
    state = {
        "step": 7,
        "lr": [0.1, float("inf"), -0.0],
        "nested": {1: (torch.arange(3), None), "two": "text", "empty": {}},
        "flags": (True, False),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    checkpoint.save(path, nn.Linear(2, 2), state=state)
    found = checkpoint.load(path, nn.Linear(2, 2)).state
    assert differences(_leaves(found), _leaves(state)) == []


def _leaves(value: Any) -> dict[str, Any]:
    """Values by path, with their types."""
    if isinstance(value, dict):
        inner = {f"{key!r}": of for key, of in value.items()}
    elif isinstance(value, list | tuple):
        inner = {f"{type(value).__name__} {i}": of for i, of in enumerate(value)}
    else:
        return {"": value, "type": type(value)}
    found = {
        f"{key}/{path}": leaf for key, of in inner.items() for path, leaf in _leaves(of).items()
    }
    return {"kind": type(value), **found}


# -- another model -------------------------------------------------------------------------------


class Moved(Net):
    """The same tables in groups that differ, so that no id and no row keeps its place."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(names=("plain", "sketched", "scored"), **arguments)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.name}-{len(o.state)}")
def test_other_groups_get_the_same_content(path: Path, optimizer: td.optim.OptimizerConfig) -> None:
    model = trained(optimizer=optimizer)
    checkpoint.save(path, model)
    for other in (Moved(seed=4, optimizer=optimizer), Moved(seed=5, optimizer=optimizer)):
        if other.features.group.config.seed == 5:
            train(other, range(3))
        report = checkpoint.load(path, other)
        assert not report.tables["features.scored"].exact
        assert differences(as_saved(model), as_saved(other)) == []
        one, two = model.features.group, other.features.group
        assert torch.equal(one.index.sketch, two.index.sketch)
        train(other, range(6, 8))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_rows_of_another_dtype(path: Path, saved: torch.dtype, loaded: torch.dtype) -> None:
    model = trained(dtype=saved)
    checkpoint.save(path, model)
    other = Net(dtype=loaded)
    checkpoint.load(path, other)
    one, two = contents(model), contents(other)
    for name, table in one.items():
        assert torch.equal(table.rows.to(loaded), two[name].rows)
        assert differences(table.state, two[name].state) == []
        assert table.ids == two[name].ids


def test_optimizer_state_of_another_dtype(path: Path) -> None:
    model = trained(optimizer=td.Adam(lr=0.05))
    checkpoint.save(path, model)
    other = Net(optimizer=td.Adam(lr=0.05, state_dtype=torch.bfloat16))
    assert not checkpoint.load(path, other).tables["user"].fresh
    one, two = contents(model), contents(other)
    for name, table in one.items():
        for key, values in table.state.items():
            assert torch.equal(values.to(torch.bfloat16), two[name].state[key])


def test_another_optimizer_takes_rows_alone_when_asked(path: Path) -> None:
    model = trained(optimizer=td.Adam(lr=0.05))
    checkpoint.save(path, model)
    adagrad = td.Adagrad(lr=0.1, initial_accumulator_value=0.25)
    other = trained(2, optimizer=adagrad)
    before = as_saved(other)
    with pytest.raises(ValueError, match=r"Adam .* Adagrad .*optimizer_state=False"):
        checkpoint.load(path, other)
    assert differences(before, as_saved(other)) == []
    report = checkpoint.load(path, other, optimizer_state=False)
    assert report.tables["user"].fresh == ("optimizer state",)
    for name, table in contents(other).items():
        assert torch.equal(table.rows, contents(model)[name].rows)
        assert bool((table.state["sum"] == 0.25).all())
        assert table.steps == 0
    train(other, range(3))


def test_what_was_not_saved_begins_anew_or_is_an_error(path: Path) -> None:
    model = trained(policies={"scored": td.Policy(), "sketched": td.Policy()})
    checkpoint.save(path, model)
    other = trained(2)
    before = as_saved(other)
    with pytest.raises(ValueError, match=r"without score step, score timestamp.*on_missing_state"):
        checkpoint.load(path, other, on_missing_state="error")
    assert differences(before, as_saved(other)) == []
    bounded = Net(policies={"scored": td.Policy(score=("timestamp", "frequency"))})
    report = checkpoint.load(path, bounded)
    assert report.tables["features.scored"].fresh == (
        "score frequency",
        "score step",
        "score timestamp",
    )
    assert contents(bounded)["scored"].ids == contents(model)["scored"].ids
    small = Net(policies={"scored": td.Policy(score="timestamp", capacity=20)})
    with pytest.raises(ValueError, match="room for 20 and no score to choose by"):
        checkpoint.load(path, small)


@pytest.mark.parametrize("score", ["timestamp", "frequency", "step"])
def test_a_smaller_capacity_keeps_the_highest_scores(path: Path, score: Any) -> None:
    model = trained(policies={"scored": td.Policy(score=score, capacity=150)})
    checkpoint.save(path, model)
    small = Net(policies={"scored": td.Policy(score=score, capacity=40)})
    report = checkpoint.load(path, small)
    kept, all_of = contents(small)["scored"], contents(model)["scored"]
    assert report.tables["features.scored"].evicted == len(all_of.ids) - 40 > 0
    word = score_words_of([small.features.group.config.tables[0]], False).index(score)
    ranked = sorted(zip(all_of.scores[:, word].tolist(), all_of.ids, strict=True))
    assert kept.ids == sorted(id for _, id in ranked[-40:])
    rows = dict(zip(all_of.ids, all_of.rows, strict=True))
    assert all(torch.equal(row, rows[id]) for id, row in zip(kept.ids, kept.rows, strict=True))
    train(small, range(6, 8))
    assert small.features.group.size(0) == 40


def test_a_table_that_evicts_nobody_must_have_room(path: Path) -> None:
    checkpoint.save(path, trained())
    policy = td.Policy(score="timestamp", capacity=20, on_full="error")
    small = Net(policies={"scored": policy})
    with pytest.raises(ValueError, match=r"has room for 20 and no score"):
        checkpoint.load(path, small)
    assert small.features.group.size(0) == 0


def test_names_must_match_unless_told_otherwise(path: Path) -> None:
    model = trained()
    checkpoint.save(path, model)
    other = Net(names=("scored", "plain", "new"))
    with pytest.raises(ValueError, match=r"'features.new'.*'features.sketched'.*strict=False"):
        checkpoint.load(path, other)
    report = checkpoint.load(path, other, strict=False)
    assert report.missing == ("features.new",)
    assert report.unexpected == ("features.sketched",)
    assert contents(other)["scored"].ids == contents(model)["scored"].ids
    assert contents(other)["new"].ids == []


def test_dense_entries_must_match_unless_told_otherwise(path: Path) -> None:
    checkpoint.save(path, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"\['1.bias', '1.weight'\]"):
        checkpoint.load(path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"'0.bias' was saved with shape \(2,\).* \(3,\)"):
        checkpoint.load(path, nn.Sequential(nn.Linear(2, 3)))
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    checkpoint.load(path, model, strict=False)


def test_a_table_of_other_columns_is_refused(path: Path) -> None:
    checkpoint.save(path, td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)))
    with pytest.raises(ValueError, match="saved with 4 columns, but the model's has 8"):
        checkpoint.load(path, td.DynamicEmbedding(8, optimizer=td.SGD(lr=0.1)))


def test_a_row_of_the_padding_id_is_refused(path: Path) -> None:
    items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    items(torch.arange(5))
    checkpoint.save(path, items)
    padded = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), padding_idx=3)
    with pytest.raises(ValueError, match="id 3, which is the padding id"):
        checkpoint.load(path, padded)
    assert padded.group.size(0) == 0


# -- wrong calls ---------------------------------------------------------------------------------


def test_wrong_arguments(path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"path is 3, expected a str or a Path"):
        checkpoint.save(3, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model is .*expected a torch.nn.Module"):
        checkpoint.save(path, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="asynchronous"):
        checkpoint.save(path, model, asynchronous=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"state.x is .*nothing is pickled"):
        checkpoint.save(path, model, state={"x": object()})
    with pytest.raises(TypeError, match=r"key 1.5"):
        checkpoint.save(path, model, state={1.5: 1})
    with pytest.raises(FileNotFoundError, match="it does not exist"):
        checkpoint.load(path, model)
    path.mkdir()
    with pytest.raises(FileNotFoundError, match=r"no manifest.json"):
        checkpoint.load(path, model)
    with pytest.raises(FileExistsError, match="exists but is not a checkpoint"):
        checkpoint.save(path, model)
    with pytest.raises(ValueError, match="on_missing_state is 'ignore'"):
        checkpoint.load(path, model, on_missing_state="ignore")  # type: ignore[arg-type]


def test_pending_gradients_are_refused(path: Path) -> None:
    items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), split=True)
    items(torch.arange(3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradients pending.*optimizer.step\(\)"):
        checkpoint.save(path, items)
    items.optimizer.step()
    checkpoint.save(path, items)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA")
def test_a_table_that_fills_most_of_the_memory(path: Path) -> None:
    program = Path(__file__).with_name("bounded_memory.py")
    ran = subprocess.run([sys.executable, program, path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("saved and loaded")


# -- the files -----------------------------------------------------------------------------------


def test_files_are_those_of_safetensors(path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    model = trained(policies={"scored": SCORED})
    checkpoint.save(path, model)
    (file,) = path.glob("*/features.scored/r*.safetensors")
    tensors = files.load_file(file)
    table = contents(model)["scored"]
    order = torch.argsort(tensors["id"])
    assert tensors["id"][order].tolist() == table.ids
    assert torch.equal(tensors["weight"][order], table.rows.cpu())
    for number, name in enumerate(table.score_names):
        assert torch.equal(tensors[f"score.{name}"][order], table.scores[:, number].cpu())
    for name, values in table.state.items():
        found = tensors[f"state.{name}"][order]
        assert torch.equal(found.reshape(values.shape), values.cpu())
    assert (int.from_bytes(file.read_bytes()[:8], "little") + 8) % 4096 == 0
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == "torch_dynemb checkpoint"
    assert manifest["kind"] == "full"
    assert set(manifest["tables"]) == {f"features.{n}" for n in ("scored", "sketched", "plain")} | {
        "user"
    }


def test_any_name_of_a_table_is_a_folder(path: Path) -> None:
    names = (
        "manifest.json",
        "torch_dynemb-unfinished",
        "spool-1-ids",
        "../up",
        ".",
        "..",
        "a/b",
        "ä" * 200,
        "x" * 300,
        "con: *?",
    )
    module = td.DynamicEmbeddingBagCollection(
        [td.TableConfig(name, 4) for name in names], optimizer=td.SGD(lr=0.1)
    )
    module({name: torch.arange(4)[None] for name in names})
    checkpoint.save(path, module)
    twin = td.DynamicEmbeddingBagCollection(
        [td.TableConfig(name, 4) for name in names], optimizer=td.SGD(lr=0.1)
    )
    assert set(checkpoint.load(path, twin).tables) == set(names)
    assert twin.sizes() == module.sizes()
    assert [entry.name for entry in path.parent.iterdir()] == ["last"]


def test_large_tables_are_several_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_dynemb.checkpoint.saving.table_files as table_files
    import torch_dynemb.rows.read as source

    monkeypatch.setattr(table_files, "FILE_BYTES", 4096)
    monkeypatch.setattr(source, "BATCH_BYTES", 512)
    model = trained()
    checkpoint.save(path, model)
    assert len(list(path.glob("*/features.scored/r*.safetensors"))) > 2
    for twin in (Net(seed=3), Moved(seed=3)):
        checkpoint.load(path, twin)
        assert differences(as_saved(model), as_saved(twin)) == []


# -- progress ------------------------------------------------------------------------------------


class Bar:
    """What tqdm is given."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, *, total: int, desc: str, **_: object) -> None:
        self.total, self.what, self.done = total, desc, 0
        Bar.made.append(self)

    def update(self, size: int) -> None:
        self.done += size

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_bars_show_the_progress(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = td.DynamicEmbedding(64, optimizer=td.Adam(lr=0.1), max_rows=4096)
    items(torch.arange(4000)).sum().backward()
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    checkpoint.save(path, items, progress=True)
    checkpoint.load(path, items, progress=True)
    checkpoint.save(path, items, progress=False)
    checkpoint.load(path, items)  # not a terminal
    bars = Bar.made
    assert [bar.what for bar in bars] == ["saving last", "loading last"]
    assert all(0.9 < bar.done / bar.total < 1.01 for bar in bars)
