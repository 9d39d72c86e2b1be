"""Which tables a model has, and which of their ids and columns: what its modules have registered.

A package that has modules with tables says with :func:`torch_dynemb.register_module` how to find
the tables in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from torch import nn

from torch_dynemb.checkpoint.entries import PACKED
from torch_dynemb.nn import DynamicEmbedding, DynamicEmbeddingBag
from torch_dynemb.nn.embedding import UNNAMED
from torch_dynemb.nn.module_kinds import register_module, tables_in
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.shards import IdSlots, TableShard

Trained = Literal["now", "later", "never"]


class TablePart(NamedTuple):
    """A table of a model, or some of its ids and columns, on this rank.

    Attributes:
        name: of the whole table: the same on all ranks, and in whatever way the model is sharded.
        group: the table group that it is in.
        table: its number there.
        embedding_dim: columns of the whole table.
        first_column: its first column in rows of the whole table.
        ids: which ids it has.
        packed: its float32 columns are bits of something else, such as rows of 8 bits.
        trained: ``"now"``, by the group's optimizer; ``"later"``, by one that it has not got yet;
            or ``"never"``.
        end_step: ends a training step that has begun and that nobody has ended; None: who trains
            the table ends all steps.
    """

    name: str
    group: TableGroup
    table: int
    embedding_dim: int
    first_column: int = 0
    ids: IdSlots = IdSlots()
    packed: bool = False
    trained: Trained = "now"
    end_step: Callable[[], None] | None = None

    @property
    def config(self) -> TableConfig:
        """Of its own columns."""
        return self.group.config.tables[self.table]

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """Of its rows; None: they are not trained, or not yet."""
        return self.group.config.optimizer if self.trained == "now" else None

    @property
    def dtype(self) -> str:
        """Of its rows, as a checkpoint names it."""
        return PACKED if self.packed else str(self.config.dtype).removeprefix("torch.")

    @property
    def columns(self) -> range:
        """Its columns of the whole table."""
        return range(self.first_column, self.first_column + self.config.embedding_dim)

    @property
    def shard(self) -> TableShard:
        """Which ids and columns of which table it has."""
        return TableShard(self.name, self.embedding_dim, self.columns, self.ids)


def table_name(path: str, name: str) -> str:
    """The name of a table in a checkpoint.

    Args:
        path: of its module in the model; empty for the model itself.
        name: in the module.
    """
    return f"{path}.{name}" if path else name


def _tables_of_module(module: TableModule, path: str) -> Iterable[TablePart]:
    group = module.group
    for number, config in enumerate(group.config.tables):
        name = table_name(path, config.name)
        if isinstance(module, DynamicEmbedding | DynamicEmbeddingBag):
            # its one table may have no name of its own
            name = path or UNNAMED
        yield TablePart(name, group, number, config.embedding_dim, ids=module.owned_slots)


register_module(TableModule, tables=_tables_of_module)


def parts_of(model: nn.Module) -> list[TablePart]:
    """The tables of a model on this rank, in the order of its modules.

    Args:
        model: any module.

    Raises:
        ValueError: two of them are the same part of a table.
    """
    parts = list(parts_in(model, ""))
    seen: dict[tuple[str, int, int], TablePart] = {}
    for part in parts:
        key = (part.name, part.first_column, part.ids.begin)
        if key in seen:
            raise ValueError(
                f"checkpoint: the model has two tables {part.name!r}: give one of them another name"
            )
        seen[key] = part
    return parts


def parts_in(module: nn.Module, path: str) -> Iterator[TablePart]:
    """The tables of a module on this rank, as if it stood at some path: what finders of wrappers
    give for what is in them.

    Args:
        module: any module.
        path: in the model; empty for the model itself.
    """
    yield from _collect(module, path, set())


def _collect(module: nn.Module, path: str, visited: set[int]) -> Iterator[TablePart]:
    if id(module) in visited:
        return
    visited.add(id(module))
    find = tables_in(module)
    if find is not None:
        yield from find(module, path)
        return
    for name, child in module.named_children():
        yield from _collect(child, table_name(path, name), visited)


def groups_of(parts: Sequence[TablePart]) -> list[TableGroup]:
    """The table groups that the parts are in, each once."""
    return list({id(part.group): part.group for part in parts}.values())


def end_steps(parts: Sequence[TablePart]) -> None:
    """Ends the training steps that have begun and that nobody has ended."""
    for part in {id(part.group): part for part in parts}.values():
        if part.end_step is not None:
            part.end_step()


__all__ = [
    "TablePart",
    "Trained",
    "end_steps",
    "groups_of",
    "parts_in",
    "parts_of",
    "table_name",
]
