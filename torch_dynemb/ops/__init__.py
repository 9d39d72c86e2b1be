"""Typed wrappers of ``torch.ops.dynemb``, with fake implementations and autograd formulas.

One module per op family. Importing this package loads the compiled library.
"""

from torch_dynemb._library.library import load_library

load_library()

from torch_dynemb.ops.checksum import crc32c  # noqa: E402
from torch_dynemb.ops.feature_values import bucketize, mod, multi_hash  # noqa: E402
from torch_dynemb.ops.gradient import bag_weight_grad, reduce_grad  # noqa: E402
from torch_dynemb.ops.index import (  # noqa: E402
    ExportedBatch,
    FoundIds,
    ScoredIds,
    erase_,
    export_batch,
    find,
    find_or_insert_,
    get_scores,
    grow_,
    reported_counts,
    set_handles_,
    set_scores_,
    shrink_,
)
from torch_dynemb.ops.lookup import (  # noqa: E402
    embedding,
    embedding_bag,
    embedding_bag_inference,
    embedding_inference,
)
from torch_dynemb.ops.memory import (  # noqa: E402
    advance_step_,
    available_cuda_memory,
    available_memory,
    bind_group,
    end_step,
    has_cuda_kernels,
    raise_device_errors,
    release_,
    release_group,
    reserve,
    reserve_cuda,
)
from torch_dynemb.ops.pending import (  # noqa: E402
    PendingGradients,
    accumulate_grad_,
    merge_grad_,
)
from torch_dynemb.ops.pooling import pool_rows, ragged_tile  # noqa: E402
from torch_dynemb.ops.ragged_cross import CrossedRagged, feature_cross_ragged  # noqa: E402
from torch_dynemb.ops.ragged_cutoff import (  # noqa: E402
    CutRagged,
    CutRagged3D,
    ragged_cutoff_2d,
    ragged_cutoff_3d,
    ragged_topk_index_cutoff,
)
from torch_dynemb.ops.ragged_dense import (  # noqa: E402
    Ragged,
    dense_to_ragged,
    ragged_to_dense,
    ragged_to_sparse,
)
from torch_dynemb.ops.routing import (  # noqa: E402
    ConcatenatedIds,
    PartitionedIds,
    UniqueIds,
    id_owners,
    ids_concat,
    ids_encode,
    ids_partition,
    mix_ids,
    unique_ids,
    unique_ids_padded,
    unmix_ids,
)
from torch_dynemb.ops.simd import set_simd_level, simd_level  # noqa: E402
from torch_dynemb.ops.store import IoPath, read_blocks, store_io_paths  # noqa: E402
from torch_dynemb.ops.strings import farmhash, murmurhash, murmurhash64a  # noqa: E402
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors  # noqa: E402
from torch_dynemb.ops.tiers import (  # noqa: E402
    PlannedMoves,
    forget_rows_,
    gather_records,
    plan_moves_,
    prefetch_,
    record_bytes,
    scatter_records_,
    shrink_cache_,
    stage_,
    take_dirty_,
)
from torch_dynemb.ops.update import OPTIMIZER_NAMES, materialize_  # noqa: E402

__all__ = [
    "OPTIMIZER_NAMES",
    "ConcatenatedIds",
    "CrossedRagged",
    "CutRagged",
    "CutRagged3D",
    "ExportedBatch",
    "FoundIds",
    "IndexTensors",
    "IoPath",
    "PartitionedIds",
    "PendingGradients",
    "PlannedMoves",
    "Ragged",
    "RowTensors",
    "ScoredIds",
    "TierTensors",
    "UniqueIds",
    "accumulate_grad_",
    "advance_step_",
    "available_cuda_memory",
    "available_memory",
    "bag_weight_grad",
    "bind_group",
    "bucketize",
    "crc32c",
    "dense_to_ragged",
    "embedding",
    "embedding_bag",
    "embedding_bag_inference",
    "embedding_inference",
    "end_step",
    "erase_",
    "export_batch",
    "farmhash",
    "feature_cross_ragged",
    "find",
    "find_or_insert_",
    "forget_rows_",
    "gather_records",
    "get_scores",
    "grow_",
    "has_cuda_kernels",
    "id_owners",
    "ids_concat",
    "ids_encode",
    "ids_partition",
    "materialize_",
    "merge_grad_",
    "mix_ids",
    "mod",
    "multi_hash",
    "murmurhash",
    "murmurhash64a",
    "plan_moves_",
    "pool_rows",
    "prefetch_",
    "ragged_cutoff_2d",
    "ragged_cutoff_3d",
    "ragged_tile",
    "ragged_to_dense",
    "ragged_to_sparse",
    "ragged_topk_index_cutoff",
    "raise_device_errors",
    "read_blocks",
    "record_bytes",
    "reduce_grad",
    "release_",
    "release_group",
    "reported_counts",
    "reserve",
    "reserve_cuda",
    "scatter_records_",
    "set_handles_",
    "set_scores_",
    "set_simd_level",
    "shrink_",
    "shrink_cache_",
    "simd_level",
    "stage_",
    "store_io_paths",
    "take_dirty_",
    "unique_ids",
    "unique_ids_padded",
    "unmix_ids",
]
