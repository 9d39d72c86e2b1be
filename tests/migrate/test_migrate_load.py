"""Rows of sources become those of tables, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_files import some_rows
from table_rows import assert_holds

import torch_dynemb as td
from torch_dynemb import migrate
from torch_dynemb.migrate import CountedIds, Source, SourceRows
from torch_dynemb.ops.columns import Clock
from torch_dynemb.table.content import optimizer_steps, read_content, read_counts

pytestmark = pytest.mark.any_device

DIM = 4
IDS = torch.tensor([10, -3, 2**40, 7, 0])


def rows(count: int = 5) -> torch.Tensor:
    return torch.arange(count * DIM, dtype=torch.float32).reshape(count, DIM) / 8 - 1


def table(**arguments: Any) -> td.DynamicEmbedding:
    given: dict[str, Any] = {"optimizer": td.Adagrad(lr=0.1), **arguments}
    return td.DynamicEmbedding(DIM, **given)


def device_of(module: td.DynamicEmbedding) -> torch.device:
    return module.group.device


class Given(Source):
    """A source of batches that a test gives, the same each time or others."""

    def __init__(self, *passes: list[SourceRows], **told: Any) -> None:
        super().__init__("given", DIM, **told)
        self.passes, self.read = passes, 0
        self.counted: CountedIds | None = None

    def batches(self, size: int) -> Iterator[SourceRows]:
        number = min(self.read, len(self.passes) - 1)
        self.read += 1
        yield from self.passes[number]

    def waiting(self) -> CountedIds | None:
        return self.counted


def batch(ids: torch.Tensor, values: torch.Tensor, **beside: Any) -> SourceRows:
    return SourceRows(td.RowBatch(ids, values, **beside), "file", 100)


def test_rows_state_and_scores_arrive() -> None:
    made = some_rows(1000, DIM)
    policy = td.Policy(score="frequency", capacity=5000, admission=td.AdmitFrequent(3))
    items = table(policy=policy)
    source = migrate.read_tensors(
        torch.from_numpy(made.ids),
        torch.from_numpy(made.values),
        state={"sum": torch.from_numpy(made.state["sum"])},
        scores={"frequency": torch.from_numpy(made.scores["frequency"])},
        optimizer_steps=12,
    )
    report = migrate.load(items, source, batch_size=77)
    assert report == {"embedding": (1000, ("score step", "counts of admission"), ())}
    assert_holds(items, made, scores=("frequency",))
    assert optimizer_steps(items.group.tables, 0) == 12


def test_training_goes_on_like_that_of_a_table_which_made_the_rows() -> None:
    old, new = (table(optimizer=td.Adam(lr=0.05)) for _ in range(2))
    ids = IDS.to(device_of(old))

    def step(items: td.DynamicEmbedding) -> None:
        items(ids).square().sum().backward()
        items.optimizer.step()

    for _ in range(3):
        step(old)
    content = read_content(old.group.tables, 0)
    source = migrate.read_tensors(content.ids, content.rows, state=content.state, optimizer_steps=3)
    assert migrate.load(new, source)["embedding"].fresh == ()
    for _ in range(3):
        step(old)
        step(new)
    assert torch.equal(old(ids), new(ids))


def test_what_the_source_lacks_begins_anew_and_what_the_table_lacks_is_left_out() -> None:
    items = table(policy=td.Policy(score="timestamp"))
    source = migrate.read_tensors(IDS, rows(), scores={"frequency": torch.arange(5)})
    (report,) = migrate.load(items, source).values()
    assert report.fresh == ("optimizer state", "score step", "score timestamp")
    assert report.left_out == ("score frequency",)
    sgd = table(optimizer=td.SGD(lr=0.1))
    with_state = migrate.read_tensors(IDS, rows(), state={"sum": rows()})
    (report,) = migrate.load(sgd, with_state, optimizer_state=False).values()
    assert report == (5, (), ("state sum",))


def test_rows_take_the_dtype_of_the_table() -> None:
    items = table(dtype=torch.bfloat16)
    migrate.load(items, migrate.read_tensors(IDS, rows().double() / 3))
    expected = (rows().double() / 3).to(torch.bfloat16).float()
    assert torch.equal(items(IDS.to(device_of(items))).float().cpu(), expected.cpu())


def test_a_static_table_with_its_vocabulary() -> None:
    static = torch.nn.Embedding(5, DIM)
    items = table()
    migrate.load(items, migrate.read_embedding(static, IDS.cpu()))
    assert torch.equal(items(IDS.to(device_of(items))).cpu(), static.weight.cpu())


def test_several_tables_by_name_and_others_stay() -> None:
    configs = [td.TableConfig(name, DIM, [f"{name}_feature"]) for name in ("users", "items", "ads")]
    model = torch.nn.ModuleDict(
        {"tables": td.DynamicEmbeddingBagCollection(configs, optimizer=td.SGD(lr=0.1))}
    )
    group = model["tables"].group
    ads = torch.tensor([1, 2], device=group.device)
    group.insert_or_assign(2, ads, torch.ones(2, DIM, device=group.device))
    report = migrate.load(
        model,
        {
            "tables.users": migrate.read_tensors(IDS, rows()),
            "tables.items": migrate.read_tensors(IDS[:2], rows(2)),
        },
    )
    assert {name: of.ids for name, of in report.items()} == {"tables.items": 2, "tables.users": 5}
    assert group.sizes() == {"users": 5, "items": 2, "ads": 2}
    with pytest.raises(ValueError, match=r"has tables .* give a dict with the source of each"):
        migrate.load(model, migrate.read_tensors(IDS, rows()))
    with pytest.raises(ValueError, match=r"source has table 'users', but the model has \['tables"):
        migrate.load(model, {"users": migrate.read_tensors(IDS, rows())})


def test_tables_with_ids_are_replaced_only_where_that_is_asked_for() -> None:
    items = table()
    migrate.load(items, migrate.read_tensors(IDS, rows()))
    other = migrate.read_tensors(torch.tensor([1, 2, 3]), -rows(3))
    with pytest.raises(ValueError, match="has 5 ids already: give replace=True"):
        migrate.load(items, other)
    assert len(items) == 5
    migrate.load(items, other, replace=True)
    assert sorted(items.group.read(0, torch.tensor([1], device=device_of(items)))[0].tolist()) == (
        sorted((-rows(3))[0].tolist())
    )
    assert len(items) == 3


def test_scores_move_the_clocks_on() -> None:
    items = table(policy=td.Policy(score=("step", "timestamp")))
    seen = torch.tensor([3, 9, 4, 9, 1])
    times = torch.tensor([100, 200, 2**40, 200, 100])  # seconds; of a clock that goes fast
    source = migrate.read_tensors(IDS, rows(), scores={"step": seen, "timestamp": times})
    migrate.load(items, source)
    clock = items.group.index.clock
    assert int(clock[Clock.STEP]) == 9
    assert items.group.steps == 9
    assert int(clock[Clock.NOW]) == 2**40
    content = read_content(items.group.tables, 0)
    assert content.ids.tolist() == sorted(IDS.tolist())
    assert content.scores["step"].tolist() == seen[IDS.argsort()].tolist()


def test_ids_that_wait_for_admission_go_on_counting() -> None:
    items = table(policy=td.Policy(admission=td.AdmitFrequent(5)))
    source = Given([batch(IDS, rows())])
    source.counted = CountedIds(torch.tensor([77, 7]), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"has 2 ids that wait .* 1 counts, expected a count for"):
        migrate.load(items, source)
    source.counted = CountedIds(torch.tensor([77, 7]), torch.tensor([4, 2]))  # 7 has a row
    migrate.load(items, source)
    counted = read_counts(items.group.tables, 0)
    assert counted is not None
    assert counted.ids.tolist() == [77]
    assert counted.counts.tolist() == [4]
    items(torch.tensor([77], device=device_of(items))).sum().backward()
    assert 77 in items


BAD = {
    "an id twice": (
        lambda: migrate.read_tensors(torch.tensor([4, 9, 4]), rows(3)),
        "'embedding' gets from read_tensors an id twice: 4, and 1 ids too many: keep one row",
    ),
    "other columns": (
        lambda: migrate.read_tensors(IDS, rows()[:, :3]),
        "table 'embedding' has 4 columns, but rows of read_tensors have 3: .*embedding_dim=3",
    ),
    "NaN": (
        lambda: migrate.read_tensors(
            IDS, rows() * torch.tensor([[1.0], [1], [torch.nan], [1], [1]])
        ),
        "read_tensors: row 2, of id 1099511627776: its row has nan: .*non_finite='keep'",
    ),
    "infinite state": (
        lambda: migrate.read_tensors(IDS, rows(), state={"sum": rows() / 0}),
        r"row 0, of id 10: state 'sum' has -inf",
    ),
    "state of another optimizer": (
        lambda: migrate.read_tensors(IDS, rows(), state={"exp_avg": rows()}),
        r"has Adagrad with state \['sum'\], but read_tensors has \['exp_avg'\]: .*optimizer_state",
    ),
    "state by row": (
        lambda: migrate.read_tensors(IDS, rows(), state={"sum": torch.ones(5)}),
        "state 'sum' has 1 values of a row, but Adagrad of .* keeps 4",
    ),
    "a negative frequency": (
        lambda: migrate.read_tensors(IDS, rows(), scores={"frequency": torch.arange(-1, 4)}),
        "has an id of frequency -1",
    ),
    "too many ids": (
        lambda: migrate.read_tensors(torch.arange(500), rows(500)),
        "gets from read_tensors 500 ids for this part, but has room for 300: give it a larger",
    ),
    "rows that are not floats": (
        lambda: Given([batch(IDS, torch.zeros(5, DIM, dtype=torch.int64))]),
        "file: rows are a tensor of dtype torch.int64",
    ),
    "ids that are not int64": (
        lambda: Given([batch(IDS.int(), rows())]),
        "file: ids are a tensor of dtype torch.int32",
    ),
    "fewer rows than ids": (
        lambda: Given([batch(IDS, rows(4))]),
        r"file: rows have shape \(4, 4\), expected \(5, 4\)",
    ),
    "state that is not told of": (
        lambda: Given([batch(IDS, rows(), state={"sum": rows()})]),
        r"file: has state \['sum'\], but its source names \(\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused_and_nothing_changes(name: str) -> None:
    make, message = BAD[name]
    policy = td.Policy(score="frequency", capacity=300, on_full="error")
    items = table(policy=policy)
    migrate.load(items, migrate.read_tensors(IDS[:2], rows(2)))
    before = items.group.state.tensors()
    with pytest.raises((ValueError, TypeError), match=message):
        migrate.load(items, make(), replace=True)
    after = items.group.state.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[entry], after[entry]) for entry in before)


def test_nan_is_loaded_where_that_is_asked_for() -> None:
    items = table()
    values = rows()
    values[1, 2] = torch.nan
    migrate.load(items, migrate.read_tensors(IDS, values), non_finite="keep")
    there = items.group.read(0, IDS.to(device_of(items))).cpu()
    assert torch.equal(there.isnan(), values.isnan().cpu())


def test_a_source_that_changes_while_it_is_read_changes_nothing() -> None:
    items = table(policy=td.Policy(score="step"))
    first = [batch(IDS[:3], rows(3)), batch(IDS[3:], rows(2))]
    for second in (
        [batch(IDS[:3], rows(3))],
        [batch(IDS[:3], rows(3)), batch(IDS[:2], rows(2))],
    ):
        with pytest.raises(RuntimeError, match="given has changed while it was read"):
            migrate.load(items, Given(first, second))
        assert len(items) == 0
        assert items.group.index.clock.tolist()[: Clock.NOW] == [0]
    migrate.load(items, Given(first))
    assert len(items) == 5


def test_state_of_8_bits_is_refused() -> None:
    items = table(optimizer=td.Adam(lr=0.1, state_dtype=torch.uint8))
    moments = {"exp_avg": rows(), "exp_avg_sq": rows().abs()}
    source = migrate.read_tensors(IDS, rows(), state=moments)
    with pytest.raises(ValueError, match="state 'exp_avg' of 8 bits"):
        migrate.load(items, source)
    assert migrate.load(items, source, optimizer_state=False)["embedding"].ids == 5


def test_a_save_that_goes_on_from_a_load_is_a_whole_one(tmp_path: Path) -> None:
    items = table()
    td.checkpoint.record_changes(items)
    td.checkpoint.save(tmp_path / "first", items)
    migrate.load(items, migrate.read_tensors(IDS, rows()))
    with pytest.raises((ValueError, RuntimeError), match="since"):
        td.checkpoint.save(tmp_path / "second", items, since=tmp_path / "first")
