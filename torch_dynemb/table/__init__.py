"""Groups of tables: their tensors, and what is done to them."""

from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.group import TableGroup

__all__ = ["TableConfig", "TableGroup"]
