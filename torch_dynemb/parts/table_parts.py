"""Tables of a model, with the ids and columns that each rank holds.

Packages that have modules with tables register how to find them:
:func:`torch_dynemb.register_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from torch import nn

from torch_dynemb.nn import DynamicEmbedding, DynamicEmbeddingBag
from torch_dynemb.nn.embedding import UNNAMED
from torch_dynemb.nn.module_kinds import register_module, tables_in
from torch_dynemb.nn.shared_rows import own_slots
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.nn.wrappers import wrapped_by
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.shards import IdSlots, TableShard

Trained = Literal["now", "later", "never"]

# The dtype of a table with float32 columns that are the bits of 8-bit rows with a scale.
PACKED = "packed int8"


class TablePart(NamedTuple):
    """A table of a model, or the part of a table on this rank.

    Attributes:
        name: name of the whole table: the same on all ranks, in any sharding.
        group: table group that holds it.
        table: number of the table in the group.
        embedding_dim: columns of the whole table.
        first_column: first column of the part within the whole table.
        ids: ids that the part owns.
        packed: whether float32 columns are the bits of something else, such as 8-bit rows.
        trained: ``"now"``: by the group's optimizer; ``"later"``: by an optimizer that is not set
            yet; or ``"never"``.
        end_step: function that ends a training step that is still open; None: the training loop
            ends all steps.
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
        """Config of the part's own columns."""
        return self.group.config.tables[self.table]

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """Optimizer of the rows; None if they are not trained, or not yet."""
        return self.group.config.optimizer if self.trained == "now" else None

    @property
    def dtype(self) -> str:
        """Dtype of the rows, as a checkpoint names it."""
        return PACKED if self.packed else str(self.config.dtype).removeprefix("torch.")

    @property
    def columns(self) -> range:
        """Columns of the part within the whole table."""
        return range(self.first_column, self.first_column + self.config.embedding_dim)

    @property
    def shard(self) -> TableShard:
        """Ids and columns of the part."""
        return TableShard(self.name, self.embedding_dim, self.columns, self.ids)


def table_name(path: str, name: str) -> str:
    """Return the name of a table in a checkpoint.

    Args:
        path: path of its module in the model; empty for the model itself.
        name: name of the table in the module.
    """
    return f"{path}.{name}" if path else name


def _tables_of_module(module: TableModule, path: str) -> Iterable[TablePart]:
    group = module.group
    for number, config in enumerate(group.config.tables):
        name = table_name(path, config.name)
        if isinstance(module, DynamicEmbedding | DynamicEmbeddingBag):
            # the one table of these modules may be unnamed
            name = path or UNNAMED
        yield TablePart(
            name, group, number, config.embedding_dim, ids=own_slots(module._sharing_ranks)
        )


register_module(TableModule, tables=_tables_of_module)


def parts_of(model: nn.Module) -> list[TablePart]:
    """List the tables of a model on this rank, in the order of its modules.

    Args:
        model: any module.

    Raises:
        ValueError: two tables are the same part of a table.
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
    """Find the tables of a module on this rank, under a given path.

    Finders of wrapper modules call it for the modules inside.

    Args:
        module: any module.
        path: path in the model; empty for the model itself.
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
    inner = wrapped_by(module)
    for name, child in module.named_children():
        yield from _collect(child, path if name == inner else table_name(path, name), visited)


def groups_of(parts: Sequence[TablePart]) -> list[TableGroup]:
    """List the table groups of the parts, each once."""
    return list({id(part.group): part.group for part in parts}.values())


def end_steps(parts: Sequence[TablePart]) -> None:
    """End the training steps that are still open."""
    for part in {id(part.group): part for part in parts}.values():
        if part.end_step is not None:
            part.end_step()


__all__ = [
    "PACKED",
    "TablePart",
    "Trained",
    "end_steps",
    "groups_of",
    "parts_in",
    "parts_of",
    "table_name",
]
