"""Options of an embedding's tables: initializers of their columns, and capacity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.initializers import ByColumn, Initializer


@dataclass(frozen=True)
class ColumnOptions:
    """Options of some columns of a table, as returned by :func:`make_column_options`.

    Attributes:
        initializer: of these columns of new rows.

    Raises:
        TypeError: ``initializer`` is not an initializer.
    """

    initializer: Initializer

    def __post_init__(self) -> None:
        if not isinstance(self.initializer, Initializer):
            raise TypeError(
                f"make_column_options: initializer is {described(self.initializer)}, expected one "
                "such as make_uniform_initializer(-0.1, 0.1)"
            )


@dataclass(frozen=True)
class TableSpec:
    """Options of a table of an embedding, as returned by :func:`make_table_options`.

    Attributes:
        columns: an initializer for all columns, or options for each entry of the embedding's dims.
        capacity: maximum number of ids over all ranks; None: the capacity of the whole store.
    """

    columns: Initializer | tuple[ColumnOptions, ...]
    capacity: int | None = None

    def initializer(self, owner: str, dims: Sequence[int]) -> Initializer:
        """Return the initializer of whole rows.

        Args:
            owner: prefix of error messages: the embedding and the table.
            dims: the embedding's dims; their columns lie side by side.

        Raises:
            ValueError: the number of column options differs from that of dims.
        """
        if isinstance(self.columns, Initializer):
            return self.columns
        if len(self.columns) != len(dims):
            raise ValueError(
                f"{owner} has {len(self.columns)} column options, expected {len(dims)}, one for "
                f"each of the dims {list(dims)}"
            )
        parts = zip(dims, (column.initializer for column in self.columns), strict=True)
        return ByColumn(tuple(parts))


def make_column_options(initializer: Initializer) -> ColumnOptions:
    """Make options of the columns of one of several dims of a table.

    Args:
        initializer: of the columns.

    Returns:
        An entry of the list that :func:`make_table_options` takes.

    Raises:
        TypeError: ``initializer`` is not an initializer.
    """
    return ColumnOptions(initializer)


def make_table_options(
    param: Initializer | Sequence[ColumnOptions], *, capacity: int | None = None
) -> TableSpec:
    """Make options of a table of an embedding.

    Args:
        param: an initializer of its rows, or a list of :func:`make_column_options`, one for each of
            the embedding's dims.
        capacity: maximum number of ids over all ranks. A full table evicts the least recently used
            id. Default: the capacity of the whole store.

    Returns:
        An entry of the ``tables`` of an embedding.

    Raises:
        TypeError: ``param`` is neither, or ``capacity`` is not an int.
        ValueError: ``param`` is empty, or ``capacity`` is less than 1.

    Example:
        >>> from torch_dynemb import oneembedding
        >>> small = oneembedding.make_uniform_initializer(low=-0.1, high=0.1)
        >>> oneembedding.make_table_options(small).columns
        Uniform(low=-0.1, high=0.1)
        >>> wide = oneembedding.make_column_options(oneembedding.make_constant_initializer(0))
        >>> columns = [oneembedding.make_column_options(small), wide]
        >>> oneembedding.make_table_options(columns, capacity=1000).capacity
        1000
    """
    if capacity is not None:
        capacity = integer("make_table_options: capacity", capacity, least=1)
    if isinstance(param, Initializer):
        return TableSpec(param, capacity)
    if isinstance(param, str) or not isinstance(param, Iterable):
        raise TypeError(
            f"make_table_options: param is {described(param)}, expected an initializer or a list "
            "of make_column_options(...)"
        )
    columns = tuple(param)
    if not columns:
        raise ValueError("make_table_options: param is empty, expected at least one column option")
    for i, column in enumerate(columns):
        if not isinstance(column, ColumnOptions):
            raise TypeError(
                f"make_table_options: param[{i}] is {described(column)}, expected "
                "make_column_options(...)"
            )
    return TableSpec(columns, capacity)


def make_table(
    param: Initializer | Sequence[ColumnOptions], *, capacity: int | None = None
) -> TableSpec:
    """Make options of a table; another name of :func:`make_table_options`.

    Args:
        param, capacity: as for :func:`make_table_options`.

    Returns:
        An entry of the ``tables`` of an embedding.

    Raises:
        TypeError, ValueError: as for :func:`make_table_options`.
    """
    return make_table_options(param, capacity=capacity)


__all__ = [
    "ColumnOptions",
    "TableSpec",
    "make_column_options",
    "make_table",
    "make_table_options",
]
