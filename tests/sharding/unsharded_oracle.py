"""What sharded training should give: every table by itself, unsharded, on the samples of all ranks.

TorchRec's fused updates use the mean of the ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jagged_batches import Batch
from sharded_models import STATIC_VALUE, Table, output_names
from torch import Tensor

import torch_dynemb as td

_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


class Oracle:
    """One collection per table.

    Args:
        optimizer: of all tables.
        initializer: of the dynamic ones.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: td.OptimizerConfig,
        initializer: Any = None,
    ) -> None:
        self.tables = tables
        self.modules: dict[str, Any] = {}
        for table in tables:
            config = td.TableConfig(
                table.name,
                table.dim,
                table.features,
                initializer=(initializer or td.Normal())
                if table.dynamic
                else td.Constant(STATIC_VALUE),
                padding_idx=table.padding_idx,
                dtype=_DTYPES[table.data_type],
            )
            if table.pooling == "none":
                self.modules[table.name] = td.DynamicEmbeddingCollection(
                    [config], optimizer=optimizer
                )
            else:
                self.modules[table.name] = td.DynamicEmbeddingBagCollection(
                    [config], optimizer=optimizer, mode=table.pooling
                )
            td.private_to_rank(self.modules[table.name])  # every rank has the whole oracle

    def __call__(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Outputs by name, the samples (or ids) of rank after rank."""
        expanded = [batch.expanded() for batch in batches]
        by_feature = {table.name: self._looked_up(table, expanded) for table in self.tables}
        return {
            name: by_feature[table.name][feature]
            for name, table, feature in output_names(self.tables)
        }

    def _looked_up(self, table: Table, batches: Sequence[Batch]) -> dict[str, Tensor]:
        module = self.modules[table.name]
        ids = {f: [bag for batch in batches for bag in batch.ids[f]] for f in table.features}
        joined = {
            f: torch.cat([torch.empty(0, dtype=torch.int64), *bags]) for f, bags in ids.items()
        }
        if table.pooling == "none":
            return module(joined)
        lengths = torch.tensor([len(bag) for bags in ids.values() for bag in bags])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = None
        if batches[0].weights is not None:
            weights = torch.cat(
                [bag for f in table.features for batch in batches for bag in batch.weights[f]]
            )
        output = module(
            td.KeyedJagged(table.features, torch.cat(list(joined.values())), offsets, weights)
        )
        return module.split(output)

    def step(self) -> None:
        for module in self.modules.values():
            module.optimizer.step()

    def rows(self, table: str) -> dict[int, Tensor]:
        """Rows by id."""
        return rows_by_id(self.modules[table].group, 0)


def rows_by_id(group: Any, table: int) -> dict[int, Tensor]:
    """The rows of a table of a group by id."""
    return {
        id: row
        for batch in group.export(table)
        for id, row in zip(batch.ids.tolist(), batch.rows, strict=True)
    }
