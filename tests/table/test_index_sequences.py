"""Random sequences of operations on a group of tables, compared with the oracle after each.

Every operation runs twice, on one thread and on two: the states must be equal bit for bit.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from collisions import ids_in_first_buckets, ids_in_one_bucket
from execution import threads
from group_calls import Call, bag_lookup, call_of, differences, raises_in_step, read_bags, snapshot
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from oracle import Oracle, TableFullError
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Slab, Table
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device

SEED = 17
MAX_ROWS = 7000
PADDING = 7
BULK = 2600  # two features of this size pass what one thread does alone
OPTIMIZERS: list[OptimizerConfig] = [
    td.SGD(lr=0.5),
    td.SGD(lr=0.25, weight_decay=0.125),
    td.Adagrad(lr=0.5, initial_accumulator_value=0.5),
    td.RowWiseAdagrad(lr=0.5, weight_decay=0.125),
    td.Adam(lr=0.1, betas=(0.75, 0.875)),
    td.AdamW(lr=0.1, weight_decay=0.25),
]


def make_group(optimizer: OptimizerConfig, score: Any) -> td.TableGroup:
    """Two tables share the rows of one dim; the third has a padding id and its own default."""
    uniform = td.Uniform(-1.0, 1.0)
    policy = td.Policy(score=score)
    tables = [
        td.TableConfig("first", 3, initializer=uniform, policy=policy),
        td.TableConfig("second", 3, initializer=uniform, eval_default="zeros", policy=policy),
        td.TableConfig("third", 5, initializer=uniform, padding_idx=PADDING, policy=policy),
    ]
    return td.TableGroup(tables, optimizer=optimizer, max_rows=MAX_ROWS, seed=SEED)


@cache
def awkward_ids(table: int) -> list[int]:
    """Extremes, one bucket's worth and more of ids that collide, and small numbers."""
    group = make_group(OPTIMIZERS[0], "none")
    same_first = ids_in_first_buckets(group, table, 24, buckets=1, bucket_count=1 << 20)
    same_both = ids_in_one_bucket(group, table, 24, bucket_count=64)
    extremes = [0, 1, -1, PADDING, -(1 << 63), (1 << 63) - 1, 1 << 32]
    return [*extremes, *same_first.tolist(), *same_both.tolist(), *range(2, 30)]


@st.composite
def some_ids(draw: st.DrawFn, table: int, max_size: int = 30) -> list[int]:
    id = st.one_of(
        st.sampled_from(awkward_ids(table)),
        st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1),
    )
    return draw(st.lists(id, max_size=max_size))


@st.composite
def one_table(draw: st.DrawFn) -> tuple[int, list[int]]:
    table = draw(st.integers(0, 2))
    return table, draw(some_ids(table))


@st.composite
def bags_of_features(draw: st.DrawFn) -> list[tuple[int, list[list[int]]]]:
    """Features with equally many bags, of any length, also of the same table."""
    tables = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    batch = draw(st.integers(0, 3))
    return [(table, [draw(some_ids(table, 6)) for _ in range(batch)]) for table in tables]


def flattened(features: list[tuple[int, list[list[int]]]]) -> list[tuple[int, list[int]]]:
    return [(table, [id for bag in bags for id in bag]) for table, bags in features]


class Sequence(RuleBasedStateMachine):
    """Operations on two equal groups and an oracle."""

    @initialize(optimizer=st.sampled_from(OPTIMIZERS), score=st.sampled_from(["none", "step"]))
    def start(self, optimizer: OptimizerConfig, score: str) -> None:
        self.groups = {count: make_group(optimizer, score) for count in (1, 2)}
        self.oracle = Oracle(self.groups[1])
        self.next_bulk = 1 << 40

    def on_both(self, operation: Any) -> list[Any]:
        results = []
        for count, group in self.groups.items():
            with threads(count):
                results.append(operation(group))
        return results

    def insert(self, call: Call, features: list[tuple[int, list[int]]]) -> list[Tensor]:
        """Call find_or_insert on both groups and the oracle; return [] if the table was full."""
        try:
            expected = self.oracle.find_or_insert(features)
        except TableFullError:
            before = snapshot(self.groups[1])
            before.pop("scores")  # of ids that are there: set before room is looked for
            for group in self.groups.values():
                with raises_in_step(group, "larger max_rows, or erase ids"):
                    group.find_or_insert(call.ids, call.offsets, call.tables)
                after = snapshot(group)
                after.pop("scores")
                assert differences(before, after) == []
            return []
        handles = self.on_both(lambda g: g.find_or_insert(call.ids, call.offsets, call.tables))
        for given in handles:
            assert given.tolist() == expected
        return handles

    @rule(features=bags_of_features())
    def insert_features(self, features: list[tuple[int, list[list[int]]]]) -> None:
        self.insert(call_of(self.groups[1], features), flattened(features))

    @rule(tables=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def insert_many(self, tables: list[int]) -> None:
        features = []
        for table in tables:
            ids = list(range(self.next_bulk, self.next_bulk + BULK))
            self.next_bulk += BULK
            features.append((table, ids + ids[:50]))
        self.insert(call_of(self.groups[1], [(t, [ids]) for t, ids in features]), features)

    @rule(chosen=one_table())
    def find(self, chosen: tuple[int, list[int]]) -> None:
        table, ids = chosen
        call = call_of(self.groups[1], [(table, [ids])])
        expected = self.oracle.find(table, ids)
        for found in self.on_both(lambda g: g.find(call.ids, call.offsets, call.tables)):
            assert found.handles.tolist() == expected
            assert found.missing[table] == expected.count(-1)

    @rule(chosen=one_table())
    def erase(self, chosen: tuple[int, list[int]]) -> None:
        table, ids = chosen
        expected = self.oracle.erase(table, ids)
        tensor = torch.tensor(ids, dtype=torch.int64)
        assert self.on_both(lambda g: g.erase(table, tensor)) == [expected, expected]

    @rule(table=st.integers(0, 2), keep=st.integers(0, 3))
    def erase_most(self, table: int, keep: int) -> None:
        ids = list(self.oracle.handles[table])[keep:]
        expected = self.oracle.erase(table, ids)
        tensor = torch.tensor(ids, dtype=torch.int64)
        assert self.on_both(lambda g: g.erase(table, tensor)) == [expected, expected]

    @rule(table=st.integers(0, 2), ids=st.integers(0, 4000))
    def grow(self, table: int, ids: int) -> None:
        self.oracle.grow(table, ids)
        self.on_both(lambda g: g.reserve(table, ids))

    @rule(features=bags_of_features(), data=st.data())
    def train(self, features: list[tuple[int, list[list[int]]]], data: st.DataObject) -> None:
        call = call_of(self.groups[1], features)
        handles = self.insert(call, flattened(features))
        if not handles:
            return
        batch, columns = len(features[0][1]), sum(call.dims)
        sixteenths = data.draw(  # sums of these are exact, so that none is nearly zero
            st.lists(st.integers(1, 64), min_size=columns * batch, max_size=columns * batch)
        )
        gradient = np.array(sixteenths, np.float64).reshape(batch, columns) / 16
        expected, sums = self.expected_lookup(features, gradient)

        def learn(group: td.TableGroup) -> Tensor:
            output = bag_lookup(group, call, handles=handles[0])
            output.backward(torch.tensor(gradient, dtype=torch.float32))
            return output.detach()

        outputs = self.on_both(learn)
        np.testing.assert_allclose(outputs[0].cpu(), expected, rtol=2e-4, atol=2e-5)
        assert torch.equal(*outputs)
        self.oracle.update(sums, {table for table, _ in features})

    def expected_lookup(
        self, features: list[tuple[int, list[list[int]]]], gradient: np.ndarray
    ) -> tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]:
        """The oracle's output, and the sum of the gradients of each (table, id)."""
        output = np.zeros_like(gradient)
        sums: dict[tuple[int, int], np.ndarray] = {}
        column = 0
        for table, bags in features:
            columns = slice(column, column + self.oracle.tables[table].embedding_dim)
            for b, bag in enumerate(bags):
                for id in bag:
                    output[b, columns] += self.oracle.read(table, id)
                    sums[table, id] = sums.get((table, id), 0.0) + gradient[b, columns]
            column = columns.stop
        return output, sums

    @rule()
    def advance_clock(self) -> None:
        self.oracle.clock += 1
        for group in self.groups.values():
            group.index.clock[0] += 1

    @rule(chosen=one_table())
    def read(self, chosen: tuple[int, list[int]]) -> None:
        table, ids = chosen
        tensor = torch.tensor(ids, dtype=torch.int64)
        dim = self.oracle.tables[table].embedding_dim
        expected = np.array([self.oracle.read(table, id) for id in ids]).reshape(-1, dim)
        rows = self.on_both(lambda g: g.read(table, tensor))
        np.testing.assert_allclose(rows[0].cpu(), expected, rtol=2e-4, atol=2e-5)
        assert torch.equal(*rows)

    @rule()
    def save_and_load(self) -> None:
        """Continues with a new group that has loaded the state of the old one."""

        def reloaded(group: td.TableGroup) -> td.TableGroup:
            loaded = make_group(group.config.optimizer, group.config.tables[0].policy.score)
            loaded.state.load(group.state.tensors())
            return loaded

        self.groups = dict(zip(self.groups, self.on_both(reloaded), strict=True))

    @rule()
    def load_in_place(self) -> None:
        """What was done since the state was saved is gone."""
        for group in self.groups.values():
            saved = group.state.tensors()
            before = snapshot(group)
            group.insert(0, torch.arange(5000, 5300))
            group.erase(1, torch.arange(20))
            group.state.load(saved)
            after = snapshot(group)
            for tensors in (before, after):
                tensors.pop("free_rows")  # entries past the count are left over
            assert differences(before, after) == []

    @rule()
    def copy(self) -> None:
        self.groups = {count: copy.deepcopy(group) for count, group in self.groups.items()}

    @invariant()
    def integers_agree(self) -> None:
        oracle = self.oracle
        for group in self.groups.values():
            tables = group.index.tables
            assert tables[:, Table.SIZE].tolist() == [len(ids) for ids in oracle.handles]
            assert tables[:, Table.BUCKET_COUNT].tolist() == oracle.buckets
            assert tables[:, Table.INSERTED].tolist() == oracle.inserted
            assert tables[:, Table.ERASED].tolist() == oracle.erased
            assert group.index.slabs[:, Slab.NEXT_ROW].tolist() == oracle.next_row
            assert group.rows.row_clock[:3].tolist() == oracle.steps
            for slab, free in enumerate(oracle.free):
                assert group.index.slabs[slab, Slab.FREE_COUNT] == len(free)
                assert group.index.free_rows[slab, : len(free)].tolist() == free

    def teardown(self) -> None:
        if not hasattr(self, "groups"):
            return
        snapshots = [snapshot(group) for group in self.groups.values()]
        assert differences(*snapshots) == []
        for group in self.groups.values():
            for table in range(3):
                self.check_content(group, table)

    def check_content(self, group: td.TableGroup, table: int) -> None:
        """Ids, handles, scores, rows and optimizer state of a whole table."""
        handles = self.oracle.handles[table]
        batches = list(group.export(table, batch_size=1000))
        ids = [id for batch in batches for id in batch.ids.tolist()]
        assert sorted(ids) == sorted(handles)
        call = call_of(group, [(table, [ids])])
        found = group.find(call.ids, call.offsets, call.tables).handles
        assert found.tolist() == [handles[id] for id in ids]
        if group.config.layout.score_words:
            scores = [score for batch in batches for score in batch.scores.tolist()]
            assert scores == [self.oracle.scores[table][id] for id in ids]
        if not ids:
            return
        rows = torch.cat([batch.rows for batch in batches])
        owned = [self.oracle.owned(table, id) for id in ids]
        expected = np.array([row.weight for row in owned])
        np.testing.assert_allclose(rows.cpu(), expected, rtol=2e-4, atol=2e-5)
        group.materialize()
        slabs, slab = len(group.config.slabs), self.oracle.slab[table]
        for k in range(len(group.rows.state) // slabs):
            state = group.rows.state[k * slabs + slab][found >> 28].reshape(len(ids), -1)
            expected = np.array([row.state[k] for row in owned])
            np.testing.assert_allclose(state.cpu(), expected, rtol=2e-4, atol=2e-5)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Sequence,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True
        ),
    )


@pytest.mark.long
def test_sequences(request: pytest.FixtureRequest) -> None:
    # what is marked shows in the first ones
    run(examples=5 if request.config.getoption("--device") == "marked" else 25, steps=25)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_sequences() -> None:
    run(examples=150, steps=60)


def test_reading_changes_nothing() -> None:
    group = make_group(OPTIMIZERS[4], "step")
    ids = torch.tensor(awkward_ids(0))
    group.insert(0, ids[::2])
    call = call_of(group, [(0, [ids.tolist()])])
    before = snapshot(group)
    group.find(call.ids, call.offsets, call.tables)
    read_bags(group, call)
    group.read(0, ids)
    group.contains(0, ids)
    list(group.export(0))
    assert differences(before, snapshot(group)) == []
