"""Names and modules of DynamicEmb that are not offered, and what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch_dynemb.argument_checks import refusing_names

_PACKAGE = __name__.rpartition(".")[0]

_ADMISSION = (
    "use FrequencyAdmissionStrategy or ProbabilisticAdmissionStrategy, or an admission rule of "
    "torch_dynemb such as AdmitBy in TableOptions(policy=Policy(admission=...))"
)
_OPTIMIZER = (
    "give the sharder fused_params, or optimizer= with a config such as torch_dynemb.Adam(lr=0.01)"
)
_DTYPES = "use torch's dtypes; data_type_to_dtype converts those of TorchRec"
_EVICTION = "score_strategy decides which ids are evicted"
_RECORDED = (
    "record removed ids with the table group's evicted.record, or publish them with "
    "torch_dynemb.delta_log.DeltaLog"
)
_DELTAS = (
    "incremental_dump returns (rows, scores) here; torch_dynemb.delta_log.DeltaLog publishes "
    "changes that other models follow"
)
_SHARDS = "torch_dynemb.torchrec.local_shards(model) lists the tables of this rank"
_FILES = "use DynamicEmbDump and DynamicEmbLoad, or torch_dynemb.migrate.read_dynamicemb"
_PLANNING = (
    "make a Topology and constraints, and give them to DynamicEmbeddingShardingPlanner; its "
    "collective_plan returns TorchRec's ShardingPlan"
)
_TABLES = "use torch_dynemb.DynamicEmbedding, DynamicEmbeddingBag or their collections"
_INPUT = "the sharders make the exchange of ids and rows themselves"
_SIZES = "get_table_value_bytes and get_optimizer_state_dim return sizes"
_DIST = "give dist_type a text: 'continuous', 'roundrobin' or 'hash_roundrobin'"
_STORAGE = "give external_storage a torch_dynemb.SSDStore or torch_dynemb.ExternalStore"
_SERVING = (
    "use frozen = torch_dynemb.freeze(model); torch_dynemb.serving.export(frozen, path, (inputs,)) "
    "writes a package for torch_dynemb.serving.load(path), and headroom= lets its rows change "
    "while it serves"
)
_INITIALIZERS = "DynamicEmbInitializerArgs(...).initializer(num_embeddings) returns an initializer"
_SCORES = "DynamicEmbTableOptions checks score_strategy; Policy(score=...) takes scores by name"

# By name, in whichever module of DynamicEmb it is.
NAMES = {
    "AdaGradDynamicEmbeddingOptimizer": _OPTIMIZER,
    "AdamDynamicEmbeddingOptimizer": _OPTIMIZER,
    "AdmissionStrategy": _ADMISSION,
    "BATCH_SIZE_PER_DUMP": _FILES,
    "BalancedHostPlacer": _PLANNING,
    "BaseDynamicEmbeddingOptimizer": _OPTIMIZER,
    "COUNTER_TYPE": _DTYPES,
    "Cache": _STORAGE,
    "CacheExchangeRequest": _STORAGE,
    "CopyMode": _STORAGE,
    "Counter": _ADMISSION,
    "DEBUG_EMB_INITIALIZER_MOD": _INITIALIZERS,
    "DEFAULT_BUCKET_CAPACITY": "bucket_capacity of DynamicEmbTableOptions is 128 by default",
    "DEFAULT_INDEX_TYPE": "ids are torch.int64",
    "DEFAULT_UNIFORM_LOWER": _INITIALIZERS,
    "DEFAULT_UNIFORM_UPPER": _INITIALIZERS,
    "DEMB_TABLE_ALIGN_SIZE": "use BUCKET_ALIGNMENT, the same number",
    "DYNAMICEMB_CSTM_SCORE_CHECK": _SCORES,
    "DeltaDumpResult": _DELTAS,
    "DynamicEmbEvictStrategy": _EVICTION,
    "DynamicEmbKernel": "plans name the kernel of dynamic tables 'customized_kernel'",
    "DynamicEmbParameterSharding": _PLANNING,
    "DynamicEmbPoolingMode": "set pooling in TorchRec's EmbeddingBagConfig",
    "DynamicEmbStorageReservation": "use TorchRec's HeuristicalStorageReservation; the planner "
    "counts dynamic tables itself",
    "DynamicEmbTable": _TABLES,
    "EMBEDDING_TYPE": _DTYPES,
    "FTRLDynamicEmbeddingOptimizer": _OPTIMIZER,
    "HostPlacer": _PLANNING,
    "KEY_TYPE": _DTYPES,
    "MemoryType": _STORAGE,
    "MultiTableAdmitter": _ADMISSION,
    "MultiTableFrequencyAdmitter": _ADMISSION,
    "MultiTableKVCounter": _ADMISSION,
    "MultiTableProbabilisticAdmitter": _ADMISSION,
    "OPT_STATE_TYPE": _DTYPES,
    "OptimType": "EmbOptimType and DynamicEmbOptimType are the types of optimizers",
    "OptimizerArgs": _OPTIMIZER,
    "OptimizerT": _OPTIMIZER,
    "OptionsT": _TABLES,
    "ReplayContent": _DELTAS,
    "ReplayStats": _DELTAS,
    "RowWiseAdaGradDynamicEmbeddingOptimizer": _OPTIMIZER,
    "RwPooledEmbeddingDist": _INPUT,
    "RwSequenceEmbeddingDist": _INPUT,
    "SCORE_TYPE": _DTYPES,
    "SGDDynamicEmbeddingOptimizer": _OPTIMIZER,
    "SUPPORTED_COMPOUND_SCORE_STRATEGIES": _SCORES,
    "SUPPORTED_DIST_TYPES": _DIST,
    "ScoreStrategy": "annotate with DynamicEmbScoreStrategy; score_strategy also takes a tuple",
    "Storage": _STORAGE,
    "TableToPlace": _PLANNING,
    "UniqueOp": "use torch_dynemb.ops.unique_ids",
    "check_emb_collection_modules": _SHARDS,
    "complete_initializer_args": _INITIALIZERS,
    "create_dynamicemb_table": _TABLES,
    "data_type_to_dyn_emb": _DTYPES,
    "distributed_export": _FILES,
    "distributed_load": _FILES,
    "dtype_to_bytes": "use dtype.itemsize",
    "dyn_emb_to_torch": _DTYPES,
    "encode_checkpoint_file_path": _FILES,
    "export_keys_values": _FILES,
    "find_sharded_modules": _SHARDS,
    "get_constraint_capacity": "set num_embeddings, which is the capacity of the whole table",
    "get_dynamic_emb_module": _SHARDS,
    "get_eviction_score_strategy": _SCORES,
    "get_optimizer_ckpt_state_dim": _SIZES,
    "get_physical_score_order": _SCORES,
    "get_planner": _PLANNING,
    "get_required_arg": _OPTIMIZER,
    "group_key_of": "use get_grouped_key of DynamicEmbTableOptions",
    "is_valid_score_threshold": "incremental_dump checks its score_threshold",
    "load_key_values": _FILES,
    "local_export": _FILES,
    "local_load": _FILES,
    "normalize_score_strategy": _SCORES,
    "pad_optimizer_states_from_checkpoint": _FILES,
    "pop_erased_keys": _RECORDED,
    "replay_increment": _DELTAS,
    "score_dump_permutation": _SCORES,
    "score_load_permutation": _SCORES,
    "score_strategy_has_timestamp_column": _SCORES,
    "string_to_evict_strategy": _EVICTION,
    "string_to_opt_type": "EmbOptimType(text) converts it, DynamicEmbOptimType(text) 'ftrl'",
    "torch_dtype_to_np_dtype": _DTYPES,
    "torch_to_dyn_emb": _DTYPES,
    "truncate_optimizer_states_for_checkpoint": _FILES,
    "validate_score_strategy": _SCORES,
    "warning_for_cstm_score": _SCORES,
}
# By name within the package.
MODULES = {
    "_fake": _SERVING,
    "batched_dynamicemb_compute_kernel": _TABLES,
    "batched_dynamicemb_function": _TABLES,
    "batched_dynamicemb_tables": _TABLES,
    "construct_twin_module": _SERVING,
    "exportable_embedding": _SERVING,
    "exportable_tables": _SERVING,
    "extendable_buffer": _TABLES,
    "extendable_tensor": _TABLES,
    "filesystem": _FILES,
    "get_planner": _PLANNING,
    "index_range_meta": _SERVING,
    "inference": _SERVING,
    "initializer": _INITIALIZERS,
    "input_dist": _INPUT,
    "ir": _SERVING,
    "jit": "for a count that decays, give score_strategy=DynamicEmbScoreStrategy.LFU_DECAY",
    "key_ownership": _INPUT,
    "key_value_table": _TABLES,
    "lookup_layout": _TABLES,
    "lookup_meta": _SERVING,
    "output_dist": _INPUT,
    "scored_hashtable": _TABLES,
    "unique_op": NAMES["UniqueOp"],
    "utils": _DTYPES,
}


_EXTENSIONS = "dynamicemb_extensions"  # DynamicEmb's compiled library, beside its package


def _missing(module: str, name: str) -> str:
    """Say that a name or module of DynamicEmb is not offered; "" for others.

    Args:
        module: full name of the module that was asked, under any name of the package.
        name: that was asked for.
    """
    remedy = NAMES.get(name) or (MODULES.get(name) if module == _PACKAGE else None)
    shown = module.replace(_PACKAGE, "dynamicemb", 1)
    return f"torch_dynemb does not offer {shown}.{name} of DynamicEmb: {remedy}" if remedy else ""


def refusing(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module, which names what to use instead.

    Args:
        module: full name of the module.
    """
    return refusing_names(module, functools.partial(_missing, module))


class MissingModules:
    """Finder of modules that refuses those of DynamicEmb that are not offered.

    It comes after Python's own finders.

    Args:
        package: name under which programs import the package.
    """

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise ModuleNotFoundError for a module that is not offered.

        Args:
            name: full name of the module.
            path, target: unused, as in ``importlib.abc.MetaPathFinder``.

        Raises:
            ModuleNotFoundError: the module is one of DynamicEmb.
        """
        package, _, module = name.rpartition(".")
        if package == self.package and module in MODULES:
            raise ModuleNotFoundError(_missing(_PACKAGE, module), name=name)
        if name == _EXTENSIONS and self.package != _PACKAGE:
            raise ModuleNotFoundError(
                f"torch_dynemb does not offer {_EXTENSIONS} of DynamicEmb: use torch_dynemb.ops",
                name=name,
            )


__all__ = ["MODULES", "NAMES", "MissingModules", "refusing"]
