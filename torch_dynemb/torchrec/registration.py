"""Registration of sharded collections: ids and columns of each table on a rank, and copies.

Table names are those of :func:`torch_dynemb.torchrec.local_shards`. They do not depend on the
sharding or the number of ranks. An unsharded collection of dynamic tables at the same path has the
same names.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from torch_dynemb.checkpoint import TablePart, table_name
from torch_dynemb.nn.module_kinds import register_module
from torch_dynemb.parts.table_parts import Trained, parts_in
from torch_dynemb.torchrec.collections.bag import ShardedDynamicEmbeddingBagCollection
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart
from torch_dynemb.torchrec.collections.sequence import ShardedDynamicEmbeddingCollection
from torch_dynemb.torchrec.frozen.copies import (
    frozen_collection,
    frozen_model,
    frozen_processed,
    frozen_unknown,
)
from torch_dynemb.torchrec.planning.options import NOT_TRAINED


def _in_wrapped_model(model: DistributedModelParallel, path: str) -> Iterator[TablePart]:
    """Yield tables by names without the prefixes of wrappers, as in state dicts."""
    yield from parts_in(model.module, path)


def _in_collection(collection: DynamicPart, path: str) -> Iterator[TablePart]:
    for kernel in collection.kernels():
        tables = kernel.tables
        trained: Trained = "never" if tables.group.config.optimizer == NOT_TRAINED else "now"
        for number, shard in enumerate(tables.shards):
            yield TablePart(
                table_name(path, shard.name),
                tables.group,
                number,
                shard.embedding_dim,
                shard.first_column,
                shard.ids,
                trained=trained,
                end_step=tables.end_begun_step,
            )


register_module(DistributedModelParallel, tables=_in_wrapped_model, frozen=frozen_model)
register_module(ShardedModule, frozen=frozen_unknown)
register_module(ShardedEmbeddingBagCollection, frozen=frozen_collection)
register_module(ShardedFeatureProcessedEmbeddingBagCollection, frozen=frozen_processed)
register_module(ShardedEmbeddingCollection, frozen=frozen_collection)
for kind in (ShardedDynamicEmbeddingBagCollection, ShardedDynamicEmbeddingCollection):
    register_module(kind, tables=_in_collection, optimizers=DynamicPart.row_optimizers)

__all__: list[str] = []
