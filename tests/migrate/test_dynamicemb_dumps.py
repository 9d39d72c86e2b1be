"""Dumps of DynamicEmb: read as its description says they are written, and written to be read so."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import Rows, read_dynamicemb_dump, some_rows, write_dynamicemb
from table_rows import assert_holds

import torch_dynemb as td
from torch_dynemb import migrate
from torch_dynemb.migrate.dynamicemb_calls import DynamicEmbDump, DynamicEmbLoad
from torch_dynemb.table.content import optimizer_steps, read_content, read_counts

pytestmark = pytest.mark.cpu_only("files, which are read on the CPU")

DIM = 6
SECOND = 10**9
ADAGRAD = {"opt_type": "exact_adagrad", "lr": 0.1, "eps": 1e-8, "initial_accumulator_value": 0.0}
LFU = {"evict_strategy": "EvictStrategy.KLfu", "dist_type": "roundrobin"}


def table(**arguments: Any) -> td.DynamicEmbedding:
    policy = td.Policy(score="frequency")
    given: dict[str, Any] = {"optimizer": td.Adagrad(lr=0.1), "policy": policy}
    return td.DynamicEmbedding(DIM, **{**given, **arguments})


def trained(**arguments: Any) -> td.DynamicEmbedding:
    module = table(**arguments)
    draw = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(-200, 200, (64,), generator=draw)
        module(ids).square().sum().backward()
        module.optimizer.step()
    return module


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_dump_with_state_and_scores(tmp_path: Path, ranks: int) -> None:
    rows, items = some_rows(500, DIM), table()
    write_dynamicemb(
        tmp_path,
        "users",
        rows,
        ranks=ranks,
        options={**ADAGRAD, **LFU},
        scores=["frequency"],
        state=["sum"],
    )
    source = migrate.read_dynamicemb(tmp_path, "users")
    report = migrate.load(items, source, batch_size=64)
    assert report["embedding"] == (500, ("optimizer steps", "score step"), ())
    assert_holds(items, rows, scores=("frequency",))


def test_adam_continues_where_it_was(tmp_path: Path) -> None:
    rows = some_rows(100, DIM)
    rows.state = {"exp_avg": rows.values * 2, "exp_avg_sq": rows.values**2}
    options = {"opt_type": "adam", "lr": 0.1, "iters": 17, "beta1": 0.9, "beta2": 0.999}
    write_dynamicemb(tmp_path, "users", rows, options=options, state=["exp_avg", "exp_avg_sq"])
    items = table(optimizer=td.Adam(lr=0.1))
    migrate.load(items, migrate.read_dynamicemb(tmp_path, "users"))
    assert_holds(items, rows)
    assert optimizer_steps(items.group.tables, 0) == 17


@pytest.mark.parametrize("padding", [0, 3])
def test_row_wise_adagrad_also_with_the_padding_of_2025(tmp_path: Path, padding: int) -> None:
    rows = some_rows(100, DIM, per_row=True)
    padded = Rows(rows.ids, rows.values, {**rows.state, "none": np.ones((100, padding))})
    options = {"lr": 0.1, "eps": 1e-8, "initial_accumulator_value": 0.0}
    if padding == 0:
        options["opt_type"] = "exact_row_wise_adagrad"  # type: ignore[assignment]
    write_dynamicemb(
        tmp_path,
        "users",
        padded,
        options=options,
        state=["sum", "none"],
        state_file="emb_opt_values" if padding == 0 else "opt_values",
    )
    items = table(optimizer=td.RowWiseAdagrad(lr=0.1))
    migrate.load(items, migrate.read_dynamicemb(tmp_path, "users"))
    assert_holds(items, rows)


@pytest.mark.parametrize("kind", ["sgd", "exact_sgd", None])
def test_sgd_dumps_empty_files_of_state(tmp_path: Path, kind: str | None) -> None:
    rows = some_rows(20, DIM)
    rows.state = {"none": np.empty((20, 0))}
    options = {"lr": 0.1} if kind is None else {"opt_type": kind, "lr": 0.1}
    write_dynamicemb(tmp_path, "users", rows, ranks=2, options=options, state=["none"])
    items = table(optimizer=td.SGD(lr=0.1))
    migrate.load(items, migrate.read_dynamicemb(tmp_path, "users"))
    assert_holds(items, Rows(rows.ids, rows.values))


def test_ages_become_times_of_the_last_sight(tmp_path: Path) -> None:
    rows = some_rows(3, DIM)
    rows.scores = {"age": np.array([5 * SECOND, 0, 10**18])}
    write_dynamicemb(
        tmp_path, "users", rows, options={"evict_strategy": "EvictStrategy.KLru"}, scores=["age"]
    )
    items = table(policy=td.Policy(score="timestamp"), optimizer=td.SGD(lr=0.1))
    migrate.load(items, migrate.read_dynamicemb(tmp_path, "users", now=1000))
    rows.scores = {"timestamp": np.array([995, 1000, 0])}
    assert_holds(items, rows, state=False, scores=("timestamp",))


def test_two_scores_are_named_by_the_caller(tmp_path: Path) -> None:
    rows = some_rows(3, DIM)
    times = np.array([7, 8, 9]) * SECOND + 5
    rows.scores = {"time": times, "frequency": np.array([3, 2, 1])}
    write_dynamicemb(
        tmp_path,
        "users",
        rows,
        options={"evict_strategy": "EvictStrategy.KLruLfu"},
        scores=["time", "frequency"],
    )
    with pytest.raises(ValueError, match=r"has 2 scores of a row .*: give scores="):
        migrate.read_dynamicemb(tmp_path, "users")
    items = table(policy=td.Policy(score=("frequency", "timestamp")), optimizer=td.SGD(lr=0.1))
    source = migrate.read_dynamicemb(tmp_path, "users", scores=("timestamp", "frequency"))
    migrate.load(items, source)
    rows.scores["timestamp"] = np.array([7, 8, 9])
    assert_holds(items, rows, state=False, scores=("timestamp", "frequency"))


def test_steps_and_custom_scores(tmp_path: Path) -> None:
    rows = some_rows(3, DIM)
    rows.scores = {"given": np.array([4, 5, 6])}
    for name, options in (("custom", {}), ("step", {"step_score": 9})):
        folder = tmp_path / name
        strategy = {"evict_strategy": "EvictStrategy.KCustomized", **options}
        write_dynamicemb(folder, "users", rows, options=strategy, scores=["given"])
        items = table(policy=td.Policy(score=name), optimizer=td.SGD(lr=0.1))
        migrate.load(items, migrate.read_dynamicemb(folder, "users"))
        expected = Rows(rows.ids, rows.values, {}, {name: rows.scores["given"]})
        assert_holds(items, expected, state=False, scores=(name,))
        assert items.group.steps == (9 if name == "step" else 0)


def test_ids_that_wait_for_admission(tmp_path: Path) -> None:
    rows = some_rows(5, DIM)
    counter = {1001: 2, -1002: 3}
    write_dynamicemb(tmp_path, "users", rows, ranks=2, options=ADAGRAD, counter=counter)
    items = table(policy=td.Policy(admission=td.AdmitFrequent(9)))
    migrate.load(items, migrate.read_dynamicemb(tmp_path, "users", counter=True))
    counted = read_counts(items.group.tables, 0)
    assert counted is not None
    seen = dict(zip(counted.ids.tolist(), counted.counts.tolist(), strict=True))
    assert seen == counter


# -- written -------------------------------------------------------------------------------------


OPTIMIZERS = [
    (td.SGD(lr=0.5), "sgd", 0),
    (td.Adam(lr=0.25, betas=(0.5, 0.75), eps=0.125), "adam", 2 * DIM),
    (td.Adagrad(lr=0.5, eps=0.25), "exact_adagrad", DIM),
    (td.RowWiseAdagrad(lr=0.5, initial_accumulator_value=2.0), "exact_row_wise_adagrad", 1),
    (td.Ftrl(lr=0.5, l1=0.25, l2=0.5, beta=1.0), "ftrl", 2 * DIM),
]


@pytest.mark.parametrize(("optimizer", "kind", "columns"), OPTIMIZERS)
def test_what_is_dumped_is_what_the_table_holds(
    tmp_path: Path, optimizer: Any, kind: str, columns: int
) -> None:
    items = trained(optimizer=optimizer)
    DynamicEmbDump(str(tmp_path / "dump"), items, optim=True)
    dumped, options = read_dynamicemb_dump(tmp_path / "dump" / "model", "embedding", DIM)
    content = read_content(items.group.tables, 0)
    assert dumped.ids.tolist() == content.ids.tolist()
    assert np.array_equal(dumped.values, content.rows.numpy())
    order = sorted(content.state)  # as DynamicEmb has them: linear, then sum
    state = [content.state[name].numpy() for name in order]
    expected = np.concatenate([np.empty((len(dumped.ids), 0), np.float32), *state], 1)
    assert expected.shape[1] == columns
    assert np.array_equal(dumped.state["all"], expected)  # SGD has a file without bytes

    assert np.array_equal(dumped.scores["all"][:, 0], content.scores["frequency"].numpy())
    assert options["opt_type"] == kind
    assert options["lr"] == optimizer.lr
    assert options["evict_strategy"] == "EvictStrategy.KLfu"
    assert options["dist_type"] == "roundrobin"
    if kind == "adam":
        known = {key: options[key] for key in ("iters", "beta1", "beta2", "eps", "weight_decay")}
        assert known == {"iters": 4, "beta1": 0.5, "beta2": 0.75, "eps": 0.125, "weight_decay": 0}
    if kind == "ftrl":
        known = {key: options[key] for key in ("learning_rate_power", "ftrl_beta", "l2_reg")}
        assert known == {"learning_rate_power": -0.5, "ftrl_beta": 1.0, "l2_reg": 0.5}
        assert options["l1_reg"] == 0.25
    dtypes = {options[name] for name in ("embedding_dtype", "optim_state_dtype")}
    assert (dtypes, options["embedding_dim"]) == ({"float32"}, DIM)


@pytest.mark.parametrize(("optimizer", "kind", "columns"), OPTIMIZERS)
def test_a_dump_comes_back(tmp_path: Path, optimizer: Any, kind: str, columns: int) -> None:
    items, other = trained(optimizer=optimizer), table(optimizer=optimizer)
    DynamicEmbDump(tmp_path, items, optim=True)
    DynamicEmbLoad(tmp_path, other, optim=True)
    draw = read_content(items.group.tables, 0).ids[::3]
    for module in (items, other):
        module(draw).square().sum().backward()
        module.optimizer.step()
    mine, theirs = (read_content(of.group.tables, 0) for of in (items, other))
    assert torch.equal(mine.ids, theirs.ids)
    assert torch.equal(mine.rows, theirs.rows)
    for name, values in mine.state.items():
        assert torch.equal(values, theirs.state[name])


SCORES = {
    "timestamp": (("timestamp",), "KLru"),
    "step": (("step",), "KCustomized"),
    "custom": (("custom",), "KCustomized"),
    "frequency": (("frequency",), "KLfu"),
    "two": (("frequency", "timestamp"), None),
    "none": (None, None),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_come_back(tmp_path: Path, name: str) -> None:
    words, strategy = SCORES[name]
    policy = td.Policy() if words is None else td.Policy(score=words)
    items, other = (table(policy=policy) for _ in range(2))
    ids = torch.tensor([5, -6, 7])
    if words is not None and "timestamp" in words:
        items.group.clock.set_now(1000)
    for now, some in ((1000, ids), (1003, ids[:2]), (1007, ids[:1])):
        if words == ("custom",):
            items.group.scores.set_batch(0, now)
        items(some).sum().backward()
        if words is not None and "timestamp" in words:
            items.group.step(now)
        else:
            items.optimizer.step()
    DynamicEmbDump(tmp_path, items)
    options = json.loads((tmp_path / "model" / "embedding_opt_args.json").read_text())
    given = f"EvictStrategy.{strategy}" if strategy else None
    assert options.get("evict_strategy") == given
    assert (tmp_path / "model" / "embedding_emb_scores.rank_0.world_size_1").exists() == (
        words is not None
    )
    DynamicEmbLoad(tmp_path, other)
    mine, theirs = (read_content(of.group.tables, 0) for of in (items, other))
    if words == ("timestamp",):  # which are ages there, and begin anew from now
        ages = [of.scores["timestamp"].max() - of.scores["timestamp"] for of in (mine, theirs)]
        assert torch.equal(*ages)
    elif words is not None:
        for word in words:
            assert torch.equal(mine.scores[word], theirs.scores[word])


def test_counts_of_admission_come_back(tmp_path: Path) -> None:
    policy = td.Policy(admission=td.AdmitFrequent(3))
    items, other = (table(policy=policy) for _ in range(2))
    for _ in range(2):
        items(torch.tensor([5, 6])).sum().backward()
        items.optimizer.step()
    items(torch.tensor([5])).sum().backward()
    DynamicEmbDump(tmp_path, items, counter=True)
    DynamicEmbLoad(tmp_path, other, counter=True)
    counted = read_counts(other.group.tables, 0)
    assert counted is not None
    assert (counted.ids.tolist(), counted.counts.tolist()) == ([6], [2])
    assert 5 in other


def test_collections_have_folders_and_tables_can_be_chosen(tmp_path: Path) -> None:
    configs = [td.TableConfig(name, DIM, [name]) for name in ("users", "users_emb_keys")]
    model = torch.nn.Module()
    model.over = torch.nn.Module()
    model.over.sparse = td.DynamicEmbeddingBagCollection(configs, optimizer=td.SGD(lr=0.1))
    group = model.over.sparse.group
    for number in range(2):
        group.insert_or_assign(number, torch.arange(3 + number), torch.ones(3 + number, DIM))
    DynamicEmbDump(tmp_path / "all", model)
    folder = tmp_path / "all" / "model.over.sparse"
    assert len(read_dynamicemb_dump(folder, "users", DIM)[0].ids) == 3
    assert len(read_dynamicemb_dump(folder, "users_emb_keys", DIM)[0].ids) == 4
    one = {"model.over.sparse": ["users"]}
    DynamicEmbDump(tmp_path / "one", model, one)
    assert len(list((tmp_path / "one").rglob("*_opt_args.json"))) == 1
    group.clear(0)
    group.clear(1)
    DynamicEmbLoad(tmp_path / "all", model, one)
    assert group.sizes() == {"users": 3, "users_emb_keys": 0}
    with pytest.raises(ValueError, match=r"table_names has 'users' of 'model', but the model has"):
        DynamicEmbDump(tmp_path / "none", model, {"model": ["users"]})


def test_rows_in_files_are_dumped_and_loaded(tmp_path: Path) -> None:
    def stored(name: str) -> td.DynamicEmbedding:
        storage = td.SSDStore(str(tmp_path / name), cache="100 rows", disk="1GB")
        return table(storage=storage, name=name)

    items, other = stored("a"), stored("b")
    rows = some_rows(2000, DIM)
    source = migrate.read_tensors(
        torch.from_numpy(rows.ids),
        torch.from_numpy(rows.values),
        state={"sum": torch.from_numpy(rows.state["sum"])},
        scores={"frequency": torch.from_numpy(rows.scores["frequency"])},
    )
    migrate.load(items, source, batch_size=300)
    DynamicEmbDump(tmp_path / "dump", items, optim=True)
    DynamicEmbLoad(tmp_path / "dump", other, optim=True)
    dumped, _ = read_dynamicemb_dump(tmp_path / "dump" / "model", "embedding", DIM)
    order = rows.ids.argsort()
    assert np.array_equal(dumped.values, rows.values[order])
    ids = torch.from_numpy(rows.ids)
    assert torch.equal(other.group.read(0, ids), torch.from_numpy(rows.values))


# -- refused -------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


DAMAGE = {
    "a file of a rank is missing": (
        lambda folder: (folder / "users_emb_keys.rank_1.world_size_2").unlink(),
        "has files users_emb_keys of rank 0 of 2, expected all ranks of one dump",
    ),
    "two dumps": (
        lambda folder: shutil.copy(
            folder / "users_emb_keys.rank_0.world_size_2",
            folder / "users_emb_keys.rank_0.world_size_1",
        ),
        "has files users_emb_keys of rank 0 of 1, rank 0 of 2, rank 1 of 2",
    ),
    "values of a rank are missing": (
        lambda folder: (folder / "users_emb_values.rank_0.world_size_2").unlink(),
        "has files users_emb_values of rank 1 of 2",
    ),
    "values are cut off": (
        lambda folder: cut(folder / "users_emb_values.rank_0.world_size_2", 100),
        r"users_emb_values.rank_0.world_size_2 has 100 bytes, expected rows of",
    ),
    "keys are cut off": (
        lambda folder: cut(folder / "users_emb_keys.rank_1.world_size_2", 8 * 7),
        r"has \d+ bytes, expected rows of",
    ),
    "scores are cut off": (
        lambda folder: cut(folder / "users_emb_scores.rank_1.world_size_2", 8),
        "users_emb_scores.rank_1.world_size_2 has 8 bytes",
    ),
    "state is cut off": (
        lambda folder: cut(folder / "users_emb_opt_values.rank_1.world_size_2", 24),
        "users_emb_opt_values.rank_1.world_size_2 has 24 bytes",
    ),
    "state of all ranks is empty": (
        lambda folder: [
            cut(folder / f"users_emb_opt_values.rank_{rank}.world_size_2", 0) for rank in (0, 1)
        ],
        "users_emb_opt_values.rank_0.world_size_2 has 0 bytes",
    ),
    "a JSON that is cut off": (
        lambda folder: cut(folder / "users_opt_args.json", 20),
        "users_opt_args.json is damaged",
    ),
    "an unknown optimizer": (
        lambda folder: (folder / "users_opt_args.json").write_text('{"opt_type": "lamb"}'),
        "opt_type is 'lamb', which is not known here",
    ),
    "state of other columns": (
        lambda folder: (folder / "users_opt_args.json").write_text('{"opt_type": "adam"}'),
        "has 6 values of state of a row, but adam of rows with 6 columns has 12",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_dumps_are_refused_and_nothing_changes(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    folder = tmp_path / "model"
    write_dynamicemb(
        folder,
        "users",
        some_rows(40, DIM),
        ranks=2,
        options={**ADAGRAD, **LFU},
        scores=["frequency"],
        state=["sum"],
    )
    damage(folder)
    configs = [td.TableConfig("users", DIM, ["user"], policy=td.Policy(score="frequency"))]
    model = td.DynamicEmbeddingBagCollection(configs, optimizer=td.Adagrad(lr=0.1))
    model.group.insert_or_assign(0, torch.arange(3), torch.ones(3, DIM))
    with pytest.raises(ValueError, match=message):
        DynamicEmbLoad(tmp_path, model, optim=True)
    assert model.group.sizes() == {"users": 3}


def test_loads_that_do_not_fit(tmp_path: Path) -> None:
    items = trained()
    DynamicEmbDump(tmp_path, items)
    with pytest.raises(FileNotFoundError, match=r"no files embedding_emb_opt_values.*optim=False"):
        DynamicEmbLoad(tmp_path, table(), optim=True)
    DynamicEmbDump(tmp_path / "sgd", trained(optimizer=td.SGD(lr=0.1)), optim=True)
    with pytest.raises(ValueError, match=r"but it was dumped with 'sgd', state \[\]"):
        DynamicEmbLoad(tmp_path / "sgd", table(), optim=True)
    with pytest.raises(ValueError, match=r"keeps the score 'step', but it was dumped with evict_s"):
        DynamicEmbLoad(tmp_path, table(policy=td.Policy(score="step")))
    with pytest.raises(ValueError, match=r"has 8 columns, but rows of .* have 6"):
        DynamicEmbLoad(tmp_path, td.DynamicEmbedding(8, optimizer=td.SGD(lr=0.1)))
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        DynamicEmbLoad(tmp_path / "nowhere", items)
    counting = table(policy=td.Policy(score="frequency", admission=td.AdmitFrequent(2)))
    with pytest.raises(FileNotFoundError, match=r"has no embedding_counter_keys.* counter=False"):
        DynamicEmbLoad(tmp_path, counting, counter=True)
    dumped = tmp_path / "with state"
    DynamicEmbDump(dumped, items, optim=True)
    with pytest.raises(ValueError, match=r"has an optimizer with state \['exp_avg'"):
        DynamicEmbLoad(dumped, table(optimizer=td.Adam(lr=0.1)), optim=True)
    DynamicEmbLoad(dumped, table(optimizer=td.Adam(lr=0.1)))


def test_dumps_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is trained by AdamW.* give optim=False"):
        DynamicEmbDump(tmp_path / "a", trained(optimizer=td.AdamW(lr=0.1)), optim=True)
    sketch = td.Policy(admission=td.AdmitFrequentSketch(2, memory=4096))
    with pytest.raises(ValueError, match=r"does not count ids one by one: give counter=False"):
        DynamicEmbDump(tmp_path / "a", table(policy=sketch), counter=True)
    decayed = td.Policy(score="decayed", half_life="1d")
    with pytest.raises(ValueError, match=r"decayed counts, a score that DynamicEmb does not have"):
        DynamicEmbDump(tmp_path / "a", table(policy=decayed))
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "note").write_text("mine")
    with pytest.raises(FileExistsError, match="has files already: give another path, or"):
        DynamicEmbDump(tmp_path / "b", trained())
    with pytest.raises(FileExistsError, match="is not a folder"):
        DynamicEmbDump(tmp_path / "b" / "note", trained())
    with pytest.raises(TypeError, match=r"model is 3, expected a torch.nn.Module"):
        DynamicEmbDump(tmp_path / "c", 3)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="the model has no dynamic tables"):
        DynamicEmbDump(tmp_path / "c", torch.nn.Linear(2, 2))


def test_another_dump_takes_the_place_of_one(tmp_path: Path) -> None:
    rows, items, folder = some_rows(40, DIM), trained(), tmp_path / "model"
    write_dynamicemb(folder, "embedding", rows, ranks=3, options=ADAGRAD, state=["sum"])
    DynamicEmbDump(tmp_path, items, allow_overwrite=True)
    dumped, _ = read_dynamicemb_dump(folder, "embedding", DIM)
    assert len(dumped.ids) == len(items)
    assert not dumped.state
    assert not list(tmp_path.rglob("*.tmp"))


def test_tables_and_ranks_without_ids(tmp_path: Path) -> None:
    DynamicEmbDump(tmp_path / "none", table(), optim=True)
    items = table()
    DynamicEmbLoad(tmp_path / "none", items, optim=True)
    assert len(items) == 0
    rows = some_rows(2, DIM)  # of five ranks most have none
    options = {**ADAGRAD, **LFU}
    folder = tmp_path / "few"
    write_dynamicemb(
        folder, "u", rows, ranks=5, options=options, state=["sum"], scores=["frequency"]
    )
    migrate.load(items, migrate.read_dynamicemb(folder, "u"))
    assert_holds(items, rows, scores=("frequency",))


def test_a_full_disk_leaves_the_dump_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DynamicEmbDump(tmp_path, trained())
    (tmp_path / "model/notes.tmp").write_text("of the user")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def full(file: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        DynamicEmbDump(tmp_path, trained(), optim=True, allow_overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
