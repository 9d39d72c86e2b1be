"""Hash tables: rows by id, their optimizer state, admission of ids and removal of rows."""

from torch_dynemb.recis.tables.frozen_table import FrozenHashTable
from torch_dynemb.recis.tables.hash_table import HashTable
from torch_dynemb.recis.tables.hooks import (
    READ_ONLY,
    AdmitHook,
    FilterHook,
    RowFilter,
    register_admit_hook,
    register_filter_hook,
)
from torch_dynemb.recis.tables.slots import Slot, SlotGroup
from torch_dynemb.recis.tables.sparse_parts import (
    filter_out_sparse_param,
    filter_out_trainable_sparse_param,
    split_sparse_dense_state_dict,
)

__all__ = [
    "READ_ONLY",
    "AdmitHook",
    "FilterHook",
    "FrozenHashTable",
    "HashTable",
    "RowFilter",
    "Slot",
    "SlotGroup",
    "filter_out_sparse_param",
    "filter_out_trainable_sparse_param",
    "register_admit_hook",
    "register_filter_hook",
    "split_sparse_dense_state_dict",
]
