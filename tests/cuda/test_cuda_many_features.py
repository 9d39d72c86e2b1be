"""Calls with more features and tables than a plan goes through one by one, on the emulated GPU and
on the CPU: every integer is the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from emulated_groups import different_state, emulated_cuda

import torch_dynemb as td

pytestmark = pytest.mark.own_device

TABLES = 50
FEATURES = 90


def call(step: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Ids, offsets and tables: some tables have several features, which are not neighbours."""
    rng = random.Random(step)
    tables = [rng.randrange(TABLES) for _ in range(FEATURES)]
    ids = [[rng.randrange(12 * (step + 1)) for _ in range(rng.randrange(4))] for _ in tables]
    offsets = torch.tensor([0, *(len(part) for part in ids)]).cumsum(0)
    return torch.tensor([i for part in ids for i in part]), offsets, tables


def plain(table: int) -> td.Policy:
    return td.Policy()


def mixed(table: int) -> td.Policy:
    return [
        td.Policy(capacity=6, score="frequency"),
        td.Policy(capacity=9),
        td.Policy(score="step", admission=td.AdmitFrequent(2)),
    ][table % 3]


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [(plain, {}), (mixed, {}), (mixed, {"memory_budget": 70_000})],
    ids=["plain", "policies", "budget"],
)
def test_many_features_and_tables(
    policy: Callable[[int], td.Policy], arguments: dict[str, int]
) -> None:
    def make() -> td.TableGroup:
        configs = [td.TableConfig(f"t{t}", 2 + t % 3, policy=policy(t)) for t in range(TABLES)]
        return td.TableGroup(configs, optimizer=td.SGD(lr=1.0), seed=1, max_rows=400, **arguments)

    cpu = make()
    with emulated_cuda():
        group = make()
    for step in range(4):
        ids, offsets, tables = call(step)
        expected = cpu.find_or_insert(ids, offsets, tables)
        with emulated_cuda():
            assert torch.equal(expected, group.find_or_insert(ids, offsets, tables)), step
        assert different_state(cpu, group) == [], step
    for table in range(0, TABLES, 7):
        cpu.erase(table, torch.arange(0, 40, 3))
        with emulated_cuda():
            group.erase(table, torch.arange(0, 40, 3))
    ids, offsets, tables = call(9)
    expected = cpu.find_or_insert(ids, offsets, tables)
    with emulated_cuda():
        assert torch.equal(expected, group.find_or_insert(ids, offsets, tables))
    assert different_state(cpu, group) == []


def test_an_erasure_of_many_features() -> None:
    def make() -> td.TableGroup:
        configs = [td.TableConfig(f"t{t}", 2 + t % 3) for t in range(TABLES)]
        return td.TableGroup(configs, optimizer=td.SGD(lr=1.0), seed=1, max_rows=400)

    cpu = make()
    with emulated_cuda():
        group = make()
    ids, offsets, tables = call(3)
    results = []
    for of_device in (cpu, group):
        index = of_device.index
        arguments = (index.buckets, index.scores, index.tables, index.slabs, index.free_rows)

        def run(of_device: td.TableGroup = of_device, arguments: tuple = arguments) -> torch.Tensor:
            of_device.find_or_insert(ids, offsets, tables)
            return torch.ops.dynemb.erase_(
                *arguments, of_device.index.meta, ids[: int(offsets[70])], offsets[:71], tables[:70]
            )

        if of_device is cpu:
            results.append(run())
        else:
            with emulated_cuda():
                results.append(run())
    assert torch.equal(*results)
    assert different_state(cpu, group) == []
