"""Groups of tables: their tensors, and the operations on them."""

from torch_dynemb.table.clock import TableClock
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.evictions import Evictions
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.options import GroupOptions
from torch_dynemb.table.removal import Conditions
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.scores import Scores
from torch_dynemb.table.state import GroupState
from torch_dynemb.table.stats import Usage

__all__ = [
    "Conditions",
    "Evictions",
    "GroupOptions",
    "GroupState",
    "RowBatch",
    "Scores",
    "TableClock",
    "TableConfig",
    "TableGroup",
    "Usage",
]
