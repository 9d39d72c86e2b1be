"""Names of the tables of frozen models in logs and checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch_dynemb.parts.table_parts import table_name
from torch_dynemb.serving.missing import CountedTables


class ServedName(NamedTuple):
    """A table of a served model.

    Attributes:
        owner: path of the module that names the table.
        name: of the table in that module.
        alone: whether the module has no other table: a DynamicEmbedding, which the trained model
            names after the module.
    """

    owner: str
    name: str
    alone: bool

    def possible(self) -> Iterator[list[str]]:
        """Return possible names in the trained model, likeliest first: some at a time.

        First the same name, then that without modules around the trained model, then that without
        modules of the served model around the table.
        """
        yield [*([self.owner or "embedding"] if self.alone else []), self._within(self.owner)]
        path = self.owner
        inner = []
        while "." in path:
            path = path.partition(".")[2]
            inner += [*([path] if self.alone else []), self._within(path)]
        yield inner
        path, outer = self.owner, []
        while path:
            path = path.rpartition(".")[0]
            outer.append(self._within(path))
        yield outer

    def _within(self, owner: str) -> str:
        return table_name(owner, self.name)


def served_names(path: str, tables: CountedTables) -> list[ServedName]:
    """Return the names of a module's tables.

    Args:
        path: of the module in the model.
        tables: the module.
    """
    alone = len(tables.names) == 1
    return [ServedName(tables.owner(path), name, alone) for name in tables.names]


def names_in_log(
    owner: str, tables: Sequence[ServedName], known: Collection[str]
) -> list[str | None]:
    """Return the name of each table in a log or a checkpoint; None: it has none.

    Args:
        owner: call, with which errors begin.
        tables: of a served model.
        known: names in the log or checkpoint.

    Raises:
        ValueError: one of them may be either of two tables.
    """
    result: list[str | None] = [None] * len(tables)
    ways = [list(table.possible()) for table in tables]
    for way in range(len(ways[0]) if ways else 0):
        taken = set(result)
        claims: defaultdict[str, list[int]] = defaultdict(list)
        for number, of_table in enumerate(ways):
            if result[number] is None:
                found = (name for name in of_table[way] if name in known and name not in taken)
                if (name := next(found, None)) is not None:
                    claims[name].append(number)
        for name, numbers in claims.items():
            if len(numbers) > 1:
                either = [table_name(tables[of].owner, tables[of].name) for of in numbers]
                raise ValueError(
                    f"{owner}: table {name!r} may be either of {either} of the served model: serve "
                    "a model with the names of the trained one"
                )
            result[numbers[0]] = name
    return result


__all__ = ["ServedName", "names_in_log", "served_names"]
