"""What a table of an embedding is like: how its columns start, and how many ids it may have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.initializers import ByColumn, Initializer


@dataclass(frozen=True)
class ColumnOptions:
    """Some columns of a table; :func:`make_column_options` makes it.

    Attributes:
        initializer: of these columns of new rows.

    Raises:
        TypeError: ``initializer`` is none.
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
    """A table of an embedding; :func:`make_table_options` makes it.

    Attributes:
        columns: an initializer for all columns, or options for each entry of the embedding's dims.
        capacity: ids that it may have over all ranks; None: the capacity of the whole store.
    """

    columns: Initializer | tuple[ColumnOptions, ...]
    capacity: int | None = None

    def initializer(self, owner: str, dims: Sequence[int]) -> Initializer:
        """The initializer of whole rows.

        Args:
            owner: prefix of error messages: the embedding and the table.
            dims: the embedding's dims, whose columns lie side by side.

        Raises:
            ValueError: there are options for more or fewer dims.
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
    """How the columns of one of several dims of a table start.

    Args:
        initializer: of the columns.

    Returns:
        What :func:`make_table_options` takes a list of.

    Raises:
        TypeError: ``initializer`` is none.
    """
    return ColumnOptions(initializer)


def make_table_options(
    param: Initializer | Sequence[ColumnOptions], *, capacity: int | None = None
) -> TableSpec:
    """A table of an embedding.

    Args:
        param: an initializer of its rows, or a list of :func:`make_column_options`, one for each of
            the embedding's dims.
        capacity: ids that it may have, over all ranks; a full table evicts the id that was not seen
            for the longest time. Default: the capacity of the whole store.

    Returns:
        What the ``tables`` of an embedding are a list of.

    Raises:
        TypeError: ``param`` is neither, or ``capacity`` is no int.
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
    """Another name of :func:`make_table_options`.

    Args:
        param, capacity: as there.

    Returns:
        What it returns.

    Raises:
        TypeError, ValueError: as there.
    """
    return make_table_options(param, capacity=capacity)


__all__ = [
    "ColumnOptions",
    "TableSpec",
    "make_column_options",
    "make_table",
    "make_table_options",
]
