"""Groups of tables: their tensors, and what is done to them."""

from torch_dynemb.table.clock import TableClock
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.evictions import Evictions
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.removal import Conditions
from torch_dynemb.table.scores import Scores
from torch_dynemb.table.state import GroupState
from torch_dynemb.table.stats import Usage

__all__ = [
    "Conditions",
    "Evictions",
    "GroupState",
    "Scores",
    "TableClock",
    "TableConfig",
    "TableGroup",
    "Usage",
]
