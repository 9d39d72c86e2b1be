"""What checkpoints save of sharded collections: which ids and columns of a table a rank has.

Names are those that :func:`torch_dynemb.torchrec.local_shards` gives: they depend neither on the
sharding nor on the number of ranks, and are those of an unsharded collection of dynamic tables at
the same place.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchrec.distributed.model_parallel import DistributedModelParallel

from torch_dynemb.checkpoint import IdSlots, TablePart, table_name, tables_of
from torch_dynemb.checkpoint.parts import Trained, parts_in
from torch_dynemb.torchrec.collections.bag import ShardedDynamicEmbeddingBagCollection
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart
from torch_dynemb.torchrec.collections.sequence import ShardedDynamicEmbeddingCollection
from torch_dynemb.torchrec.planning.options import NOT_TRAINED


@tables_of(DistributedModelParallel)
def _in_wrapped_model(model: DistributedModelParallel, path: str) -> Iterator[TablePart]:
    """Without the names of the wrappers: state dicts have none either."""
    yield from parts_in(model.module, path)


@tables_of(ShardedDynamicEmbeddingBagCollection)
@tables_of(ShardedDynamicEmbeddingCollection)
def _in_collection(collection: DynamicPart, path: str) -> Iterator[TablePart]:
    for kernel in collection.kernels():
        tables = kernel.tables
        parts, part = tables.routing
        trained: Trained = "never" if tables.group.config.optimizer == NOT_TRAINED else "now"
        for number, shard in enumerate(tables.shards):
            yield TablePart(
                table_name(path, shard.table),
                tables.group,
                number,
                shard.embedding_dim,
                shard.first_column,
                IdSlots(part, part + 1, parts),
                trained=trained,
                end_step=tables.end_begun_step,
            )


__all__: list[str] = []
