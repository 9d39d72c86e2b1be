"""Names of RecIS (1.2.18) that are not offered, and what to use instead."""

from __future__ import annotations

from typing import NoReturn

_FLAT = "import its names from torch_dynemb.recis or torch_dynemb.recis.functional"
_CHECKPOINT = "use torch_dynemb.checkpoint.save and load; torch_dynemb.migrate reads RecIS's files"
_JOBS = "it belongs to jobs, not to tables: use your own training loop"
_READERS = "read data by torch's DataLoader, and prefetch by torch_dynemb.prefetched"
_NAMED = "torch's optimizers take model.named_parameters() and save the names"
_MOMENTS = (
    "use SparseAdagrad, which squares the sum of the gradients of all ranks, not those of each rank"
)
_EXCHANGE = "DynamicEmbedding.exchange_ids() sends ids, and forward() of its result sends rows back"
_ENGINE = "EmbeddingEngine groups features itself; exchange_ids() and forward() are its two halves"
_REDUCE = "call ragged_embedding_segment_reduce, which is differentiable"
_HOOKS = "register_filter_hook and register_admit_hook add hooks; RowFilter is the base of filters"
_PADDING = "RaggedTensor.pad() and unpad() keep what was padded themselves"
_OPS = "FeatureOp is the base of ops; its run() gets several ops of a class at once"
_REGISTRY = "a table belongs to its module: filter_out_sparse_param(model) finds tables"

# By name, in whichever module of RecIS it is.
NAMES = {
    "AdamWTF": "use torch.optim.AdamW(weight_decay=weight_decay / lr) for dense parameters",
    "BaseAdmitHookImpl": _HOOKS,
    "BaseFilterHookImpl": _HOOKS,
    "CheckpointManager": _CHECKPOINT,
    "CheckpointReader": _CHECKPOINT,
    "DataValueProcessor": _OPS,
    "EmbeddingExchange": _EXCHANGE,
    "EmbeddingSegmentReduceRagged": _REDUCE,
    "EmbeddingSegmentReduceSparse": _REDUCE,
    "ExchangeEmbResults": _EXCHANGE,
    "ExchangeIDsResults": _EXCHANGE,
    "FusedOpFactory": _OPS,
    "GlobalStepFilterHookImpl": 'use FilterHook("GlobalStepFilter", {"filter_step": n})',
    "GradHDMPGroupSumFunction": _MOMENTS,
    "GradIDMeanFunction": 'use grad_reduce_by="id"',
    "GradWorkerMeanFunction": 'use grad_reduce_by="worker"',
    "GradWorkerSumFunction": _MOMENTS,
    "HashTableCoalescedGroup": _ENGINE,
    "HashTableLookupHelpFunction": "call the HashTable, which is differentiable",
    "HashtableHookFactory": _HOOKS,
    "HashtableRegister": _REGISTRY,
    "Initializer": "torch_dynemb.Initializer is the base of initializers",
    "Loader": _CHECKPOINT,
    "NamedAdagrad": _NAMED,
    "NamedAdam": _NAMED,
    "NamedAdamW": _NAMED,
    "NamedAdamWTF": _NAMED,
    "NamedSGD": _NAMED,
    "RaggedPadInfo": _PADDING,
    "RaggedTile": "call ragged_tile, which is differentiable",
    "ReadOnlyHookImpl": 'use AdmitHook("ReadOnly")',
    "ReduceFunctionRegistry": "register_combiner and get_combiner are its functions",
    "RuntimeGroupFeature": _ENGINE,
    "Saver": _CHECKPOINT,
    "SparseAdagradSum": _MOMENTS,
    "SparseRowWiseAdagradSum": _MOMENTS,
    "Trainer": _JOBS,
    "adamwtf": "use torch.optim.AdamW for dense parameters",
    "check_para": "ragged_tile checks its arguments",
    "clip_grad_by_global_norm_": "use torch_dynemb.clip_grad_norm_(model, max_norm)",
    "features": _FLAT,
    "framework": _JOBS,
    "fused_ids_encode_gpu": "use ids_encode, which runs on any device",
    "get_build_info": "use python -m torch_dynemb doctor",
    "hooks": _JOBS,
    "index_select_ragged_by_padded_index": "pad() rows, and torch.gather the values of to_dense()",
    "io": _READERS,
    "is_hashtable": "use isinstance(value, HashTable)",
    "metrics": "use torchmetrics or torchrec.metrics",
    "nn": _FLAT,
    "optim": _FLAT,
    "ragged_topk_index_cutoff": "use torch_dynemb.ops.ragged_topk_index_cutoff",
    "serialize": _CHECKPOINT,
    "utils": _JOBS,
    "weight_norm_sparse": "use ragged_embedding_segment_reduce(..., combiner='mean')",
    "wrapped_named_optimizer": _NAMED,
}

# Methods of HashTable.
TABLE_METHODS = {
    "accept_grad_sq": _MOMENTS,
    "allocator_id_info": "group.usage has sizes and bytes",
    "clear_child": "clear(child)",
    "coalesce": "children_info().is_coalesce",
    "device": "group.device",
    "embeddings_map": "ids_map(child).rows and embeddings(child) are in one order",
    "id_info": "group.usage has sizes and bytes",
    "ids_embeddings": "ids(child) and embeddings(child) are in one order",
    "initializer": "group.config.tables has it, by number of the child",
    "raw_embeddings": 'slot_group(child).slot_by_name("embedding").value()',
    "requires_optimizer_state": "trainable",
    "reset": "clear(), then group.compact(), which gives memory back",
    "snap_shot": "ids_map(child) and embeddings(child) are in one order",
}
# Methods of RaggedTensor, which is immutable.
RAGGED_METHODS = {
    "from_numpy": "RaggedTensor(torch.from_numpy(values), [torch.from_numpy(offsets)])",
    "from_offsets": "RaggedTensor(values, offsets, weight)",
    "pad_info": _PADDING,
    "set_dim_by_rank": "RaggedTensor(values, offsets, weight, dense_shape)",
    "set_pad_info": _PADDING,
    "set_values": "with_values(values) returns a new tensor",
    "set_weight": "with_weight(weight) returns a new tensor",
}


def advice_for(name: str) -> str:
    """Return what to say of a name of RecIS that is not offered; "" for other names."""
    remedy = NAMES.get(name)
    return f"torch_dynemb does not offer {name} of RecIS: {remedy}" if remedy else ""


class MissingMethod:
    """Method of RecIS that a class lacks: to look it up is an AttributeError with advice.

    Args:
        name: of the method.
        instead: what to use instead.
    """

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name}: {self._instead}")


__all__ = ["NAMES", "RAGGED_METHODS", "TABLE_METHODS", "MissingMethod", "advice_for"]
