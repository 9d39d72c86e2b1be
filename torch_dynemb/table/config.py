"""Settings of one table of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer, text
from torch_dynemb.initializers import Initializer, default_initializer
from torch_dynemb.policy.policy import FeaturePolicy, Policy, check_default, check_feature_policies
from torch_dynemb.storage.tiers import HostStore, Storage, check_storage

EvalDefault = Literal["initial", "zeros"] | Tensor | Initializer


ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Saved states sort slabs by these numbers: a new dtype gets a new number.
_SAVED_ORDER = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class SlabConfig(NamedTuple):
    """Kind of the rows in one tensor of a group: tables with equal settings share it."""

    dim: int
    dtype: torch.dtype
    tiered: bool = False

    @property
    def name(self) -> str:
        """Name of the rows in saved states."""
        name = f"dim{self.dim}"
        if self.dtype != torch.float32:
            name += f"_{str(self.dtype).removeprefix('torch.')}"
        return f"{name}_tiered" if self.tiered else name

    @property
    def order(self) -> tuple[int, int, bool]:
        """Sort key of the slabs of a group, and so of the rows of ``slabs``."""
        return self.dim, _SAVED_ORDER[self.dtype], self.tiered


class ColumnShard(NamedTuple):
    """Columns of a wider table; new rows start with these columns of the wider table's rows.

    Attributes:
        table: name of the wider table, which seeds the initial values.
        embedding_dim: of the wider table.
        first_column: a multiple of 4.
    """

    table: str
    embedding_dim: int
    first_column: int


_LARGEST_DIM = 1 << 24


@dataclass(frozen=True, eq=False)
class TableConfig:
    """Settings of one table of a group.

    Args:
        name: names the table in checkpoints and seeds its initial values; unique in its group.
        embedding_dim: columns of a row, at least 1.
        feature_names: features that look it up (default: one, named as the table).
        initializer: of new rows; default: uniform within 1 / sqrt(embedding_dim) of 0. The
            normal(0, 1) of nn.Embedding learns less from few occurrences of an id
            (``python -m tutorials.initial_rows``). By ``eval_default``, an id that was never
            trained reads such values, too.
        padding_idx: an id that reads as zeros, is never inserted or trained, and does not count in
            a mean. Default: each id has a row.
        eval_default: result of a read for an id without a row: ``"initial"`` (its initial value),
            ``"zeros"``, a float tensor [embedding_dim], or another initializer.
        policy: rules for ids: scores, capacity and eviction, admission, ttl. Default: every id gets
            a row and keeps it.
        feature_policies: by feature name, settings that differ from the policy.
        dtype: of the rows: float32, bfloat16 or float16. Sums and updates are float32; the
            optimizer's ``stochastic_rounding`` sets the rounding of rows.
        shard: the columns of a wider table that it has; None: it is a whole table.
        storage: store of the rows that are not in the memory of the device:
            :class:`torch_dynemb.HostStore`, for a GPU, :class:`torch_dynemb.SSDStore` or
            :class:`torch_dynemb.ExternalStore`. On a GPU, the last two need ``device_cache``. None:
            all rows are in the memory of the device.

    Raises:
        TypeError, ValueError: a value is wrong, or values contradict each other.
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str] = ()
    initializer: Initializer = None  # type: ignore[assignment]  # __post_init__ fills it in
    padding_idx: int | None = None
    eval_default: EvalDefault = "initial"
    policy: Policy = field(default_factory=Policy)
    feature_policies: Mapping[str, FeaturePolicy] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard: ColumnShard | None = None
    storage: Storage | None = None

    def summary(self) -> str:
        """Return name, dim, and other settings of dtype, policy and storage than the defaults."""
        parts = [f"name={self.name!r}", f"dim={self.embedding_dim}"]
        if self.dtype != torch.float32:
            parts.append(f"dtype={self.dtype}")
        if repr(self.policy) != repr(Policy()):
            parts.append(f"policy={self.policy!r}")
        if self.storage is not None:
            parts.append(f"storage={type(self.storage).__name__}")
        return ", ".join(parts)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"TableConfig: name is {described(self.name)}, expected str")
        if not self.name:
            raise ValueError("TableConfig: name is empty, expected a name for the table")
        dim = integer(f"TableConfig {self.name!r}: embedding_dim", self.embedding_dim, least=1)
        object.__setattr__(self, "embedding_dim", dim)
        if self.embedding_dim > _LARGEST_DIM:
            raise ValueError(
                f"TableConfig {self.name!r}: embedding_dim is {self.embedding_dim}, expected at "
                f"most {_LARGEST_DIM}: kernels hold a few rows at once in scratch memory"
            )
        if self.initializer is None:
            object.__setattr__(self, "initializer", default_initializer(self.embedding_dim))
        if not isinstance(self.initializer, Initializer):
            raise TypeError(
                f"TableConfig {self.name!r}: initializer is {self.initializer!r}, expected one of "
                "torch_dynemb's initializers, such as Uniform(-0.01, 0.01)"
            )
        if self.dtype not in ROW_DTYPES:
            raise TypeError(
                f"TableConfig {self.name!r}: dtype is {self.dtype}, expected one of "
                f"{list(ROW_DTYPES)}: rows of other types cannot be trained"
            )
        if not isinstance(self.policy, Policy):
            raise TypeError(
                f"TableConfig {self.name!r}: policy is {self.policy!r}, expected "
                "torch_dynemb.Policy(...)"
            )
        check_default(f"TableConfig {self.name!r}: eval_default", self.eval_default)
        for name, value in (
            ("eval_default", self.eval_default),
            ("policy.refused", self.policy.refused),
        ):
            if isinstance(value, Tensor) and tuple(value.shape) != (self.embedding_dim,):
                raise ValueError(
                    f"TableConfig {self.name!r}: {name} has shape {tuple(value.shape)}, expected "
                    f"({self.embedding_dim},)"
                )
        named = not isinstance(self.eval_default, Tensor | Initializer)
        if named and self.eval_default not in (
            "initial",
            "zeros",
        ):
            raise ValueError(
                f"TableConfig {self.name!r}: eval_default is {self.eval_default!r}, expected "
                "'initial', 'zeros' or values: a tensor or an initializer"
            )
        if self.padding_idx is not None:
            padding = integer(f"TableConfig {self.name!r}: padding_idx", self.padding_idx)
            object.__setattr__(self, "padding_idx", padding)
        if self.shard is not None and not isinstance(self.shard, ColumnShard):
            raise TypeError(
                f"TableConfig {self.name!r}: shard is {described(self.shard)}, expected a "
                "ColumnShard"
            )
        if self.shard is not None:
            _, dim, first = self.shard
            if first % 4 != 0 or not 0 <= first <= dim - self.embedding_dim:
                raise ValueError(
                    f"TableConfig {self.name!r}: shard is {self.shard}, expected first_column to "
                    f"be a multiple of 4 from 0 to {dim - self.embedding_dim}"
                )
        check_storage(f"TableConfig {self.name!r}", self.storage)
        given = self.feature_names
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(
                f"TableConfig {self.name!r}: feature_names is {described(given)}, expected a list "
                "of names"
            )
        names = tuple(given) or (self.name,)
        for i, feature in enumerate(names):
            text(f"TableConfig {self.name!r}: feature_names[{i}]", feature)
        object.__setattr__(self, "feature_names", names)
        check_feature_policies(
            f"TableConfig {self.name!r}", self.policy, names, self.feature_policies
        )

    @property
    def slab(self) -> SlabConfig:
        """Kind of the table's rows."""
        tiered = self.storage is not None and not isinstance(self.storage, HostStore)
        return SlabConfig(self.embedding_dim, self.dtype, tiered)

    def description(self) -> dict[str, Any]:
        """Return the description that identifies the table in a checkpoint."""
        return {
            "name": self.name,
            "embedding_dim": self.embedding_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def check_tables(owner: str, tables: object) -> tuple[TableConfig, ...]:
    """Return the configs of tables, at least one.

    Raises:
        TypeError: ``tables`` is not a sequence of configs.
        ValueError: it is empty.
    """
    if isinstance(tables, str) or not isinstance(tables, Iterable):
        raise TypeError(
            f"{owner}: tables is {described(tables)}, expected a list of torch_dynemb.TableConfig"
        )
    configs = tuple(tables)
    if not configs:
        raise ValueError(f"{owner}: tables is empty, expected at least one table")
    for i, table in enumerate(configs):
        if not isinstance(table, TableConfig):
            raise TypeError(
                f"{owner}: tables[{i}] is {described(table)}, expected a torch_dynemb.TableConfig"
            )
    return configs


__all__ = [
    "ROW_DTYPES",
    "ColumnShard",
    "EvalDefault",
    "SlabConfig",
    "TableConfig",
    "check_tables",
]
