"""Where modules of earlier versions are now.

A pickle names the module of every class in it, and programs may have imported others.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# By package: modules, from what they were called to what they are called.
_MODULES = {
    "torch_dynemb": {
        "admission": "policy.admission",
        "compaction": "table.compaction",
        "evictions": "table.host_state",
        "freeze": "serving",
        "optim.config": "optim",
        "recis.id_exchange": "nn.id_exchange",
        "recis.tables.optimized_later": "nn.optimized_later",
        "recis.rank_group": "distributed.ranks",
        "row_access": "table.rows",
        "sending": "process.sending",
        "table_config": "table.config",
        "table_content": "table.content",
        "table_memory": "storage.host",
        "table_stats": "table.stats",
        "waiting_gradients": "table.pending_gradients",
    },
    "torch_dynemb.recis": {
        "bags": "embedding.bags",
        "feature_engine": "feature_ops.engine",
        "fused_ops": "feature_ops.fused",
        "hash_table": "tables.hash_table",
        "hooks": "tables.hooks",
        "launch": "embedding.joint_lookup",
        "options": "embedding.options",
        "ragged_tensor": "ragged.tensor",
        "slots": "tables.slots",
        "state_parts": "tables.sparse_parts",
    },
    "torch_dynemb.torchrec": {
        "dynamicemb_arguments": "dynamicemb.arguments",
        "estimators": "planning.estimators",
        "inspection": "state.inspect",
        "load_planner": "state.load_planner",
        "options": "planning.options",
        "planner": "planning.planner",
        "plans": "planning.plans",
        "shard_places": "state.shard_places",
        "table_state": "state.table_state",
        "tables": "sharding.tables",
    },
}
# Classes that have other names now.
_CLASSES = {
    "torch_dynemb.recis.launch": {"Launch": "JointLookup"},
    "torch_dynemb.waiting_gradients": {"WaitingGradients": "TableGradients"},
}


def resolve_moved_modules(package: str) -> None:
    """Gives the modules of a package the names of earlier versions beside their own.

    Args:
        package: such as ``"torch_dynemb"``; what a package inside of it has moved, it says itself.
    """
    for old, new in _MODULES[package].items():
        name = f"{package}.{old}"
        module = importlib.import_module(f"{package}.{new}")
        if name in _CLASSES:
            here, module = module, ModuleType(name)
            vars(module).update(vars(here))
            vars(module).update((was, getattr(here, now)) for was, now in _CLASSES[name].items())
        sys.modules[name] = module


__all__ = ["resolve_moved_modules"]
