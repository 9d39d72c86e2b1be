"""Arguments for every op of ``torch.ops.dynemb``: small groups, fresh tensors on every call."""

from __future__ import annotations

from op_cases import (
    ids,
    index,
    pooling,
    process,
    ragged,
    retrieval,
    row_files,
    rows,
    serving,
    storage,
    tiers,
)
from op_cases.groups import OPTIMIZERS, Case, make_group, pooled_call
from op_cases.names import ops_with_cases, schema

__all__ = [
    "CASES",
    "FAMILIES",
    "OPTIMIZERS",
    "REGISTERED",
    "Case",
    "make_group",
    "ops_with_cases",
    "pooled_call",
    "schema",
]

REGISTERED = tiers.REGISTERED
# Of each family, and the test files that compare its ops with a reference, the nearest first.
FAMILIES: dict[str, tuple[dict[str, dict[str, Case]], tuple[str, ...]]] = {
    "process": (
        process.CASES,
        (
            *("ops/test_simd.py", "ops/test_op_tags.py", "doctor/test_doctor.py"),
            *("table/test_initializers.py", "table/test_life_cycle.py"),
            *("process/test_memory.py", "nn/test_module_training.py"),
            "checkpoint/test_disturbed_saves.py",
        ),
    ),
    "ids": (
        ids.CASES,
        (
            *("ops/test_routing.py", "ops/test_ids_concat.py"),
            *("ops/test_feature_values.py", "ops/test_strings.py"),
        ),
    ),
    "pooling": (pooling.CASES, ("ops/test_pooling.py",)),
    "ragged": (ragged.CASES, ("ops/test_ragged_ops.py",)),
    "index": (
        index.CASES,
        (
            *("table/test_index.py", "table/test_life_cycle.py", "table/test_index_growth.py"),
            *(
                "table/test_policy_sequences.py",
                "table/test_compaction.py",
                "table/test_changes.py",
            ),
            "process/test_memory.py",
        ),
    ),
    "rows": (
        rows.CASES,
        (
            *("ops/test_lookup.py", "ops/test_quantized_lookup.py", "ops/test_quantized_rows.py"),
            *("optim/test_optimizers.py", "optim/test_split.py", "optim/test_reduced_gradients.py"),
            *("table/test_initializers.py", "checkpoint/test_copy_on_write.py"),
        ),
    ),
    "retrieval": (
        retrieval.CASES,
        ("retrieval/test_sampling.py", "retrieval/test_top_k.py"),
    ),
    "row_files": (row_files.CASES, ("serving/test_file_tables.py",)),
    "storage": (storage.CASES, ("ops/test_checksum.py", "ops/test_read_blocks.py")),
    "tiers": (
        tiers.CASES | {name: {"": case} for name, case in REGISTERED.items()},
        (
            *("ops/test_plan_moves.py", "storage/test_exactness.py", "table/test_stored_rows.py"),
            *("storage/test_room_before_insertion.py", "storage/test_snapshots.py"),
        ),
    ),
    "serving": (
        serving.CASES,
        (
            *("ops/test_frozen_lookup.py", "serving/test_live_tables.py"),
            "retrieval/test_live_search.py",
        ),
    ),
}
CASES: dict[str, dict[str, Case]] = {
    name: cases
    for family, _ in FAMILIES.values()
    for name, cases in family.items()
    if name not in REGISTERED
}
