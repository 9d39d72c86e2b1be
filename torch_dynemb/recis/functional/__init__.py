"""RecIS's functions (``recis.nn.functional``) with its names and arguments, on any device.

They call :mod:`torch_dynemb.ops`, which raise their errors. Offsets may be int32 or int64, and
results have offsets of the same dtype. Sizes in tensors are copied to the host, which synchronizes
a GPU.
"""

from torch_dynemb.argument_checks import refusing_names
from torch_dynemb.recis.functional.combiners import get_combiner, register_combiner
from torch_dynemb.recis.functional.embedding_ops import (
    ids_encode,
    ids_partition,
    merge_offsets,
    ragged_embedding_segment_reduce,
    segment_sum_sparse,
    sparse_embedding_segment_reduce,
)
from torch_dynemb.recis.functional.ragged_ops import (
    compute_real_length,
    dense_to_ragged,
    feature_cross_ragged,
    fused_ragged_cutoff_2D,
    fused_ragged_cutoff_3D,
    ragged_tile,
    ragged_to_dense,
    ragged_to_sparse,
)
from torch_dynemb.recis.functional.string_ops import (
    djb2hash,
    ev_farmhash,
    fused_int64_to_string_int8,
    fused_number_mask,
    fused_string_mask,
    sdbmhash,
)
from torch_dynemb.recis.functional.value_ops import (
    bucketize,
    bucketize_mod,
    farmhash,
    fused_bucketize_gpu,
    fused_multi_hash,
    fused_uint64_mod_gpu,
    multi_hash,
    murmurhash,
)
from torch_dynemb.recis.not_offered import advice_for

__getattr__ = refusing_names(__name__, advice_for)

__all__ = [
    "bucketize",
    "bucketize_mod",
    "compute_real_length",
    "dense_to_ragged",
    "djb2hash",
    "ev_farmhash",
    "farmhash",
    "feature_cross_ragged",
    "fused_bucketize_gpu",
    "fused_int64_to_string_int8",
    "fused_multi_hash",
    "fused_number_mask",
    "fused_ragged_cutoff_2D",
    "fused_ragged_cutoff_3D",
    "fused_string_mask",
    "fused_uint64_mod_gpu",
    "get_combiner",
    "ids_encode",
    "ids_partition",
    "merge_offsets",
    "multi_hash",
    "murmurhash",
    "ragged_embedding_segment_reduce",
    "ragged_tile",
    "ragged_to_dense",
    "ragged_to_sparse",
    "register_combiner",
    "sdbmhash",
    "segment_sum_sparse",
    "sparse_embedding_segment_reduce",
]
