"""Batches so large that the backward sorts occurrences table by table."""

from __future__ import annotations

import pytest
import torch

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("threads of the CPU")

FEATURES = {"a": "users", "b": "ads", "c": "users", "d": "empty"}
BAGS = 64


def ids_of(step: int) -> dict[str, torch.Tensor]:
    """73,000 ids: many repeat, and rows of one table are between those of others."""
    generator = torch.Generator().manual_seed(step)
    sizes = {"a": 600, "b": 300, "c": 240, "d": 0}
    return {
        name: (torch.rand(BAGS, size, generator=generator) ** 3 * 9000).long() + 4000 * step
        for name, size in sizes.items()
    }


def trained(tables: list[str], split: bool, threads: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Rows and state after three steps, by table; ids ascending."""
    torch.manual_seed(0)
    configs = [
        td.TableConfig(name, 4, [f for f, table in FEATURES.items() if table == name])
        for name in tables
    ]
    bags = td.DynamicEmbeddingBagCollection(configs, optimizer=td.Adam(lr=0.1), split=split)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(3):
            ids = ids_of(step)
            output = bags.split(bags({f: ids[f] for f in bags.feature_names}))
            sum(output[name].square().sum() for name in output).backward()  # type: ignore[union-attr]
            bags.optimizer.step()
    finally:
        torch.set_num_threads(before)
    result = {}
    for number, name in enumerate(tables):
        parts = list(bags.group.export(number))
        known = torch.cat([p.ids for p in parts]) if parts else torch.empty(0, dtype=torch.int64)
        rows = torch.cat([p.rows for p in parts]) if parts else torch.empty(0, 4)
        order = torch.argsort(known)
        result[name] = (known[order], rows[order])
    return result


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_tables_of_one_group_train_as_alone(split: bool, threads: int) -> None:
    together = trained(["ads", "users", "empty"], split, threads)
    for name, expected in together.items():
        alone = trained([name], split, 1)[name]
        assert alone[0].numel() == (0 if name == "empty" else expected[0].numel())
        assert all(torch.equal(a, b) for a, b in zip(alone, expected, strict=True))


def test_waiting_gradients_of_large_batches_are_merged() -> None:
    """Two lookups before a step, against one of both."""
    torch.manual_seed(0)
    tables = [td.TableConfig(name, 4) for name in ("x", "y")]
    parts, whole = (
        td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=0.1), split=True)
        for _ in range(2)
    )
    first, second = ({name: ids_of(s)["a"] * 3 for name in ("x", "y")} for s in range(2))
    for batch in (first, second):
        parts(batch).sum().backward()
    whole({name: torch.cat([first[name], second[name]]) for name in first}).sum().backward()
    for module in (parts, whole):
        module.optimizer.step()
    for number in range(2):
        ids = torch.unique(torch.cat([first["x"], second["x"]]))
        torch.testing.assert_close(parts.group.read(number, ids), whole.group.read(number, ids))
