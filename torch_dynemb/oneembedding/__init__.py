"""Modules with the names and arguments of OneEmbedding from OneFlow (github.com/Oneflow-Inc)."""

from torch_dynemb.oneembedding import registration as _registration  # noqa: F401 - registers modules
from torch_dynemb.oneembedding.frozen import FrozenMultiTableEmbedding
from torch_dynemb.oneembedding.import_snapshot import import_snapshot
from torch_dynemb.oneembedding.initializers import (
    make_constant_initializer,
    make_normal_initializer,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)
from torch_dynemb.oneembedding.modules import MultiTableEmbedding, MultiTableMultiColumnEmbedding
from torch_dynemb.oneembedding.optimizer import Optimizer
from torch_dynemb.oneembedding.optimizers import Ftrl, SmartDecayAdam
from torch_dynemb.oneembedding.stores import (
    StoreOptions,
    make_cached_host_mem_store_options,
    make_cached_ssd_store_options,
    make_device_mem_store_options,
)
from torch_dynemb.oneembedding.table_reader import (
    KeysAndValues,
    PersistentTableReader,
    make_persistent_table_reader,
)
from torch_dynemb.oneembedding.table_writer import (
    PersistentTableWriter,
    make_persistent_table_writer,
)
from torch_dynemb.oneembedding.tables import (
    TableSpec,
    make_column_options,
    make_table,
    make_table_options,
)

__all__ = [
    "FrozenMultiTableEmbedding",
    "Ftrl",
    "KeysAndValues",
    "MultiTableEmbedding",
    "MultiTableMultiColumnEmbedding",
    "Optimizer",
    "PersistentTableReader",
    "PersistentTableWriter",
    "SmartDecayAdam",
    "StoreOptions",
    "TableSpec",
    "import_snapshot",
    "make_cached_host_mem_store_options",
    "make_cached_ssd_store_options",
    "make_column_options",
    "make_constant_initializer",
    "make_device_mem_store_options",
    "make_normal_initializer",
    "make_persistent_table_reader",
    "make_persistent_table_writer",
    "make_table",
    "make_table_options",
    "make_trunc_normal_initializer",
    "make_uniform_initializer",
]
