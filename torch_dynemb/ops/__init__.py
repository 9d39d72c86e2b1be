"""Typed wrappers of ``torch.ops.dynemb``, with fake implementations and autograd formulas.

One module per op family. Importing this package loads the compiled library. The reference has the
names of ``__all__``; others may change at any time.
"""

from torch_dynemb._library.library import load_library

load_library()

from torch_dynemb.ops import batching  # noqa: E402 - registers rules
from torch_dynemb.ops.block_reads import IoPath, read_blocks, store_io_paths  # noqa: E402
from torch_dynemb.ops.build import CompiledWith, compiled_with  # noqa: E402
from torch_dynemb.ops.changes import FoundChanges, changed_ids_  # noqa: E402
from torch_dynemb.ops.checksum import crc32c  # noqa: E402
from torch_dynemb.ops.copy_on_write import copy_before_write_, take_unchanged_rows_  # noqa: E402
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
    grow_,
    reported_counts,
    set_handles_,
    shrink_,
)
from torch_dynemb.ops.live_files import (  # noqa: E402
    FileCounts,
    file_apply,
    file_counts,
    file_make_live,
    file_room,
)
from torch_dynemb.ops.lookup import (  # noqa: E402
    RowLookup,
    bind_lookup,
    embedding,
    embedding_inference,
    find_and_read,
    find_and_read_bags,
    find_and_read_rows,
    insert_and_embed,
    insert_and_embed_rows,
    is_eager,
    release_lookup,
    row_lookup,
)
from torch_dynemb.ops.memory import (  # noqa: E402
    available_cuda_memory,
    available_memory,
    being_changed,
    bind_group,
    end_step_,
    has_cuda_kernels,
    locked,
    raise_device_errors,
    release_,
    release_group,
    reserve,
    reserve_cuda,
    split_bytes,
    split_rows,
)
from torch_dynemb.ops.pending import (  # noqa: E402
    PendingGradients,
    accumulate_grad_,
    merge_grad_,
)
from torch_dynemb.ops.pooling import pool_rows, ragged_tile  # noqa: E402
from torch_dynemb.ops.quantized import dequantize_rows, quantize_rows  # noqa: E402
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
from torch_dynemb.ops.retrieval import BestScores, merge_top_k, sample_ids  # noqa: E402
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
    unmix_ids,
)
from torch_dynemb.ops.row_files import (  # noqa: E402
    RowFileStats,
    file_close,
    file_ids,
    file_lookup,
    file_open,
    file_pages,
    file_stats,
)
from torch_dynemb.ops.scores import combine_scores_, get_scores, set_scores_  # noqa: E402
from torch_dynemb.ops.serving import (  # noqa: E402
    LIVE_FORMATS,
    Applied,
    LiveIds,
    LiveRows,
    Served,
    ServedTensors,
    serve_apply_,
    serve_ids,
    serve_lookup,
    serve_rows,
)
from torch_dynemb.ops.simd import set_simd_level, simd_level  # noqa: E402
from torch_dynemb.ops.store import (  # noqa: E402
    StoredRecords,
    StoreSnapshot,
    store_check,
    store_close,
    store_drain,
    store_erase,
    store_keep,
    store_load,
    store_open,
    store_pin,
    store_read,
    store_release,
    store_stats,
    store_submit,
    store_sync,
    store_write,
)
from torch_dynemb.ops.stored_cache import (  # noqa: E402
    TakenSlots,
    release_slots,
    reserve_saves_,
    stage_records_,
    take_slots_,
)
from torch_dynemb.ops.string_ids import hash_strings  # noqa: E402
from torch_dynemb.ops.strings import farmhash, murmurhash, murmurhash64a  # noqa: E402
from torch_dynemb.ops.tensors import (  # noqa: E402
    IndexTensors,
    LookupBatch,
    RowTensors,
    TierTensors,
)
from torch_dynemb.ops.tiers import (  # noqa: E402
    PlannedMoves,
    StagedIds,
    bind_tiers,
    end_epoch_,
    forget_rows_,
    gather_records,
    plan_moves_,
    prefetch_,
    record_bytes,
    reserve_space_,
    scatter_records_,
    shrink_cache_,
    stage_,
    staged_lookup_,
    take_dirty_,
)
from torch_dynemb.ops.update import OPTIMIZER_NAMES, materialize_  # noqa: E402

# What programs call, with pages in the reference. The package alone uses the other ones.
__all__ = [
    "OPTIMIZER_NAMES",
    "IndexTensors",
    "LookupBatch",
    "PendingGradients",
    "RowTensors",
    "accumulate_grad_",
    "dequantize_rows",
    "embedding",
    "embedding_inference",
    "end_step_",
    "erase_",
    "export_batch",
    "find",
    "find_and_read",
    "find_or_insert_",
    "get_scores",
    "grow_",
    "hash_strings",
    "id_owners",
    "ids_concat",
    "ids_partition",
    "insert_and_embed",
    "materialize_",
    "merge_grad_",
    "merge_top_k",
    "mix_ids",
    "murmurhash",
    "pool_rows",
    "quantize_rows",
    "release_",
    "reserve",
    "sample_ids",
    "set_scores_",
    "set_simd_level",
    "shrink_",
    "unique_ids",
]
